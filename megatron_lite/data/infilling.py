"""Fill in the middle (FIM): documents whose middle comes last, so that a model learns to fill gaps (--fim-data).

Bavarian et al. 2022, arXiv 2207.14255. A document becomes PREFIX prefix SUFFIX suffix MIDDLE middle (PSM) or PREFIX
SUFFIX suffix MIDDLE prefix middle (SPM), with its text cut in three at two random characters. Draws are those of
Megatron-LM's GPTFIMDataset: from one stream per data set, in the order in which a process reads samples.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_lite.config.args import DataArgs
from megatron_lite.data.gpt_dataset import GPTDataset
from megatron_lite.data.tokenizers import Tokenizer
from megatron_lite.errors import DataError

logger = logging.getLogger(__name__)
Tokens = np.ndarray  # int64 [length]


@dataclass(frozen=True)
class Infilling:
    """What --fim-data and its flags ask for, in token ids."""

    tokenizer: Tokenizer
    rate: float  # share of the documents that are rearranged
    spm_rate: float  # share of those that get the form SPM
    prefix: int
    middle: int
    suffix: int
    pad: int  # fills up what becomes shorter
    eod: int  # ends a document
    split: int | None = None  # divides a document into fragments, which are rearranged one by one
    fragment_rate: float = 0.0  # share of them, in a document that is chosen by `rate`
    unless_begins: str | None = None  # text with which no fragment is rearranged


def make_infilling(d: DataArgs, tokenizer: Tokenizer) -> Infilling:
    """What the flags ask for. DataError for a token that the tokenizer does not know."""
    known = {name: _find_token(d, tokenizer, name) for name in ("prefix", "middle", "suffix", "pad", "eod")}
    return Infilling(
        tokenizer=tokenizer,
        rate=d.fim_rate,
        spm_rate=d.fim_spm_rate,
        split=None if d.fim_split_sample is None else _find_id(tokenizer, "--fim-split-sample", d.fim_split_sample),
        fragment_rate=d.fim_fragment_rate or 0.0,
        unless_begins=d.fim_no_prefix,
        **known,
    )


def _find_token(d: DataArgs, tokenizer: Tokenizer, name: str) -> int:
    return _find_id(tokenizer, f"--fim-{name}-token", getattr(d, f"fim_{name}_token"))


def _find_id(tokenizer: Tokenizer, flag: str, token: str) -> int:
    """The id of a token; as in Megatron-LM, of the unknown token where the vocabulary lacks it."""
    found = tokenizer.find_token(token)
    if found is not None:
        return found
    if tokenizer.unknown is None:
        raise DataError(
            f"{flag} {token}: is no token of the vocabulary; name one that is, or add it with "
            "--tokenizer-special-tokens"
        )
    logger.info(f"  note: {flag} {token}: the vocabulary lacks it; its unknown token, {tokenizer.unknown}, is taken.")
    return tokenizer.unknown


class InfillingDataset:
    """The samples of another data set, rearranged; `[i]` is int64 [seq_length + 1].

    A sample that becomes longer is cut off at its end, one that becomes shorter is filled up with the pad token.
    """

    def __init__(self, samples: GPTDataset, infilling: Infilling, seed: int):
        self.samples, self._infilling = samples, infilling
        self._random = np.random.RandomState(seed)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> Tokens:
        tokens, fim = self.samples[i], self._infilling
        pieces = self._rearrange_pieces(tokens, fim.eod, self._rearrange_document)
        changed = np.concatenate(pieces) if pieces else self._rearrange_document(tokens)
        lacking = len(tokens) - len(changed)
        if lacking > 0:
            changed = np.concatenate([changed, np.full(lacking, fim.pad)])
        return np.asarray(changed[: len(tokens)], dtype=np.int64)

    def _rearrange_document(self, tokens: Tokens) -> Tokens:
        """A document, or its fragments."""
        fim = self._infilling
        if fim.split is None or not (tokens == fim.split).any():
            return self._rearrange(tokens, fim.rate)
        if not self._random.binomial(1, fim.rate):
            return tokens
        rearrange = lambda fragment: self._rearrange(fragment, fim.fragment_rate)
        return np.concatenate(self._rearrange_pieces(tokens, fim.split, rearrange))

    def _rearrange_pieces(
        self, tokens: Tokens, separator: int, rearrange: Callable[[Tokens], Tokens]
    ) -> list[Tokens | Sequence[int]]:
        """The pieces between separators, rearranged, with these; none if there is no separator.

        As in Megatron-LM, an empty piece goes with its separator, unless it is the last one.
        """
        pieces: list[Tokens | Sequence[int]] = []
        start = 0
        for end in np.flatnonzero(tokens == separator).tolist():
            if end > start:
                pieces += [rearrange(tokens[start:end]), [separator]]
            start = end + 1
        if start > 0:
            pieces.append(rearrange(tokens[start:]))
        return pieces

    def _rearrange(self, tokens: Tokens, rate: float) -> Tokens:
        """A text with its middle at the end, or as it is."""
        fim, tokenizer = self._infilling, self._infilling.tokenizer
        if not self._random.binomial(1, rate):
            return tokens
        text = tokenizer.decode_text(tokens)
        if fim.unless_begins is not None and text.startswith(fim.unless_begins):
            return tokens
        first, last = sorted(self._random.randint(low=0, high=len(text) + 1, size=2))
        prefix = tokenizer.encode(text[:first])
        middle = tokenizer.encode(text[first:last])
        suffix = tokenizer.encode(text[last:])
        if self._random.binomial(1, fim.spm_rate):
            return np.array([fim.prefix, fim.suffix, *suffix, fim.middle, *prefix, *middle], dtype=np.int64)
        return np.array([fim.prefix, *prefix, fim.suffix, *suffix, fim.middle, *middle], dtype=np.int64)
