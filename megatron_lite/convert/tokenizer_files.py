"""Writes the tokenizer's part of a Hugging Face folder: files, and the ids that config.json repeats."""

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_lite.convert.config_file import write_json
from megatron_lite.data.text_files import END_OF_TEXT
from megatron_lite.data.tokenizers import make_tokenizer
from megatron_lite.errors import UserError
from megatron_lite.shared_files import read_foreign

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
VOCAB_FILE = "vocab.json"
MERGES_FILE = "merges.txt"
CARRIERS = (TOKENIZER_FILE, "tokenizer.model", VOCAB_FILE)  # one of them holds the vocabulary
GPT2_READER = "GPT2Tokenizer"
OTHERS = (CONFIG_FILE, MERGES_FILE, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")


@dataclass(frozen=True)
class TokenizerFiles:
    """A tokenizer that goes into the folder of its model."""

    flag: str  # that names it, for messages
    vocab_size: int  # 0: unknown
    ids: dict[str, int | None]  # bos_token_id and eos_token_id
    write: Callable[[Path, int], None]  # puts the files into a folder, of a model with so many positions
    reader: str = ""  # the class of transformers that reads them; empty: unknown

    def note(self, model_type: str) -> str | None:
        """A warning that AutoTokenizer would give other ids, from transformers 5 on."""
        if model_type != "qwen2" or self.reader in ("", "Qwen2Tokenizer"):
            return None
        cuts = "AutoTokenizer cuts text Qwen2's way for every such model"
        return f"{cuts}; use {self.reader}.from_pretrained for this one"


def describe_no_tokenizer() -> TokenizerFiles:
    """Describe that a model has no tokenizer."""
    # said to be none: transformers would take GPT-2's or Llama's
    ids: dict[str, int | None] = {"bos_token_id": None, "eos_token_id": None}
    return TokenizerFiles("", 0, ids, lambda folder, longest: None)


def describe_gpt2_tokenizer(vocab_file: str | None, merge_file: str | None) -> TokenizerFiles:
    """Describe a GPT2BPETokenizer. UserError if the two files are missing or do not match."""
    tokenizer = make_tokenizer("GPT2BPETokenizer", vocab_file=vocab_file, merge_file=merge_file)
    vocabulary = str(vocab_file)
    merges = str(merge_file)

    def write(folder: Path, longest: int) -> None:
        from tokenizers import AddedToken, ByteLevelBPETokenizer

        shutil.copyfile(vocabulary, folder / VOCAB_FILE)
        shutil.copyfile(merges, folder / MERGES_FILE)
        config = {
            "tokenizer_class": GPT2_READER,
            "add_prefix_space": False,
            "model_max_length": longest,
            "clean_up_tokenization_spaces": False,
            **dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT),
        }
        write_json(folder / CONFIG_FILE, config)
        # tokenizer.json, which spares transformers from building it
        fast = ByteLevelBPETokenizer.from_file(vocabulary, merges)
        fast.add_special_tokens([AddedToken(END_OF_TEXT, normalized=False, special=True)])
        fast.save(str(folder / TOKENIZER_FILE))

    ids = {"bos_token_id": tokenizer.eod, "eos_token_id": tokenizer.eod}
    return TokenizerFiles(f"--vocab-file {vocab_file}", tokenizer.vocab_size, ids, write, GPT2_READER)


def describe_copied_tokenizer(source: str) -> TokenizerFiles:
    """Describe the tokenizer of a folder in Hugging Face's form. UserError if it holds none."""
    folder = Path(source)
    present = [name for name in (*CARRIERS, *OTHERS) if (folder / name).is_file()]
    if not set(present) & set(CARRIERS):
        raise UserError(
            f"--tokenizer-model {source}: is no folder with one of {', '.join(CARRIERS)}; give the folder that "
            "a tokenizer's save_pretrained wrote."
        )
    try:
        vocabulary = _read_vocabulary(folder)
        special = _read_json(folder / CONFIG_FILE)
        ids = {f"{name}_token_id": _find_special_id(vocabulary, special, name) for name in ("bos", "eos")}
        size = max(vocabulary.values(), default=-1) + 1
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UserError(
            f"--tokenizer-model {source}: its {TOKENIZER_FILE}, {VOCAB_FILE} or {CONFIG_FILE} has not the form "
            "of a tokenizer; save it again."
        ) from None

    def write(target: Path, longest: int) -> None:
        for name in present:
            shutil.copyfile(folder / name, target / name)

    reader = str(special.get("tokenizer_class") or "").removesuffix("Fast")
    return TokenizerFiles(f"--tokenizer-model {source}", size, ids, write, reader)


def training_flags(folder: Path) -> list[str]:
    """The flags that train with the tokenizer of a Hugging Face folder; none if it holds none."""
    if (folder / VOCAB_FILE).is_file() and (folder / MERGES_FILE).is_file():
        files = [str(folder / VOCAB_FILE), str(folder / MERGES_FILE)]
        with suppress(UserError):  # another byte-level BPE, such as Qwen's: the general tokenizer reads it
            make_tokenizer("GPT2BPETokenizer", vocab_file=files[0], merge_file=files[1])
            return ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", files[0], "--merge-file", files[1]]
    if any((folder / name).is_file() for name in CARRIERS):
        return ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder)]
    return []


def _find_special_id(vocabulary: dict[str, int], special: dict[str, object], name: str) -> int | None:
    """The id of a special token.

    Args:
        vocabulary: Ids by token.
        special: The contents of tokenizer_config.json.
        name: bos or eos.
    """
    token = special.get(f"{name}_token")
    if isinstance(token, dict):  # with its properties
        token = token.get("content")
    if token is None:
        return None
    if not isinstance(token, str):
        raise TypeError(f"a token is a {type(token).__name__}")
    return vocabulary.get(token)


def _read_vocabulary(folder: Path) -> dict[str, int]:
    """Ids by token; empty for a file that only sentencepiece can read.

    KeyError, TypeError, ValueError or AttributeError for a file in another form.
    """
    known: dict[str, int] = {}
    fast = _read_json(folder / TOKENIZER_FILE)
    if not fast:
        for token, number in _read_json(folder / VOCAB_FILE).items():
            known[token] = _require_id(number)
        return known
    model = fast.get("model", {})
    entries = _require_dict(model).get("vocab", {})
    if isinstance(entries, dict):
        for token, number in entries.items():
            known[token] = _require_id(number)
    elif isinstance(entries, list):
        for number, (token, _) in enumerate(entries):
            known[token] = number
    else:
        raise TypeError(f"the vocabulary is a {type(entries).__name__}")
    added = fast.get("added_tokens", [])
    if not isinstance(added, list):
        raise TypeError(f"the added tokens are a {type(added).__name__}")
    for token in added:
        known[token["content"]] = _require_id(token["id"])
    return known


def _require_id(number: object) -> int:
    """A token's id. TypeError for anything else."""
    if not isinstance(number, int):
        raise TypeError(f"an id is a {type(number).__name__}")
    return number


def _require_dict(values: object) -> dict[str, object]:
    """A JSON object. TypeError for anything else."""
    if not isinstance(values, dict):
        raise TypeError(f"a {type(values).__name__} in the place of an object")
    return values


def _read_json(path: Path) -> dict[str, object]:
    """The JSON object in a file, empty if there is no file. UserError for one that cannot be read as that."""
    values: object = {}
    try:
        if path.is_file():
            values = json.loads(read_foreign(path))
    except (OSError, ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise UserError(f"--tokenizer-model {path}: cannot be read as a JSON object; save the tokenizer again.")
    return values
