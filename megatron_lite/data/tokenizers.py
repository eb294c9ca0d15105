"""Text to token ids and back: every --tokenizer-type."""

import contextlib
import importlib
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType
from typing import Protocol

from megatron_lite.config.data_paths import TIKTOKEN_PATTERN, TIKTOKEN_SPECIAL, TOKENIZER, TOKENIZERS
from megatron_lite.data.text_files import END_OF_TEXT, replace_lone_surrogates
from megatron_lite.errors import DataError, UserError

SECONDS_TO_ANSWER = 10  # of Hugging Face's hub


class Tokenizer(Protocol):
    """vocab_size counts the end-of-document token, whose id is eod; None if there is no such token.

    Can be pickled, to the same bytes in each process: that is how workers get it and a run that goes on knows it again.
    """

    vocab_size: int
    eod: int | None

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Iterable[int]) -> str: ...


def build_tokenizer(options) -> Tokenizer:
    """The tokenizer that flags describe; options has an attribute for each, such as DataArgs or a command's options."""
    return make_tokenizer(
        options.tokenizer_type or TOKENIZER,
        vocab_file=options.vocab_file,
        merge_file=options.merge_file,
        vocab_size=options.vocab_size,
        tokenizer_model=options.tokenizer_model,
        tiktoken_pattern=options.tiktoken_pattern,
        tiktoken_num_special_tokens=options.tiktoken_num_special_tokens,
        tokenizer_special_tokens=options.tokenizer_special_tokens,
        tokenizer_hf_include_special_tokens=options.tokenizer_hf_include_special_tokens,
    )


def make_tokenizer(
    tokenizer_type: str,
    *,
    vocab_file: str | None = None,
    merge_file: str | None = None,
    vocab_size: int | None = None,
    tokenizer_model: str | None = None,
    tiktoken_pattern: str | None = None,
    tiktoken_num_special_tokens: int = TIKTOKEN_SPECIAL,
    tokenizer_special_tokens: tuple[str, ...] = (),
    tokenizer_hf_include_special_tokens: bool = False,
) -> Tokenizer:
    """The tokenizer of Megatron's --tokenizer-type. UserError for one that does not exist here or lacks its files.

    Packages are imported only then: some need what others do without.
    """
    if tokenizer_type not in TOKENIZERS:
        raise UserError(
            f"--tokenizer-type {tokenizer_type}: not available, only {', '.join(TOKENIZERS)}; tokenize elsewhere and "
            "train on the .bin/.idx files with --tokenizer-type NullTokenizer --vocab-size N"
        )
    if tokenizer_type == "ByteTokenizer":
        return ByteTokenizer()
    if tokenizer_type == "NullTokenizer":
        return NullTokenizer(vocab_size)
    if tokenizer_type == "GPT2BPETokenizer":
        from megatron_lite.data.byte_pairs import GPT2BPETokenizer

        return GPT2BPETokenizer(vocab_file, merge_file)
    if tokenizer_model is None:
        raise UserError(f"--tokenizer-model: missing, {tokenizer_type} needs it; give its file or folder")
    if tokenizer_type == "HuggingFaceTokenizer":
        return HuggingFaceTokenizer(
            tokenizer_model, tokenizer_hf_include_special_tokens, tokenizer_special_tokens or ()
        )
    if tokenizer_type == "TikTokenizer":
        from megatron_lite.data.byte_pairs import TikTokenizer

        return TikTokenizer(
            tokenizer_model,
            tiktoken_pattern or TIKTOKEN_PATTERN,
            vocab_size,
            tiktoken_num_special_tokens,
            tokenizer_special_tokens or (),
        )
    return SentencePieceTokenizer(tokenizer_type, tokenizer_model)


class ByteTokenizer:
    """One token per byte of UTF-8; needs no files."""

    vocab_size = 257
    eod = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", errors="replace"))

    def decode(self, ids: Iterable[int]) -> str:
        pieces = [END_OF_TEXT.encode() if i == self.eod else bytes([i]) for i in ids]
        return b"".join(pieces).decode("utf-8", errors="replace")


class NullTokenizer:
    """Text that consists of ids already; for files that were tokenized elsewhere. The id after the last one is eod."""

    def __init__(self, vocab_size: int | None):
        if not vocab_size or vocab_size < 1:
            raise UserError(f"--vocab-size {vocab_size}: NullTokenizer needs the number of ids; for example 32000")
        self.vocab_size = vocab_size + 1
        self.eod = vocab_size

    def encode(self, text: str) -> list[int]:
        try:
            return [int(word) for word in text.split()]
        except ValueError as error:
            wrong = str(error).rpartition(": ")[2]
            raise DataError(
                f"--tokenizer-type NullTokenizer: {wrong} in the text is no integer; choose another tokenizer for text"
            ) from None

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(str(i) for i in ids)


# --- packages that only some installations have


def import_optional(name: str, extra: str, kind: str) -> ModuleType:
    """The package. UserError, which names the --tokenizer-type `kind` and the extra that brings it, if it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UserError(
            f"--tokenizer-type {kind}: needs the package {name}; pip install 'megatron_lite[{extra}]'"
        ) from None


class SentencePieceTokenizer:
    """A .model file; eod is its end of sentence, or None if it has none. No token is put before a text.

    UserError if the file is no model; `kind` is the --tokenizer-type that asks for it.
    """

    def __init__(self, kind: str, model: str):
        package = import_optional("sentencepiece", "sentencepiece", kind)
        try:
            with open(model, "rb") as file:
                serialized = file.read()
        except OSError as error:
            raise UserError(
                f"--tokenizer-model {model}: cannot be read ({error.strerror}); give the .model file"
            ) from None
        try:
            if not serialized:  # which the package would take, and fail when it is used
                raise OSError("empty")
            self._processor = package.SentencePieceProcessor(model_proto=serialized)
        except (RuntimeError, OSError):
            raise UserError(
                f"--tokenizer-model {model}: not a SentencePiece model; give the .model file, or another "
                "--tokenizer-type"
            ) from None
        self.vocab_size = self._processor.get_piece_size()
        end = self._processor.eos_id()
        self.eod = end if end >= 0 else None

    def encode(self, text: str) -> list[int]:
        return self._processor.encode_as_ids(replace_lone_surrogates(text))

    def decode(self, ids: Iterable[int]) -> str:
        return self._processor.decode_ids([int(i) for i in ids])


class HuggingFaceTokenizer:
    """A folder that save_pretrained wrote, or a name on the hub; code that a repository brings along is never run.

    eod is its end of sequence, or its separator, or None. A special token's text in a document becomes that token, as
    in Megatron. include_special_tokens: also those that the tokenizer puts around each text, such as Llama's <s>.
    special_tokens: further ones, numbered after the others unless it knows them.
    UserError for a folder or name that gives no tokenizer.
    """

    def __init__(self, model: str, include_special_tokens: bool = False, special_tokens: Sequence[str] = ()):
        whole = _open_hugging_face(model)
        if special_tokens:
            whole.add_tokens(list(special_tokens), special_tokens=True)
        self.vocab_size = len(whole)
        self.eod = whole.eos_token_id if whole.eos_token_id is not None else whole.sep_token_id
        self._include = include_special_tokens
        self._fast = _without_limits(whole) if whole.is_fast else None
        self._slow = None if whole.is_fast else whole

    def encode(self, text: str) -> list[int]:
        text = replace_lone_surrogates(text)
        if self._fast:
            return self._fast.encode(text, add_special_tokens=self._include).ids
        return self._slow.encode(text, add_special_tokens=self._include)

    def decode(self, ids: Iterable[int]) -> str:
        return (self._fast or self._slow).decode([int(i) for i in ids], skip_special_tokens=False)


def _without_limits(whole):
    """The tokenizer in Rust, called without transformers' wrapping, which takes longer than short texts themselves."""
    fast = whole.backend_tokenizer
    fast.no_truncation()
    fast.no_padding()
    fast.encode_special_tokens = whole.split_special_tokens
    return fast


def _open_hugging_face(model: str):
    transformers = import_optional("transformers", "hf", "HuggingFaceTokenizer")
    try:
        with _silence_warnings():
            # What lies here first: a run on many ranks must not ask the hub on each of them.
            return _load_pretrained(transformers, model, local_files_only=True)
    except Exception as error:  # noqa: BLE001 - parsers and the Rust library raise errors of every kind
        if os.path.exists(model):
            raise _unusable(model, error) from None
    if not _hub_answers():
        raise UserError(
            f"--tokenizer-model {model}: no such folder, not in Hugging Face's cache, and its hub cannot "
            "be reached; give a folder with tokenizer.json, or fetch it where there is a network"
        )
    try:
        return _load_pretrained(transformers, model, local_files_only=False)
    except Exception as error:  # noqa: BLE001 - the same
        raise _unusable(model, error) from None


def _load_pretrained(transformers, model: str, **where):
    return transformers.AutoTokenizer.from_pretrained(model, trust_remote_code=False, **where)


def _unusable(model: str, error: Exception) -> UserError:
    if "trust_remote_code" in str(error):
        why = "it needs code of its own, which is not run here"
    else:
        why = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
    return UserError(
        f"--tokenizer-model {model}: no tokenizer ({why}); give a folder that save_pretrained wrote, or "
        "a name on the hub"
    )


def _hub_answers() -> bool:
    """One question without the repetitions that the library makes for a minute where there is no network."""
    hub = import_optional("huggingface_hub", "hf", "HuggingFaceTokenizer")
    if hub.constants.HF_HUB_OFFLINE:
        return False
    try:
        hub.utils.get_session().head(hub.constants.ENDPOINT, timeout=SECONDS_TO_ANSWER)
    except Exception:  # noqa: BLE001 - requests' or httpx's, by the library's version
        return False
    return True


@contextlib.contextmanager
def _silence_warnings() -> Iterator[None]:
    """Without the library's remarks on what was not found."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
