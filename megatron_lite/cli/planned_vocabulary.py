"""How many words the tokenizer of a planned run has, as far as that can be known without its files."""

import json
from pathlib import Path

from megatron_lite.config.args import DataArgs
from megatron_lite.config.data_defaults import TOKENIZER
from megatron_lite.data.tokenizers import tokenizer_of
from megatron_lite.errors import UserError

GPT2_WORDS = 50_257  # Radford et al. 2019: 256 bytes, 50,000 merges, end of text


def planned_vocabulary(data: DataArgs, padded: int | None) -> tuple[int, list[str]]:
    """(words before padding, what was assumed). UserError where neither flags nor files tell."""
    kind = data.tokenizer_type or TOKENIZER
    if kind == "GPT2BPETokenizer":
        return _gpt2(data, padded)
    if kind in ("NullTokenizer", "ByteTokenizer") or Path(data.tokenizer_model).exists():
        return tokenizer_of(data).vocab_size, []
    known = data.vocab_size or padded
    if known is None:
        raise UserError(
            f"--tokenizer-model {data.tokenizer_model}: is not here to be counted; add --padded-vocab-size N."
        )
    return known, [f"--tokenizer-model {data.tokenizer_model} is not here: a vocabulary of {known:,} is assumed."]


def _gpt2(data: DataArgs, padded: int | None) -> tuple[int, list[str]]:
    if data.vocab_file is None or not Path(data.vocab_file).is_file():
        missing = f"--vocab-file {data.vocab_file} is not here" if data.vocab_file else "no --vocab-file"
        known = data.vocab_size or padded or GPT2_WORDS
        whose = "GPT-2's" if known == GPT2_WORDS else "the given"
        return known, [f"{missing}: {whose} vocabulary of {known:,} is assumed."]
    try:
        return len(json.loads(Path(data.vocab_file).read_text(encoding="utf-8"))), []
    except (OSError, ValueError, TypeError) as error:
        reason = getattr(error, "strerror", None) or "no JSON of words"
        raise UserError(f"--vocab-file {data.vocab_file}: cannot be read ({reason}); check the path.") from None
