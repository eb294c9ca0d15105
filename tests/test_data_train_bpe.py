"""The BPE trainer against one that counts everything anew for each merge."""

import random
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from megatron_lite.data.byte_level import END_OF_TEXT, byte_alphabet
from megatron_lite.data.tokenizers import make_tokenizer
from megatron_lite.data.train_bpe import train_bpe, write_bpe
from megatron_lite.errors import DataError

TEXT = Path(__file__).read_text(encoding="utf-8") + " naïve 東京 🎉 aaaaaaa aaaa aaa"


def slow_merges(words, number):
    """words: lists of characters of the alphabet."""
    rank = {c: i for i, c in enumerate(byte_alphabet())}
    merges = []
    while len(merges) < number:
        counts = Counter(pair for word in words for pair in pairwise(word))
        best = min(counts, key=lambda pair: (-counts[pair], rank[pair[0]], rank[pair[1]]))
        rank["".join(best)] = len(rank)
        merges.append(best)
        for word in words:
            i = 0
            while i < len(word) - 1:
                if (word[i], word[i + 1]) == best:
                    word[i : i + 2] = ["".join(best)]
                i += 1
    return merges


def test_merges_equal_the_slow_ones():
    generator = random.Random(2)
    for _ in range(20):
        words = ["".join(generator.choices("abc", k=generator.randint(1, 9))) for _ in range(60)]
        vocab, merges = train_bpe(["\n".join(words)], 257 + 12)
        # A line end before a letter is a word of its own.
        assert merges == slow_merges([list(word) for word in words], len(merges))
        assert len(merges) == 12
        assert list(vocab) == [*byte_alphabet(), *(a + b for a, b in merges), END_OF_TEXT]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bpe")
    write_bpe(folder, *train_bpe([TEXT], 500))
    files = {"vocab_file": str(folder / "vocab.json"), "merge_file": str(folder / "merges.txt")}
    return make_tokenizer("GPT2BPETokenizer", **files), files


def test_text_survives_and_gets_shorter(trained):
    tokenizer, _ = trained
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert len(ids) < len(TEXT.encode()) / 2
    assert (tokenizer.vocab_size, tokenizer.eod) == (500, 499)


def test_other_readers_of_the_files_agree(trained):
    transformers = pytest.importorskip("transformers")
    tokenizer, files = trained
    reference = transformers.GPT2Tokenizer(files["vocab_file"], files["merge_file"])
    assert reference(TEXT)["input_ids"] == tokenizer.encode(TEXT)


def test_bytes_and_several_texts_are_the_same_as_text():
    assert train_bpe([TEXT.encode()], 300) == train_bpe([TEXT], 300)
    assert train_bpe(["ab ab", "ab ab"], 258) == train_bpe(["ab ab\nab ab"], 258)


def test_stops_when_nothing_repeats():
    vocab, merges = train_bpe(["abc abc"], 10_000)
    assert merges == [("a", "b"), ("ab", "c")]
    assert vocab[END_OF_TEXT] == len(vocab) - 1 == 258


def test_vocabulary_smaller_than_the_bytes():
    with pytest.raises(DataError, match=r"^--vocab-size 256: 256 bytes and .* need 257 or more$"):
        train_bpe(["x"], 256)
