"""Makes tests/data/infilling_samples.json: `python tests/infilling_samples.py CHECKOUT` of Megatron-LM.

The samples are those that its GPTFIMDataset gives, with its tokenizer, for the cases of tests/support/infilling_cases.py.
The classes are the checkout's, what stands below them the installed megatron-core's.
"""

import importlib
import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from support.infilling_cases import (
    CASES,
    NUM_SAMPLES,
    SAMPLES,
    SEED,
    SEQ_LENGTH,
    TOKENS,
    write_corpus,
    write_hugging_face,
)

LIBRARIES = "megatron.core.tokenizers.text.libraries"


def load(checkout: Path, file: str, package: str = ""):
    """A module of Megatron-LM by its file. package: whose modules it names from there."""
    name = f"{package}.{Path(file).stem}".lstrip(".")
    spec = importlib.util.spec_from_file_location(name, checkout / file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def main(checkout: Path) -> None:
    """Write the samples of all cases."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    importlib.import_module(LIBRARIES)
    module = load(checkout, "megatron/training/datasets/fim_dataset.py")
    libraries = load(checkout, f"{LIBRARIES.replace('.', '/')}/huggingface_tokenizer.py", LIBRARIES)
    made = {}
    with tempfile.TemporaryDirectory() as folder:
        prefix = write_corpus(Path(folder))
        library = libraries.HuggingFaceTokenizer(write_hugging_face(folder))
        # GPTDataset asks for the tokenizer's own names
        names = {"eod": library.eod, "pad": library.eod, "vocab_size": library.vocab_size, "unique_identifiers": {}}
        tokenizer = SimpleNamespace(_tokenizer=library, **names)
        for name, settings in CASES.items():
            config = module.GPTFIMDatasetConfig(
                random_seed=SEED,
                sequence_length=SEQ_LENGTH,
                blend=([prefix], None),
                split="1,0,0",
                path_to_cache=None,
                tokenizer=tokenizer,
                reset_position_ids=False,
                reset_attention_mask=False,
                eod_mask_loss=False,
                fim_extra_tokens=TOKENS,
                **{f"fim_{key}": value for key, value in settings.items()},
            )
            indexed = IndexedDataset(prefix, multimodal=False, mmap=True)
            indices = np.arange(len(indexed.document_indices) - 1, dtype=np.int32)
            dataset = module.GPTFIMDataset(indexed, prefix, indices, NUM_SAMPLES, Split.train, config)
            samples = [dataset._query_document_sample_shuffle_indices(i)[0].tolist() for i in range(NUM_SAMPLES)]
            made[name] = samples
    cases = []
    for name, samples in made.items():
        rows = ",\n".join(map(json.dumps, samples))
        cases.append(f'"{name}": [\n{rows}\n]')
    SAMPLES.write_text("{\n" + ",\n".join(cases) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
