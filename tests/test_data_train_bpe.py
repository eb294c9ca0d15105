"""Training a byte-level vocabulary: the order of its ids, and what other readers make of its files."""

from pathlib import Path

import pytest

from megatron_lite.data.byte_pairs import byte_alphabet, train_bpe, write_bpe
from megatron_lite.data.text_files import END_OF_TEXT
from megatron_lite.data.tokenizers import make_tokenizer
from megatron_lite.errors import DataError

TEXT = Path(__file__).read_text(encoding="utf-8") + " naïve 東京 🎉 aaaaaaa aaaa aaa"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bpe")
    write_bpe(folder, *train_bpe([TEXT], 350))
    files = {"vocab_file": str(folder / "vocab.json"), "merge_file": str(folder / "merges.txt")}
    return make_tokenizer("GPT2BPETokenizer", **files), files


def test_text_survives_and_gets_shorter(trained):
    tokenizer, _ = trained
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert len(ids) < 2 / 3 * len(TEXT.encode())
    assert (tokenizer.vocab_size, tokenizer.eod) == (350, 349)


def test_other_readers_of_the_files_agree(trained):
    transformers = pytest.importorskip("transformers")
    tokenizer, files = trained
    reference = transformers.GPT2Tokenizer(files["vocab_file"], files["merge_file"])
    assert reference(TEXT)["input_ids"] == tokenizer.encode(TEXT)


def test_bytes_and_several_texts_are_the_same_as_text_and_it_stops_when_nothing_repeats():
    assert train_bpe([TEXT.encode()], 300) == train_bpe([TEXT], 300)
    assert train_bpe(["ab ab", "ab ab"], 258) == train_bpe(["ab ab\nab ab"], 258)
    vocab, merges = train_bpe(["abc abc"], 10_000)
    assert list(vocab) == [*byte_alphabet(), *(left + right for left, right in merges), END_OF_TEXT]
    assert merges == [("a", "b"), ("ab", "c")]
    assert vocab[END_OF_TEXT] == len(vocab) - 1 == 258
    with pytest.raises(DataError, match=r"^--vocab-size 256: 256 bytes and .* need 257 or more$"):
        train_bpe(["x"], 256)
