"""The token file that all contestants read: Megatron's .bin is nothing but ids, so that others can map it too."""

import sysconfig
from pathlib import Path

import numpy as np

from benchmarks.training.work import VOCABULARIES
from megatron_lite.cli.corpus import library_sources
from megatron_lite.data.indexed_writer import IndexedWriter
from megatron_lite.data.tokenizers import make_tokenizer
from megatron_lite.errors import UserError
from megatron_lite.units import MIB, count

TEXT_BYTES = 8 * MIB
PAIRS = 256 * 256


def write_tokens(
    prefix: Path, vocabulary: int, text: Path | None, vocab_file: Path | None, merge_file: Path | None
) -> str:
    """Write PREFIX.bin and PREFIX.idx; returns what they hold, in words. UserError for files that do not serve."""
    documents, source = _documents(text)
    if vocab_file:
        tokenizer = make_tokenizer("GPT2BPETokenizer", vocab_file=str(vocab_file), merge_file=str(merge_file))
        encode, kind = tokenizer.encode, "GPT-2's byte pairs"
    elif vocabulary == VOCABULARIES["byte"]:
        encode, kind = _bytes, "bytes"
    else:
        encode, kind = _Spread(vocabulary), f"pairs of bytes, spread pseudo-randomly over {count(vocabulary)} ids"
    with IndexedWriter(str(prefix), vocabulary) as writer:
        for document in documents:
            writer.add_document(encode(document))
    return f"{source}: {count(writer.num_tokens)} tokens, {kind}"


def _documents(text: Path | None) -> tuple[list[str], str]:
    if text is None:
        return list(library_sources(Path(sysconfig.get_paths()["stdlib"]), TEXT_BYTES)), "Python's own sources"
    try:
        return [text.read_text(encoding="utf-8")], text.name
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--text {text}: cannot be read as UTF-8 ({error}); give another file") from None


def _bytes(document: str) -> np.ndarray:
    return np.frombuffer(document.encode("utf-8"), np.uint8)


class _Spread:
    """Two bytes become one id, as often as they occur together: far more ids than bytes, and far from equally often."""

    def __init__(self, vocabulary: int):
        self._ids = np.random.default_rng(0).permutation(PAIRS) % vocabulary

    def __call__(self, document: str) -> np.ndarray:
        numbers = _bytes(document)
        numbers = numbers[: len(numbers) // 2 * 2].reshape(-1, 2).astype(np.int64)
        return self._ids[numbers[:, 0] * 256 + numbers[:, 1]]
