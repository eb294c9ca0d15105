"""Fills in the middle (FIM): documents whose middle comes last, so that a model learns to fill gaps (--fim-data).

Bavarian et al. 2022, arXiv 2207.14255. A document becomes PREFIX prefix SUFFIX suffix MIDDLE middle (PSM) or PREFIX
SUFFIX suffix MIDDLE prefix middle (SPM), with its text cut in three at two random characters. Draws are those of
Megatron-LM's GPTFIMDataset: from one stream per data set, in the order in which a process reads samples.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from megatron_lite.config.args import DataArgs
from megatron_lite.data.gpt_dataset import GPTDataset
from megatron_lite.data.tokenizers import Tokenizer
from megatron_lite.errors import DataError

logger = logging.getLogger(__name__)
Tokens = NDArray[np.int64]  # [length]


@dataclass(frozen=True)
class Infilling:
    """The wishes of --fim-data and its flags, in token ids."""

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
    """Read the flags of --fim-data. DataError for a token that the tokenizer does not know."""
    split = None
    if d.fim_split_sample is not None:
        split = _find_id(tokenizer, "--fim-split-sample", d.fim_split_sample)
    return Infilling(
        tokenizer=tokenizer,
        rate=d.fim_rate,
        spm_rate=d.fim_spm_rate,
        prefix=_find_id(tokenizer, "--fim-prefix-token", d.fim_prefix_token),
        middle=_find_id(tokenizer, "--fim-middle-token", d.fim_middle_token),
        suffix=_find_id(tokenizer, "--fim-suffix-token", d.fim_suffix_token),
        pad=_find_id(tokenizer, "--fim-pad-token", d.fim_pad_token),
        eod=_find_id(tokenizer, "--fim-eod-token", d.fim_eod_token),
        split=split,
        fragment_rate=d.fim_fragment_rate or 0.0,
        unless_begins=d.fim_no_prefix,
    )


def _find_id(tokenizer: Tokenizer, flag: str, token: str) -> int:
    """The id of a token.

    As in Megatron-LM, that of the unknown token where the vocabulary lacks it, which is logged.

    Args:
        tokenizer: Knows the vocabulary.
        flag: The flag that names the token, for messages.
        token: The token's text.

    Raises:
        DataError: The vocabulary lacks it, and has no unknown token.
    """
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


class InfillingDataset(Dataset[NDArray[np.int64]]):
    """The samples of another data set, rearranged; `[i]` is int64 [seq_length + 1].

    A sample that becomes longer is cut off at its end, one that becomes shorter is filled up with the pad token.
    """

    def __init__(self, samples: GPTDataset, infilling: Infilling, seed: int):
        """
        Args:
            samples: The data set whose samples are rearranged.
            infilling: How they are.
            seed: Begins the stream of draws.
        """
        self.samples = samples
        self._infilling = infilling
        self._random = np.random.RandomState(seed)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> Tokens:
        fim = self._infilling
        tokens = self.samples[i]
        pieces = self._rearrange_pieces(tokens, fim.eod, self._rearrange_document)
        changed = np.concatenate(pieces) if pieces else self._rearrange_document(tokens)
        wanted = len(tokens)
        lacking = wanted - len(changed)
        if lacking > 0:
            padding = np.full(lacking, fim.pad)
            changed = np.concatenate([changed, padding])
        return np.asarray(changed[:wanted], dtype=np.int64)

    def _rearrange_document(self, tokens: Tokens) -> Tokens:
        """Rearrange a document, or its fragments."""
        fim = self._infilling
        if fim.split is None or not (tokens == fim.split).any():
            return self._rearrange(tokens, fim.rate)
        if not self._random.binomial(1, fim.rate):
            return tokens
        return np.concatenate(self._rearrange_pieces(tokens, fim.split, self._rearrange_fragment))

    def _rearrange_fragment(self, tokens: Tokens) -> Tokens:
        """Rearrange a fragment of a document."""
        return self._rearrange(tokens, self._infilling.fragment_rate)

    def _rearrange_pieces(
        self, tokens: Tokens, separator: int, rearrange: Callable[[Tokens], Tokens]
    ) -> list[Tokens | Sequence[int]]:
        """Rearrange the pieces between separators.

        As in Megatron-LM, an empty piece goes with its separator, unless it is the last one.

        Args:
            tokens: Tokens of a sample or a document.
            separator: The id that divides it.
            rearrange: What is done with each piece.

        Returns:
            Pieces and separators in turn; none if there is no separator.
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
        """Put the middle of a text at its end, or leave it as it is.

        Args:
            tokens: Tokens of the text.
            rate: The probability that it is rearranged.
        """
        fim = self._infilling
        tokenizer = fim.tokenizer
        if not self._random.binomial(1, rate):
            return tokens
        text = tokenizer.decode_text(tokens)
        if fim.unless_begins is not None and text.startswith(fim.unless_begins):
            return tokens
        first, last = sorted(self._random.randint(low=0, high=len(text) + 1, size=2))
        prefix = tokenizer.encode(text[:first])
        middle = tokenizer.encode(text[first:last])
        suffix = tokenizer.encode(text[last:])
        ids = [fim.prefix, *prefix, fim.suffix, *suffix, fim.middle, *middle]
        if self._random.binomial(1, fim.spm_rate):
            ids = [fim.prefix, fim.suffix, *suffix, fim.middle, *prefix, *middle]
        return np.array(ids, dtype=np.int64)
