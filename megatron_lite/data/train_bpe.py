"""Trains a byte-level BPE vocabulary in GPT-2's file format."""

import heapq
import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

from megatron_lite.data.byte_level import END_OF_TEXT, SPLIT_PATTERN, byte_alphabet
from megatron_lite.errors import DataError

SMALLEST_VOCABULARY = 257  # the bytes and the end-of-text token
Pair = tuple[int, int]


def train_bpe(texts: Iterable[str | bytes], vocab_size: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The vocabulary and the merges, most frequent pair first; ties go to the pair with the smaller ids.

    Bytes are read as UTF-8. The vocabulary stays below `vocab_size` if no pair occurs twice any more.
    Algorithm: Sennrich et al. 2016 (arXiv:1508.07909), on bytes as in GPT-2. DataError if vocab_size is below 257.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise DataError(f"--vocab-size {vocab_size}: 256 bytes and {END_OF_TEXT} need {SMALLEST_VOCABULARY} or more")
    alphabet = byte_alphabet()
    tokens = list(alphabet)
    merges = []
    trainer = _Trainer(_count_words(texts), {byte: i for i, byte in enumerate(alphabet.values())})
    while len(tokens) + 1 < vocab_size and (pair := trainer.most_frequent_pair()):
        left, right = pair
        trainer.merge(pair, len(tokens))
        merges.append((tokens[left], tokens[right]))
        tokens.append(tokens[left] + tokens[right])
    tokens.append(END_OF_TEXT)
    return {token: i for i, token in enumerate(tokens)}, merges


def write_bpe(folder: str | Path, vocab: dict[str, int], merges: list[tuple[str, str]]) -> None:
    """Writes vocab.json and merges.txt into `folder`, which is made if need be."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
    lines = ["#version: 0.2", *(f"{left} {right}" for left, right in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _count_words(texts: Iterable[str | bytes]) -> Counter[str]:
    import regex  # Python's own re knows no \p{L}

    split = regex.compile(SPLIT_PATTERN).findall
    words: Counter[str] = Counter()
    for text in texts:
        words.update(split(text.decode("utf-8", errors="replace") if isinstance(text, bytes) else text))
    return words


class _Trainer:
    """The corpus as distinct words with their counts, and how often each pair of neighbours occurs in it."""

    def __init__(self, counts: Counter[str], id_of_byte: dict[int, int]):
        self.words = [[id_of_byte[byte] for byte in word.encode("utf-8", errors="replace")] for word in counts]
        self.word_counts = list(counts.values())
        self.pair_counts: dict[Pair, int] = defaultdict(int)
        self.words_with: dict[Pair, set[int]] = defaultdict(set)  # may hold words that lost the pair since
        for number, word in enumerate(self.words):
            for pair in pairwise(word):
                self.pair_counts[pair] += self.word_counts[number]
                self.words_with[pair].add(number)
        # Entries go stale as counts change; a count that has grown gets a new entry, one that has shrunk is
        # corrected when it comes to the top.
        self.heap = [(-count, pair) for pair, count in self.pair_counts.items()]
        heapq.heapify(self.heap)

    def most_frequent_pair(self) -> Pair | None:
        while self.heap:
            negative, pair = heapq.heappop(self.heap)
            count = self.pair_counts.get(pair, 0)
            if count == -negative:
                return pair if count >= 2 else None
            if 0 < count < -negative:
                heapq.heappush(self.heap, (-count, pair))
        return None

    def merge(self, pair: Pair, new: int) -> None:
        changes: dict[Pair, int] = defaultdict(int)
        for number in self.words_with.pop(pair):
            self._merge_in_word(number, pair, new, changes)
        for changed, change in changes.items():
            self.pair_counts[changed] += change
            if change > 0:
                heapq.heappush(self.heap, (-self.pair_counts[changed], changed))
        del self.pair_counts[pair]

    def _merge_in_word(self, number: int, pair: Pair, new: int, changes: dict[Pair, int]) -> None:
        old = self.words[number]
        merged = _merged(old, pair, new)
        if len(merged) == len(old):
            return
        count = self.word_counts[number]
        for lost in pairwise(old):
            changes[lost] -= count
        for found in pairwise(merged):
            changes[found] += count
            if new in found:
                self.words_with[found].add(number)
        self.words[number] = merged


def _merged(word: list[int], pair: Pair, new: int) -> list[int]:
    """The word with every `pair` replaced, from left to right."""
    left, right = pair
    merged = []
    i, last = 0, len(word) - 1
    while i <= last:
        if i < last and word[i] == left and word[i + 1] == right:
            merged.append(new)
            i += 2
        else:
            merged.append(word[i])
            i += 1
    return merged
