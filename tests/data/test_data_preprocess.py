"""Text files in, indexed data sets out; or one line that names the file and the line."""

import gzip
import json
import re
import sys
import tracemalloc

import pytest
import zstandard

from megatron_lite.data import text_files
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.data.preprocess import preprocess
from megatron_lite.data.tokenizers import make_tokenizer
from megatron_lite.errors import DataError, UserError

BYTES = make_tokenizer("ByteTokenizer")


def documents(prefix):
    indexed = IndexedDataset(prefix)
    return [BYTES.decode(indexed.tokens(i)) for i in range(len(indexed))]


def jsonl(path, *objects):
    path.write_text("".join(json.dumps(o) + "\n" for o in objects))
    return path


def test_lines_and_files_become_documents(tmp_path):
    lines = jsonl(tmp_path / "a.jsonl", {"text": "one"}, {"text": ""}, {"text": "zwei ü", "other": 1})
    plain = tmp_path / "b.txt"
    plain.write_text("three\n\nand more")
    summary = preprocess([lines, plain], tmp_path / "out" / "corpus", BYTES)
    assert summary.prefixes == (str(tmp_path / "out" / "corpus_text_document"),)
    assert documents(summary.prefixes[0]) == [t + "<|endoftext|>" for t in ("one", "zwei ü", "three\n\nand more")]
    assert (summary.documents, summary.empty, summary.text_bytes) == (3, 1, 3 + 7 + 15)
    assert summary.tokens == summary.text_bytes + 3


def test_each_key_gets_its_own_files_of_either_ending_and_blank_lines_are_no_documents(tmp_path):
    path = tmp_path / "a.json"  # Megatron's "loose json"
    path.write_text('\n{"q": "1", "a": "2"}\n\n  \n{"q": "3", "a": "4"}')
    summary = preprocess([path], tmp_path / "x", BYTES, json_keys=("q", "a"), append_eod=False)
    assert [documents(prefix) for prefix in summary.prefixes] == [["1", "3"], ["2", "4"]]
    assert [prefix.rpartition("/")[2] for prefix in summary.prefixes] == ["x_q_document", "x_a_document"]


def test_progress_is_reported_and_ends_with_all(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "CHUNK_BYTES", 1)
    seen = []
    paths = [jsonl(tmp_path / f"{name}.jsonl", *({"text": "abc"} for _ in range(2))) for name in "ab"]
    preprocess(paths, tmp_path / "x", BYTES, report=lambda *numbers: seen.append(numbers))
    assert [(documents, text_bytes) for documents, text_bytes, _ in seen] == [(1, 3), (2, 6), (3, 9), (4, 12)]
    assert seen[1][2] == 0.5 and seen[-1][2] == 1


BAD_LINES = [  # the second line, and what is said of it
    (b'{"text": ', r"not JSON \(.*\); .*"),
    (b"[" * 100_000, r"not JSON \(.*\); .*"),
    (b'"text"', "a str, not an object; .*"),
    (b'{"body": "x", "n": 1}', r"no text under 'text'; it has body, n \(--json-keys\)"),
    (b'{"a\\n\\u001b[2J": 1, "b": 2}', r"no text under 'text'; it has 'a\\n\\x1b\[2J', b \(--json-keys\)"),
    (json.dumps({f"k{i}": i for i in range(11)}).encode(), r".*; it has k0, .*, k9, \.\.\. \(--json-keys\)"),
    (b"{}", r"no text under 'text'; it has nothing \(--json-keys\)"),
    (b'{"text": 5}', "the value of 'text' is a number, not a text; .*"),
    (b'{"text": null}', "the value of 'text' is null, not a text; .*"),
    (b'{"text": ["a"]}', "the value of 'text' is a list, not a text; .*"),
    (b'{"text": {"a": "b"}}', "the value of 'text' is an object, not a text; .*"),
    (b'{"text": false}', "the value of 'text' is false, not a text; .*"),
    (b'{"text": "\xe9"}', "byte 0xe9 is not UTF-8; .*"),
]


def test_bad_line_is_named_and_nothing_is_written(tmp_path):
    path = tmp_path / "a.jsonl"
    for line, message in BAD_LINES:
        path.write_bytes(b'{"text": "fine"}\n' + line + b"\n")
        with pytest.raises(DataError, match=rf"^{re.escape(str(path))}:2: {message}$"):
            preprocess([path], tmp_path / "x", BYTES)
        assert list(tmp_path.iterdir()) == [path]


TWICE = "--json-keys text text: one key is named twice; name it once"
NO_KEYS = r"--json-keys q a: \S+ is plain text without keys; give one key only"
TOO_LONG = r"\S+a\.txt: the document is longer than 1 MiB; .* --max-document-mb"
REFUSED = {  # file, its contents (None: there is none), options: what is said
    "latin-1": ("a.txt", b"caf\xe9", {}, r"\S+a\.txt: byte 0xe9 is not UTF-8; convert the file .*"),
    "no file": ("none", None, {}, r"--input \S+none: does not exist; .*"),
    "a folder": ("", None, {}, r"--input \S+: is a folder; .*"),
    "keys": ("a.txt", b"x", {"json_keys": ("q", "a")}, NO_KEYS),
    "twice": ("a.jsonl", b"{}", {"json_keys": ("text", "text")}, TWICE),
    "no workers": ("a.txt", b"x", {"workers": 0}, "--workers 0: must be 1 or more; the number of cores is usual"),
    "no room": ("a.txt", b"x", {"max_document_mb": 0}, "--max-document-mb 0: must be 1 or more.*"),
    "too long": ("a.txt", b"a" * ((1 << 20) + 1), {"max_document_mb": 1}, TOO_LONG),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_mistake_is_one_line_and_nothing_is_written(tmp_path, kind):
    name, content, options, message = REFUSED[kind]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError, match=rf"^{message}$"):
        preprocess([tmp_path / name], tmp_path / "x", BYTES, **options)
    assert sorted(tmp_path.iterdir()) == before


def test_skipped_lines_are_named_and_counted_and_the_rest_is_as_without_them(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\n{"text": \n\n{"text": "two"}\n{"text": "\xe9"}\n{"no": 1}')
    said = []
    summary = preprocess([path], tmp_path / "x", BYTES, on_error="skip", say=said.append)
    assert (summary.documents, summary.skipped) == (2, 3)
    assert documents(summary.prefixes[0]) == ["one<|endoftext|>", "two<|endoftext|>"]
    assert [line.split(": ")[0] for line in said] == [f"skipped {path}:{number}" for number in (2, 5, 6)]


def test_a_line_that_is_bad_for_one_key_is_left_out_for_all(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", {"q": "1", "a": 2}, {"q": "3", "a": "4"})
    summary = preprocess([path], tmp_path / "x", BYTES, json_keys=("q", "a"), append_eod=False, on_error="skip")
    assert [documents(prefix) for prefix in summary.prefixes] == [["3"], ["4"]]


def test_a_line_of_ids_that_are_none(tmp_path):
    for text, message in (
        ("7 x", r"--tokenizer-type NullTokenizer: 'x' in the text is no integer; .*"),
        ("7 33", r"token id 33 in the text is outside the vocabulary of 33; .*"),
        ("7 99999999999999999999", r"token ids of type object are no integers; .*"),
    ):
        path = jsonl(tmp_path / "a.jsonl", {"text": "1 2"}, {"text": text})
        with pytest.raises(DataError, match=rf"^{re.escape(str(path))}:2: {message}$"):
            preprocess([path], tmp_path / "x", make_tokenizer("NullTokenizer", vocab_size=32))


def packed_as(kind, raw: bytes) -> bytes:
    if kind == "gz":
        return gzip.compress(raw[:100]) + gzip.compress(raw[100:])  # two members, as `cat a.gz b.gz` makes
    zstandard = pytest.importorskip("zstandard")
    return zstandard.compress(raw[:100]) + zstandard.compress(raw[100:])


@pytest.mark.parametrize("chunk_bytes", [64, 1 << 20])
@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_compressed_files_give_the_same_documents(tmp_path, monkeypatch, kind, chunk_bytes):
    monkeypatch.setattr(text_files, "CHUNK_BYTES", chunk_bytes)
    lines = jsonl(tmp_path / "a.jsonl", *({"text": f"document {i} " * i} for i in range(1, 100)))
    packed = tmp_path / f"b.jsonl.{kind}"
    packed.write_bytes(packed_as(kind, lines.read_bytes()))
    plain = tmp_path / f"c.txt.{kind}"
    plain.write_bytes(packed_as(kind, b"one\n\nof lines " * 20))
    summary = preprocess([lines, packed, plain], tmp_path / "x", BYTES, append_eod=False)
    found = documents(summary.prefixes[0])
    assert found[:99] == found[99:198] and found[198:] == ["one\n\nof lines " * 20]


@pytest.mark.parametrize("spoil", ["cut", "foreign"])
@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_damaged_compressed_file(tmp_path, kind, spoil):
    path = tmp_path / f"a.jsonl.{kind}"
    whole = packed_as(kind, b'{"text": "some words"}\n' * 1000)
    path.write_bytes(whole[:-7] if spoil == "cut" else b"not compressed" * 9)
    message = rf"^--input {re.escape(str(path))}: cannot be read \(.+\); .*copy the file again$"
    with pytest.raises(DataError, match=message):
        preprocess([path], tmp_path / "x", BYTES, on_error="skip")
    assert list(tmp_path.iterdir()) == [path]


def test_missing_package_for_zst(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(zstandard.compress(b"x"))
    message = r"^--input \S+a\.jsonl\.zst: the package .* is missing; pip install zstandard$"
    with pytest.raises(UserError, match=message):
        preprocess([path], tmp_path / "x", BYTES)


def test_input_that_may_not_be_read(tmp_path, monkeypatch):
    path = jsonl(tmp_path / "a.jsonl", {"text": "x"})
    builtin = open

    def refuse(name, *args, **kwargs):
        if str(name) == str(path):
            raise PermissionError(13, "Permission denied")
        return builtin(name, *args, **kwargs)

    monkeypatch.setattr("builtins.open", refuse)
    message = r"^--input \S+: cannot be read \(Permission denied\); check its permissions, .*$"
    with pytest.raises(DataError, match=message):
        preprocess([path], tmp_path / "x", BYTES)


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_a_line_of_more_than_the_limit_is_a_bad_line_and_never_held(tmp_path, ending):
    """64 MiB in a small file, between lines that fit."""
    good, long = b'{"text": "fine"}\n', b'{"text": "' + b"a" * (1 << 26) + b'"}\n'
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}[ending]
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(pack(good + long + good * 2))
    message = f"{path}:2: the line is longer than 1 MiB; check the file, or raise --max-document-mb"
    with pytest.raises(DataError, match=rf"^{re.escape(message)}$"):
        preprocess([path], tmp_path / "x", BYTES, max_document_mb=1)
    skipped = []
    tracemalloc.start()
    summary = preprocess([path], tmp_path / "x", BYTES, max_document_mb=1, on_error="skip", say=skipped.append)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (summary.documents, summary.skipped, skipped) == (3, 1, [f"skipped {message}"])
    assert peak < (72 << 20 if ending == ".zst" else 16 << 20), peak  # a kilobyte of .zst is unpacked at once
    del long


def test_a_line_just_within_the_limit_is_good_and_one_byte_more_is_not(tmp_path):
    def line(num_bytes: int) -> bytes:
        return b'{"text": "' + b"a" * (num_bytes - 13) + b'"}\n'

    for num_bytes, skipped in ((1 << 20, 0), ((1 << 20) + 1, 1)):
        path = tmp_path / "a.jsonl"
        cut = line(100) + line(num_bytes)[:-1] + b" " * skipped
        for text in (line(100) + line(num_bytes), line(num_bytes) + line(100), cut):
            path.write_bytes(text)
            assert preprocess([path], tmp_path / "x", BYTES, max_document_mb=1, on_error="skip").skipped == skipped
