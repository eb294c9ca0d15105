"""Text to token ids and back."""

from collections.abc import Iterable
from typing import Protocol

from megatron_lite.config.data_defaults import TIKTOKEN_PATTERN, TIKTOKEN_SPECIAL, TOKENIZER, TOKENIZERS
from megatron_lite.data.byte_level import END_OF_TEXT
from megatron_lite.errors import DataError, UserError


class Tokenizer(Protocol):
    """vocab_size counts the end-of-document token, whose id is eod; None if there is no such token.

    Can be pickled, to the same bytes in each process: that is how workers get it and a run that goes on knows it again.
    """

    vocab_size: int
    eod: int | None

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Iterable[int]) -> str: ...


def tokenizer_of(options) -> Tokenizer:
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

    Its module is imported only then: some need packages that others do without.
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
        from megatron_lite.data.gpt2_bpe import GPT2BPETokenizer

        return GPT2BPETokenizer(vocab_file, merge_file)
    if tokenizer_model is None:
        raise UserError(f"--tokenizer-model: missing, {tokenizer_type} needs it; give its file or folder")
    if tokenizer_type == "HuggingFaceTokenizer":
        from megatron_lite.data.hugging_face import HuggingFaceTokenizer

        return HuggingFaceTokenizer(
            tokenizer_model, tokenizer_hf_include_special_tokens, tokenizer_special_tokens or ()
        )
    if tokenizer_type == "TikTokenizer":
        from megatron_lite.data.tiktoken_json import TikTokenizer

        return TikTokenizer(
            tokenizer_model,
            tiktoken_pattern or TIKTOKEN_PATTERN,
            vocab_size,
            tiktoken_num_special_tokens,
            tokenizer_special_tokens or (),
        )
    from megatron_lite.data.sentence_piece import SentencePieceTokenizer

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
