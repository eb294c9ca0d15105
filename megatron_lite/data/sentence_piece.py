"""SentencePiece models: SentencePieceTokenizer, GPTSentencePieceTokenizer and Llama2Tokenizer, which are one here."""

from collections.abc import Iterable

from megatron_lite.data.byte_pairs import mended
from megatron_lite.data.optional_dependency import optional_package
from megatron_lite.errors import UserError


class SentencePieceTokenizer:
    """A .model file; eod is its end of sentence, or None if it has none. No token is put before a text.

    UserError if the file is no model; `kind` is the --tokenizer-type that asks for it.
    """

    def __init__(self, kind: str, model: str):
        package = optional_package("sentencepiece", "sentencepiece", kind)
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
        return self._processor.encode_as_ids(mended(text))

    def decode(self, ids: Iterable[int]) -> str:
        return self._processor.decode_ids([int(i) for i in ids])
