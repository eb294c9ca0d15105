"""A small corpus with its tokenizers and the ways to fill in the middle, for what Megatron-LM makes of them and what we do."""

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_lite.data.byte_pairs import byte_alphabet
from megatron_lite.data.indexed_writer import IndexedWriter
from megatron_lite.data.tokenizers import make_tokenizer

SAMPLES = Path(__file__).parents[1] / "data" / "infilling_samples.json"
END = "<|endoftext|>"
TOKENS = {"prefix": "<fim_prefix>", "middle": "<fim_middle>", "suffix": "<fim_suffix>", "pad": "<fim_pad>", "eod": END}
FILE_END = "<file_sep>"
MERGES = ("t h", "th e", "Ġ the", "i n", "e r", "o n", "a n", "an d", "Ġ and", "Ġ a")
SEQ_LENGTH = 40
SEED = 1234
NUM_SAMPLES = 24
# {name: settings in the flags' names, without fim_}
CASES = {
    "both_forms": {"rate": 0.7, "spm_rate": 0.5},
    "always_suffix_first": {"rate": 1.0, "spm_rate": 1.0},
    "fragments": {"rate": 0.9, "spm_rate": 0.4, "split_sample": FILE_END, "fragment_rate": 0.6},
    "unless_begins": {"rate": 1.0, "spm_rate": 0.3, "no_prefix": "the"},
}
WORDS = [
    "the",
    "rain",
    "in",
    "spain",
    "and",
    "then",
    "the",
    "other",
    "thing;",
    "naïve",
    "café",
    "–",
    "ünïcode",
    "日本",
    "on",
    "a",
    "line\n",
]


def write_tokenizer(folder: Path) -> tuple[str, str]:
    """GPT-2's files with a few merges: (vocab.json, merges.txt)."""
    special = [*TOKENS.values(), FILE_END]
    merged = [pair.replace(" ", "") for pair in MERGES]
    vocabulary = {token: number for number, token in enumerate([*byte_alphabet(), *merged, *special])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(MERGES) + "\n", encoding="utf-8")
    return str(folder / "vocab.json"), str(folder / "merges.txt")


def write_corpus(folder: Path) -> str:
    """The prefix of documents of several files each."""
    vocab_file, merge_file = write_tokenizer(folder)
    tokenizer = make_tokenizer("GPT2BPETokenizer", vocab_file=vocab_file, merge_file=merge_file)
    random = np.random.RandomState(7)
    with IndexedWriter(str(folder / "corpus"), tokenizer.vocab_size) as writer:
        for _ in range(30):
            ids: list[int] = []
            for _ in range(random.randint(1, 4)):
                words = random.choice(WORDS, random.randint(0, 12))
                ids += [*tokenizer.encode(" ".join(words)), tokenizer.find_token(FILE_END)]
            writer.add_document([*ids[:-1], tokenizer.eod])
    return str(folder / "corpus")


def write_hugging_face(folder: str) -> str:
    """The tokenizer of write_tokenizer's files, as Hugging Face keeps it; returns its folder."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    model = tokenizers.models.BPE.from_file(f"{folder}/vocab.json", f"{folder}/merges.txt")
    whole = tokenizers.Tokenizer(model)
    whole.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    whole.decoder = tokenizers.decoders.ByteLevel()
    special = [*(token for name, token in TOKENS.items() if name != "eod"), FILE_END]
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=whole, eos_token=END, unk_token=END, additional_special_tokens=special
    ).save_pretrained(f"{folder}/hugging_face")
    return f"{folder}/hugging_face"
