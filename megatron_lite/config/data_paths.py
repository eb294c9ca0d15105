"""Parses the words of --data-path and --split, and the files that hold such words."""

import glob
import json
import math
import re
from dataclasses import replace

from megatron_lite.config.args import DataArgs
from megatron_lite.errors import DataError
from megatron_lite.shared_files import read_foreign
from megatron_lite.units import is_number

SPLIT = "969,30,1"  # shares of training, validation and test
SENTENCE_PIECE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")  # one and the same here
OF_A_MODEL = ("HuggingFaceTokenizer", *SENTENCE_PIECE, "TikTokenizer")  # they read --tokenizer-model
TOKENIZERS = ("GPT2BPETokenizer", *OF_A_MODEL, "ByteTokenizer", "NullTokenizer")  # the first one when left out
TOKENIZER = TOKENIZERS[0]
TIKTOKEN_PATTERN = "v2"
TIKTOKEN_SPECIAL = 1000
BATCHES_AHEAD = 4  # of the loader, per worker


def parse_blend(words: tuple[str, ...] | list[str], flag: str) -> tuple[list[str], list[float] | None]:
    """Split ("0.3", "a", "0.7", "b") into (["a", "b"], [0.3, 0.7]); bare prefixes have the weights None.

    As in Megatron, an odd number of words means prefixes only. DataError for a mixture of weights and none, and for
    weights that are not above 0.
    """
    words = [word.strip() for word in words]
    if len(words) % 2 or not any(is_number(word) for word in words[::2]):
        return words, None
    for word in words[::2]:
        if not is_number(word):
            raise DataError(f"{flag} {' '.join(words)}: '{word}' should be a weight; give one for every prefix or none")
    weights = [float(word) for word in words[::2]]
    if not all(0 < weight < math.inf for weight in weights):
        raise DataError(f"{flag}: weights {weights} must all be above 0; leave out a data set that is unused")
    return words[1::2], weights


def read_argument_files(d: DataArgs) -> DataArgs:
    """The flags as if the words of --data-args-path or --per-split-data-args-path had been typed.

    The first is white-space-separated words of --data-path; the second is JSON, {"train": [...], "valid": [...],
    "test": [...]}, each the words of one split, null or left out for none. DataError if the file is neither.
    """
    if d.data_args_path is not None:
        words = tuple(_read("--data-args-path", d.data_args_path).split())
        if not words:
            raise DataError(f"--data-args-path {d.data_args_path}: is empty; write what --data-path takes into it")
        return replace(d, data_path=words)
    if d.per_split_data_args_path is not None:
        flag = f"--per-split-data-args-path {d.per_split_data_args_path}"
        try:
            splits = json.loads(_read("--per-split-data-args-path", d.per_split_data_args_path))
        except (ValueError, RecursionError):
            splits = None
        if not isinstance(splits, dict) or set(splits) - {"train", "valid", "test"}:
            raise DataError(
                f'{flag}: not JSON of the form {{"train": [...], "valid": [...], "test": [...]}}; write it so, or give '
                "--train-data-path and its kin"
            )
        given = {name: words for name, words in splits.items() if words is not None}
        for name, words in given.items():
            if not (isinstance(words, list) and all(isinstance(word, (str, int, float)) for word in words)):
                raise DataError(f'{flag}: "{name}" is not a list of strings; write what --{name}-data-path takes')
        train, valid, test = (tuple(map(str, given.get(name, ()))) for name in ("train", "valid", "test"))
        return replace(d, train_data_path=train, valid_data_path=valid, test_data_path=test)
    return d


def _read(flag: str, path: str) -> str:
    try:
        return read_foreign(path).decode("utf-8-sig")  # some editors put a byte order mark before the first word
    except OSError as error:
        raise DataError(f"{flag} {path}: cannot be read ({error.strerror}); check the path") from None
    except UnicodeDecodeError:
        raise DataError(f"{flag} {path}: not UTF-8; give a text file") from None


def split_shares(split: str) -> list[float]:
    """Read --split: "949,50,1" -> [949.0, 50.0, 1.0]; missing shares are 0. DataError if it does not say that.

    As in Megatron-LM, quotes and brackets around numbers, which scripts may pass on, do not count.
    """
    words = [word for word in re.split(r"[,;:/\s'\"`()\[\]{}]+", split) if word]
    shares = [float(word) if is_number(word) else math.nan for word in words]
    are_sound = all(0 <= share < math.inf for share in shares) and sum(shares) > 0
    if not are_sound or len(shares) > 3:
        raise DataError(f"--split {split}: needs one to three numbers, none negative, not all 0; for example 969,30,1")
    return shares + [0.0] * (3 - len(shares))


def find_written_prefix(prefix: str) -> str | None:
    """The data set that preprocessing made of an output prefix, by the prefix of its files; None if there is none.

    It is PREFIX_text_document, or else the first of another key's.
    """
    written = sorted(glob.glob(f"{glob.escape(prefix)}_*_document.idx"))
    usual = f"{prefix}_text_document.idx"
    found = usual if usual in written else next(iter(written), None)
    return found.removesuffix(".idx") if found else None
