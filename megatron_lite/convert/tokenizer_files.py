"""The tokenizer's part of a Hugging Face folder: files, and the ids that config.json repeats."""

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

TOKENIZER_FILE, CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
VOCAB_FILE, MERGES_FILE = "vocab.json", "merges.txt"
CARRIERS = (TOKENIZER_FILE, "tokenizer.model", VOCAB_FILE)  # one of them holds the vocabulary
GPT2_READER = "GPT2Tokenizer"
OTHERS = (CONFIG_FILE, MERGES_FILE, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")


@dataclass(frozen=True)
class TokenizerFiles:
    """flag: what named it, for messages. vocab_size: its ids; 0 if unknown. ids: bos_token_id and eos_token_id.

    write(folder, longest): put the files there; longest is the model's number of positions.
    reader: the class of transformers that reads them; empty if unknown.
    """

    flag: str
    vocab_size: int
    ids: dict[str, int | None]
    write: Callable[[Path, int], None]
    reader: str = ""

    def note(self, model_type: str) -> str | None:
        """A warning that AutoTokenizer would give other ids, from transformers 5 on."""
        if model_type != "qwen2" or self.reader in ("", "Qwen2Tokenizer"):
            return None
        cuts = "AutoTokenizer cuts text Qwen2's way for every such model"
        return f"{cuts}; use {self.reader}.from_pretrained for this one"


def describe_no_tokenizer() -> TokenizerFiles:
    """For a model without a tokenizer. The ids must be said to be none: transformers would take GPT-2's or Llama's."""
    return TokenizerFiles("", 0, {"bos_token_id": None, "eos_token_id": None}, lambda folder, longest: None)


def describe_gpt2_tokenizer(vocab_file: str | None, merge_file: str | None) -> TokenizerFiles:
    """Of GPT2BPETokenizer. UserError if the two files are missing or do not match."""
    tokenizer = make_tokenizer("GPT2BPETokenizer", vocab_file=vocab_file, merge_file=merge_file)

    def write(folder: Path, longest: int):
        from tokenizers import AddedToken, ByteLevelBPETokenizer

        shutil.copyfile(vocab_file, folder / VOCAB_FILE)
        shutil.copyfile(merge_file, folder / MERGES_FILE)
        config = {
            "tokenizer_class": GPT2_READER,
            "add_prefix_space": False,
            "model_max_length": longest,
            "clean_up_tokenization_spaces": False,
            **dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT),
        }
        write_json(folder / CONFIG_FILE, config)
        # tokenizer.json, which spares transformers from building it
        fast = ByteLevelBPETokenizer.from_file(vocab_file, merge_file)
        fast.add_special_tokens([AddedToken(END_OF_TEXT, normalized=False, special=True)])
        fast.save(str(folder / TOKENIZER_FILE))

    ids = {"bos_token_id": tokenizer.eod, "eos_token_id": tokenizer.eod}
    return TokenizerFiles(f"--vocab-file {vocab_file}", tokenizer.vocab_size, ids, write, GPT2_READER)


def describe_copied_tokenizer(source: str) -> TokenizerFiles:
    """Of a folder in Hugging Face's form. UserError if it holds no tokenizer."""
    folder = Path(source)
    present = [name for name in (*CARRIERS, *OTHERS) if (folder / name).is_file()]
    if not set(present) & set(CARRIERS):
        raise UserError(
            f"--tokenizer-model {source}: is no folder with one of {', '.join(CARRIERS)}; give the folder that "
            "a tokenizer's save_pretrained wrote."
        )
    try:
        vocabulary, special = _vocabulary(folder), _read_json(folder / CONFIG_FILE)
        ids = {}
        for name in ("bos", "eos"):
            token = special.get(f"{name}_token")  # bare, or with its properties
            ids[f"{name}_token_id"] = vocabulary.get(token.get("content") if isinstance(token, dict) else token)
        size = max(vocabulary.values(), default=-1) + 1
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UserError(
            f"--tokenizer-model {source}: its {TOKENIZER_FILE}, {VOCAB_FILE} or {CONFIG_FILE} has not the form "
            "of a tokenizer; save it again."
        ) from None

    def write(target: Path, longest: int):
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


def _vocabulary(folder: Path) -> dict[str, int]:
    """{token: id}; empty for a file that only sentencepiece can read."""
    fast = _read_json(folder / TOKENIZER_FILE)
    if not fast:
        return _read_json(folder / VOCAB_FILE)
    entries = fast.get("model", {}).get("vocab", {})
    known = entries if isinstance(entries, dict) else {token: i for i, (token, _) in enumerate(entries)}
    return known | {token["content"]: token["id"] for token in fast.get("added_tokens", [])}


def _read_json(path: Path) -> dict:
    try:
        values = json.loads(read_foreign(path)) if path.is_file() else {}
    except (OSError, ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise UserError(f"--tokenizer-model {path}: cannot be read as a JSON object; save the tokenizer again.")
    return values
