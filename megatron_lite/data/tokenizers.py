"""Turns text into token ids and back: every --tokenizer-type."""

import importlib
import logging
import os
from collections.abc import Iterable, Sequence
from types import ModuleType, SimpleNamespace
from typing import NoReturn, Protocol

from megatron_lite.config.data_paths import TIKTOKEN_PATTERN, TIKTOKEN_SPECIAL, TOKENIZER, TOKENIZERS
from megatron_lite.data.text_files import END_OF_TEXT, replace_lone_surrogates
from megatron_lite.errors import DataError, UserError, first_line, is_panic
from megatron_lite.shared_files import read_foreign, require_regular

TOKENIZER_ENDINGS = (".json", ".txt", ".model", ".jinja", ".tiktoken")
MAX_TOKENIZER_BYTES = 2**27
SECONDS_TO_ANSWER = 10  # of Hugging Face's hub


class Tokenizer(Protocol):
    """Turns text into token ids and back.

    Can be pickled, to the same bytes in each process: that is how workers get it and a run that goes on knows it again.
    """

    @property
    def vocab_size(self) -> int:
        """The number of ids, that of the end-of-document token among them."""
        ...

    @property
    def eod(self) -> int | None:
        """The id of the end-of-document token; None if there is none."""
        ...

    @property
    def unknown(self) -> int | None:
        """The id that stands for a token that is not in the vocabulary; None if there is none."""
        ...

    def find_token(self, token: str) -> int | None:
        """The id of a token by its name; None for one that is not in the vocabulary."""
        ...

    def decode_text(self, ids: Iterable[int]) -> str:
        """The text without special tokens."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Iterable[int]) -> str: ...


class TokenizerFlags(Protocol):
    """The flags that describe a tokenizer, such as DataArgs or a command's options."""

    @property
    def tokenizer_type(self) -> str | None: ...

    @property
    def vocab_file(self) -> str | None: ...

    @property
    def merge_file(self) -> str | None: ...

    @property
    def vocab_size(self) -> int | None: ...

    @property
    def tokenizer_model(self) -> str | None: ...

    @property
    def tiktoken_pattern(self) -> str | None: ...

    @property
    def tiktoken_num_special_tokens(self) -> int: ...

    @property
    def tokenizer_special_tokens(self) -> Sequence[str] | None: ...

    @property
    def tokenizer_hf_include_special_tokens(self) -> bool: ...


DEFAULTS: dict[str, object] = {
    "vocab_file": None,
    "merge_file": None,
    "vocab_size": None,
    "tokenizer_model": None,
    "tiktoken_pattern": None,
    "tiktoken_num_special_tokens": TIKTOKEN_SPECIAL,
    "tokenizer_special_tokens": (),
    "tokenizer_hf_include_special_tokens": False,
}


def make_tokenizer(tokenizer_type: str, **flags: object) -> Tokenizer:
    """The tokenizer of one --tokenizer-type, with `flags` other than DEFAULTS."""
    return build_tokenizer(SimpleNamespace(tokenizer_type=tokenizer_type, **(DEFAULTS | flags)))


def build_tokenizer(options: TokenizerFlags) -> Tokenizer:
    """The tokenizer that flags describe.

    UserError for one that does not exist here or lacks its files. Packages are imported only then: some need what
    others do without.
    """
    kind = options.tokenizer_type or TOKENIZER
    model = options.tokenizer_model
    if kind not in TOKENIZERS:
        raise UserError(
            f"--tokenizer-type {kind}: not available, only {', '.join(TOKENIZERS)}; tokenize elsewhere and "
            "train on the .bin/.idx files with --tokenizer-type NullTokenizer --vocab-size N"
        )
    if kind == "ByteTokenizer":
        return ByteTokenizer()
    if kind == "NullTokenizer":
        return NullTokenizer(options.vocab_size)
    if kind == "GPT2BPETokenizer":
        from megatron_lite.data.byte_pairs import GPT2BPETokenizer

        return GPT2BPETokenizer(options.vocab_file, options.merge_file)
    if model is None:
        raise UserError(f"--tokenizer-model: missing, {kind} needs it; give its file or folder")
    special = options.tokenizer_special_tokens or ()
    if kind == "HuggingFaceTokenizer":
        return HuggingFaceTokenizer(model, options.tokenizer_hf_include_special_tokens, special)
    if kind == "TikTokenizer":
        from megatron_lite.data.byte_pairs import TikTokenizer

        pattern = options.tiktoken_pattern or TIKTOKEN_PATTERN
        return TikTokenizer(model, pattern, options.vocab_size, options.tiktoken_num_special_tokens, special)
    return SentencePieceTokenizer(kind, model)


class ByteTokenizer:
    """A tokenizer without files: each byte of UTF-8 is a token."""

    vocab_size = 257
    eod = 256
    unknown = None

    def find_token(self, token: str) -> int | None:
        return self.eod if token == END_OF_TEXT else None

    def decode_text(self, ids: Iterable[int]) -> str:
        return self.decode(token for token in ids if token != self.eod)

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
        self.unknown = None

    def find_token(self, token: str) -> int | None:
        return None

    def decode_text(self, ids: Iterable[int]) -> str:
        return self.decode(token for token in ids if token != self.eod)

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


def _import_optional(name: str, extra: str, kind: str) -> ModuleType:
    """A package that only some installations have. UserError, with the extra that brings it, if it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UserError(
            f"--tokenizer-type {kind}: needs the package {name}; pip install 'megatron_lite[{extra}]'"
        ) from None


class SentencePieceProcessor(Protocol):
    """The tokenizer of the package sentencepiece: what is used of it."""

    def get_piece_size(self) -> int: ...

    def eos_id(self) -> int: ...

    def unk_id(self) -> int: ...

    def piece_to_id(self, piece: str, /) -> int: ...

    def is_control(self, token: int, /) -> bool: ...

    def encode_as_ids(self, text: str, /) -> list[int]: ...

    def decode_ids(self, ids: list[int], /) -> str: ...


class SentencePieceTokenizer:
    """A .model file; eod is its end of sentence, or None if it has none. No token is put before a text."""

    def __init__(self, kind: str, model: str):
        """
        Args:
            kind: The --tokenizer-type that asks for it.
            model: Path of the file.

        Raises:
            UserError: It is no model, or the package is missing.
        """
        package = _import_optional("sentencepiece", "sentencepiece", kind)
        try:
            serialized = read_foreign(model)
        except OSError as error:
            raise UserError(
                f"--tokenizer-model {model}: cannot be read ({error.strerror}); give the .model file"
            ) from None
        try:
            if not serialized:  # which the package would take, and fail when it is used
                raise OSError("empty")
            self._processor: SentencePieceProcessor = package.SentencePieceProcessor(model_proto=serialized)
        except (RuntimeError, OSError):
            raise UserError(
                f"--tokenizer-model {model}: not a SentencePiece model; give the .model file, or another "
                "--tokenizer-type"
            ) from None
        self.vocab_size = self._processor.get_piece_size()
        end = self._processor.eos_id()
        self.eod = end if end >= 0 else None
        self.unknown = self._processor.unk_id()

    def find_token(self, token: str) -> int | None:
        found = self._processor.piece_to_id(token)
        return None if found == self.unknown else found

    def decode_text(self, ids: Iterable[int]) -> str:
        return self.decode(token for token in map(int, ids) if not self._processor.is_control(token))

    def encode(self, text: str) -> list[int]:
        return self._processor.encode_as_ids(replace_lone_surrogates(text))

    def decode(self, ids: Iterable[int]) -> str:
        return self._processor.decode_ids([int(i) for i in ids])


class Encoding(Protocol):
    """The tokens of a text, by the tokenizer in Rust."""

    @property
    def ids(self) -> list[int]: ...


class AddedToken(Protocol):
    """A token that was added to a vocabulary."""

    @property
    def special(self) -> bool: ...


class RustTokenizer(Protocol):
    """The tokenizer of the package tokenizers: what is used of it."""

    encode_special_tokens: bool  # whether a special token's text in a document is text

    def no_truncation(self) -> None: ...

    def no_padding(self) -> None: ...

    def get_vocab(self) -> dict[str, int]: ...

    def encode(self, text: str, /, *, add_special_tokens: bool) -> Encoding: ...

    def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> str: ...


class TransformersTokenizer(Protocol):
    """The tokenizer of the package transformers: what is used of it."""

    is_fast: bool  # whether the one in Rust does the work
    eos_token_id: int | None
    sep_token_id: int | None
    unk_token_id: int | None
    all_special_ids: list[int]
    added_tokens_decoder: dict[int, AddedToken]
    split_special_tokens: bool
    backend_tokenizer: RustTokenizer  # only of a fast one

    def __len__(self) -> int: ...

    def get_vocab(self) -> dict[str, int]: ...

    def add_tokens(self, tokens: list[str], /, *, special_tokens: bool) -> int: ...

    def encode(self, text: str, /, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> str: ...


class HuggingFaceTokenizer:
    """A folder that save_pretrained wrote, or a name on the hub; code that a repository brings along is never run.

    eod is its end of sequence, or its separator, or None. A special token's text in a document becomes that token, as
    in Megatron.
    """

    def __init__(self, model: str, include_special_tokens: bool, special_tokens: Sequence[str]):
        """
        Args:
            model: The folder or the name.
            include_special_tokens: Whether to keep tokens that it puts around each text, such as Llama's <s>.
            special_tokens: Further ones, numbered after the others unless it knows them.

        Raises:
            UserError: The folder or name gives no tokenizer.
        """
        whole = _open_hugging_face(model)
        if special_tokens:
            whole.add_tokens(list(special_tokens), special_tokens=True)
        self.vocab_size = len(whole)
        self.eod = whole.eos_token_id if whole.eos_token_id is not None else whole.sep_token_id
        self.unknown = whole.unk_token_id
        self._special = set(whole.all_special_ids)
        for token_id, token in whole.added_tokens_decoder.items():
            if token.special:
                self._special.add(token_id)
        self._include = include_special_tokens
        self._tokenizer: RustTokenizer | TransformersTokenizer = whole
        if whole.is_fast:
            # The tokenizer in Rust, without transformers' wrapping, which takes longer than short texts themselves.
            rust = whole.backend_tokenizer
            rust.no_truncation()
            rust.no_padding()
            rust.encode_special_tokens = whole.split_special_tokens
            self._tokenizer = rust

    def find_token(self, token: str) -> int | None:
        return self._tokenizer.get_vocab().get(token)

    def decode_text(self, ids: Iterable[int]) -> str:
        return self.decode(token for token in map(int, ids) if token not in self._special)

    def encode(self, text: str) -> list[int]:
        encoded = self._tokenizer.encode(replace_lone_surrogates(text), add_special_tokens=self._include)
        return encoded if isinstance(encoded, list) else encoded.ids

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=False)


def _open_hugging_face(model: str) -> TransformersTokenizer:
    """The tokenizer of a folder or a name. UserError if it gives none."""
    transformers = _import_optional("transformers", "hf", "HuggingFaceTokenizer")
    # What lies here first: a run on many ranks must not ask the hub on each of them.
    try:
        return _load_hugging_face(transformers, model, only_here=True)
    except BaseException as error:
        if os.path.exists(model):
            _refuse_hugging_face(model, error)
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
    if not _hub_answers():
        raise UserError(
            f"--tokenizer-model {model}: no such folder, not in Hugging Face's cache, and its hub cannot "
            "be reached; give a folder with tokenizer.json, or fetch it where there is a network"
        )
    try:
        return _load_hugging_face(transformers, model, only_here=False)
    except BaseException as error:  # noqa: BLE001 - raised again, as a UserError or as it is
        _refuse_hugging_face(model, error)


def _load_hugging_face(transformers: ModuleType, model: str, only_here: bool) -> TransformersTokenizer:
    """The tokenizer of a folder or a name, as the library gives it.

    Args:
        transformers: The library.
        model: The folder or the name.
        only_here: Whether the hub may not be asked.

    Raises:
        BaseException: Errors of every kind, by parsers and the Rust library.
    """
    muted = logging.root.manager.disable
    if only_here:
        logging.disable(logging.WARNING)  # the library's remarks on what was not found
    try:
        _require_plain_files(model)
        opened: TransformersTokenizer = transformers.AutoTokenizer.from_pretrained(
            model, trust_remote_code=False, local_files_only=only_here
        )
        return opened
    finally:
        logging.disable(muted)


def _refuse_hugging_face(model: str, error: BaseException) -> NoReturn:
    """Raise UserError for what the library raised, panics too; other errors, such as Ctrl-C, as they are."""
    if not (isinstance(error, Exception) or is_panic(error)):
        raise error
    why = first_line(error).strip().rstrip(".")
    if "trust_remote_code" in str(error):
        why = "it needs code of its own, which is not run here"
    raise UserError(
        f"--tokenizer-model {model}: no tokenizer ({why}); give a folder that save_pretrained wrote, or "
        "a name on the hub"
    ) from None


def _require_plain_files(folder: str) -> None:
    """OSError, before the library waits for it, for a pipe or device in the folder, or a file that no tokenizer has."""
    if os.path.isdir(folder):
        for entry in os.scandir(folder):
            if entry.name.endswith(TOKENIZER_ENDINGS) and not entry.is_dir():
                size = require_regular(entry.path)
                if size > MAX_TOKENIZER_BYTES:
                    raise OSError(f"{entry.name} has {size >> 20} MiB")


def _hub_answers() -> bool:
    """Ask the hub once, without the repetitions that the library makes for a minute where there is no network."""
    hub = _import_optional("huggingface_hub", "hf", "HuggingFaceTokenizer")
    if hub.constants.HF_HUB_OFFLINE:
        return False
    try:
        hub.utils.get_session().head(hub.constants.ENDPOINT, timeout=SECONDS_TO_ANSWER)
    except Exception:  # noqa: BLE001 - requests' or httpx's, by the library's version
        return False
    return True
