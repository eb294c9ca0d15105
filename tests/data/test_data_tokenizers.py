"""Text to ids and back, vocabularies trained here, and files that do not fit each other."""

import json

import pytest
from support.odd_texts import texts
from support.paths import GPT2, TESTS

from megatron_lite.data.byte_pairs import byte_alphabet, train_bpe, write_bpe
from megatron_lite.data.text_files import END_OF_TEXT
from megatron_lite.data.tokenizers import make_tokenizer
from megatron_lite.errors import DataError, UserError

needs_gpt2 = pytest.mark.skipif(not GPT2.is_dir(), reason="no ../shared/data/gpt2 beside the repository")
BYTES = list(byte_alphabet())
MERGES = [("h", "e"), ("Ġ", "he"), ("l", "l")]


def vocabulary(*more):
    return {token: i for i, token in enumerate([*BYTES, *(a + b for a, b in MERGES), END_OF_TEXT, *more])}


def bpe(folder, vocab=None, merges=MERGES):
    write_bpe(folder, vocabulary() if vocab is None else vocab, merges)
    return bpe_from(folder)


def bpe_from(folder):
    files = {"vocab_file": str(folder / "vocab.json"), "merge_file": str(folder / "merges.txt")}
    return make_tokenizer("GPT2BPETokenizer", **files)


@needs_gpt2
def test_gpt2_ids():
    tokenizer = bpe_from(GPT2)
    assert tokenizer.encode("Hello world") == [15496, 995]
    assert tokenizer.encode("<|endoftext|>") == [27, 91, 437, 1659, 5239, 91, 29]  # text, not the token
    ids = "220 632 338 48609 11 41492 10545 251 109 12859 105 628 197 87 220"
    assert " ".join(map(str, tokenizer.encode("  It's 2024, naïve 東京\n\n\tx "))) == ids
    assert (tokenizer.vocab_size, tokenizer.eod) == (50_257, 50_256)


@needs_gpt2
def test_gpt2_ids_are_those_of_the_reference_tokenizer():
    transformers = pytest.importorskip("transformers")
    reference = transformers.GPT2Tokenizer(str(GPT2 / "vocab.json"), str(GPT2 / "merges.txt"))
    tokenizer = bpe_from(GPT2)
    text = (GPT2.parent / "tinyshakespeare.txt").read_text()[:50_000]
    for piece in [text, *texts()]:
        assert tokenizer.encode(piece) == reference(piece)["input_ids"]


def test_text_survives(tmp_path):
    for tokenizer in (bpe(tmp_path), make_tokenizer("ByteTokenizer")):
        assert tokenizer.decode(tokenizer.encode("a\ud800b")) in ("a\ufffdb", "a?b")  # half a surrogate pair
        for text in texts():
            ids = tokenizer.encode(text)
            assert tokenizer.decode(ids) == text
            assert all(0 <= i < tokenizer.vocab_size and i != tokenizer.eod for i in ids)
            assert tokenizer.decode([*ids, tokenizer.eod]).endswith(END_OF_TEXT)


def test_merges_apply_in_their_order_and_special_tokens_may_stand_anywhere(tmp_path):
    tokenizer = bpe(tmp_path)
    vocab = vocabulary()
    assert tokenizer.encode("hell hell") == [vocab[t] for t in ("he", "ll", "Ġhe", "ll")]
    tokens = [END_OF_TEXT, *BYTES, *(a + b for a, b in MERGES), "<|pad|>"]
    tokenizer = bpe(tmp_path, {token: i for i, token in enumerate(tokens)})
    assert (tokenizer.eod, tokenizer.vocab_size) == (0, len(tokens))
    assert tokenizer.encode("he") == [tokens.index("he")]
    assert tokenizer.decode([len(tokens) - 1]) == "<|pad|>"


def test_bytes_and_ids():
    tokenizer = make_tokenizer("ByteTokenizer")
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)
    assert tokenizer.encode("aé") == [97, 195, 169]
    tokenizer = make_tokenizer("NullTokenizer", vocab_size=100)
    assert (tokenizer.vocab_size, tokenizer.eod) == (101, 100)
    assert tokenizer.encode(" 5 17\n99 ") == [5, 17, 99] and tokenizer.decode([5, 17]) == "5 17"
    with pytest.raises(DataError, match=r"^--tokenizer-type NullTokenizer: 'five' in the text is no integer; .*$"):
        tokenizer.encode("1 five")


def test_types_that_do_not_exist_or_lack_a_size():
    for vocab_size in (None, 0, -1):
        with pytest.raises(UserError, match=rf"^--vocab-size {vocab_size}: NullTokenizer needs .*; for example 32000$"):
            make_tokenizer("NullTokenizer", vocab_size=vocab_size)
    for name in ("MultimodalTokenizer", "SFTTokenizer", "gpt2"):
        message = rf"^--tokenizer-type {name}: not available, only GPT2BPETokenizer, .*NullTokenizer --vocab-size N$"
        with pytest.raises(UserError, match=message):
            make_tokenizer(name)


def test_missing_files(tmp_path):
    bpe(tmp_path)
    vocab, merges = str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt")
    for files, message in [
        ({}, r"^--vocab-file: missing, GPT2BPETokenizer needs it; .*$"),
        ({"vocab_file": vocab}, r"^--merge-file: missing, GPT2BPETokenizer needs it; .*$"),
        ({"vocab_file": "/no/file"}, r"^--vocab-file /no/file: cannot be read \(No such file.*\); .*$"),
        ({"vocab_file": vocab, "merge_file": "/no/file"}, r"^--merge-file /no/file: cannot be read .*$"),
        ({"vocab_file": merges, "merge_file": vocab}, r"^--vocab-file \S+merges.txt: not JSON; .*$"),
        ({"vocab_file": vocab, "merge_file": vocab}, r"^--merge-file \S+vocab.json: line 1 is not two tokens; .*$"),
    ]:
        with pytest.raises(UserError, match=message):
            make_tokenizer("GPT2BPETokenizer", **files)


def test_malformed_vocabulary(tmp_path):
    bpe(tmp_path)
    no_map = "not a map from tokens to the ids .*"
    for raw, message in (
        (b"\xff\xfe", "not UTF-8; .*"),
        (b"[" * 100_000, "not JSON; .*"),
        (b"[1, 2]", no_map),
        (b'{"a": 1}', no_map),
        (b'{"a": "0"}', no_map),
        (b'{"a": [0]}', no_map),
        (b'{"a": 0}', r"<\|endoftext\|> is missing; .*"),
        (json.dumps({t: i for i, t in enumerate([END_OF_TEXT, *BYTES[1:]])}).encode(), "! is missing; .*"),
    ):
        (tmp_path / "vocab.json").write_bytes(raw)
        with pytest.raises(UserError, match=rf"^--vocab-file \S+vocab.json: {message}$"):
            bpe_from(tmp_path)


def test_files_of_different_models(tmp_path):
    for vocab, merges, message in (
        (None, [*MERGES, ("x", "y")], "merge 'x y' does not fit the vocabulary; .*"),
        (None, [MERGES[1], MERGES[0], MERGES[2]], "merge 'Ġ he' does not fit the vocabulary; .*"),
        (None, [*MERGES, MERGES[0]], "merge 'h e' does not fit the vocabulary; .*"),
        (None, [MERGES[0], MERGES[2], MERGES[1]], "the ids do not follow the order of the merges; .*"),
        (None, MERGES[:1], "no merge makes 2 tokens such as Ġhe; is the merge file complete[?]"),
        (vocabulary("extra"), MERGES, "no merge makes 1 tokens such as extra; .*"),
    ):
        with pytest.raises(UserError, match=rf"^--vocab-file \S+ and --merge-file \S+: {message}$"):
            bpe(tmp_path, vocab, merges)


# --- training a byte-level vocabulary: the order of its ids, and what other readers make of its files

TEXT = (TESTS / "conftest.py").read_text(encoding="utf-8") + " naïve 東京 🎉 aaaaaaa aaaa aaa"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bpe")
    write_bpe(folder, *train_bpe([TEXT], 350))
    return folder


def test_text_gets_shorter_and_other_readers_of_the_files_agree(trained):
    transformers, tokenizer = pytest.importorskip("transformers"), bpe_from(trained)
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT and len(ids) < 2 / 3 * len(TEXT.encode())
    assert (tokenizer.vocab_size, tokenizer.eod) == (350, 349)
    reference = transformers.GPT2Tokenizer(str(trained / "vocab.json"), str(trained / "merges.txt"))
    assert reference(TEXT)["input_ids"] == ids


def test_bytes_and_several_texts_are_the_same_as_text_and_it_stops_when_nothing_repeats():
    assert train_bpe([TEXT.encode()], 300) == train_bpe([TEXT], 300)
    assert train_bpe(["ab ab", "ab ab"], 258) == train_bpe(["ab ab\nab ab"], 258)
    vocab, merges = train_bpe(["abc abc"], 10_000)
    assert list(vocab) == [*byte_alphabet(), *(left + right for left, right in merges), END_OF_TEXT]
    assert merges == [("a", "b"), ("ab", "c")]
    assert vocab[END_OF_TEXT] == len(vocab) - 1 == 258
    with pytest.raises(DataError, match=r"^--vocab-size 256: 256 bytes and .* need 257 or more$"):
        train_bpe(["x"], 256)
