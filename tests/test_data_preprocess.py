"""Text files in, indexed data sets out; or one line that names the file and the line."""

import json
import re

import pytest

from megatron_lite.data import preprocess as module
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.data.preprocess import preprocess
from megatron_lite.data.tokenizers import make_tokenizer
from megatron_lite.errors import DataError

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


def test_without_end_of_document(tmp_path):
    summary = preprocess([jsonl(tmp_path / "a.jsonl", {"text": "one"})], tmp_path / "x", BYTES, append_eod=False)
    assert documents(summary.prefixes[0]) == ["one"]


def test_each_key_gets_its_own_files(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", {"q": "1", "a": "2"}, {"q": "3", "a": "4"})
    summary = preprocess([path], tmp_path / "x", BYTES, json_keys=("q", "a"), append_eod=False)
    assert [documents(prefix) for prefix in summary.prefixes] == [["1", "3"], ["2", "4"]]
    assert [prefix.rpartition("/")[2] for prefix in summary.prefixes] == ["x_q_document", "x_a_document"]


def test_blank_lines_are_no_documents(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"text": "one"}\n\n  \n{"text": "two"}')
    assert preprocess([path], tmp_path / "x", BYTES).documents == 2


def test_progress_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "REPORT_EVERY", 2)
    seen = []
    path = jsonl(tmp_path / "a.jsonl", *({"text": "abc"} for _ in range(5)))
    preprocess([path], tmp_path / "x", BYTES, report=lambda *numbers: seen.append(numbers))
    assert seen == [(2, 6), (4, 12), (5, 15)]


@pytest.mark.parametrize(("line", "message"), [
    (b'{"text": ', r":2: not JSON \(.*\); .*"),
    (b"[" * 100_000, r":2: not JSON \(.*\); .*"),
    (b'"text"', ":2: a str, not an object; .*"),
    (b'{"body": "x", "n": 1}', r":2: no text under 'text'; it has body, n \(--json-keys\)"),
    (b"{}", r":2: no text under 'text'; it has nothing \(--json-keys\)"),
    (b'{"text": 5}', ":2: no text under 'text'; .*"),
    (b'{"text": "\xe9"}', ":2: byte 0xe9 is not UTF-8; .*"),
], ids=["cut", "deep", "string", "other-key", "empty", "number", "latin-1"])
def test_bad_line_is_named_and_nothing_is_written(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(DataError, match=rf"^{re.escape(str(path))}{message}$"):
        preprocess([path], tmp_path / "x", BYTES)
    assert list(tmp_path.iterdir()) == [path]


def test_text_that_is_not_utf8(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match=rf"^{path}: byte 0xe9 is not UTF-8; convert the file .*$"):
        preprocess([path], tmp_path / "x", BYTES)


def test_inputs_that_are_no_files(tmp_path):
    with pytest.raises(DataError, match=r"^--input \S+none: does not exist; .*$"):
        preprocess([tmp_path / "none"], tmp_path / "x", BYTES)
    with pytest.raises(DataError, match=r"^--input \S+: is a folder; .*$"):
        preprocess([tmp_path], tmp_path / "x", BYTES)


def test_several_keys_of_a_plain_text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("x")
    with pytest.raises(DataError, match=r"^--json-keys q a: \S+ is plain text without keys; give one key only$"):
        preprocess([path], tmp_path / "x", BYTES, json_keys=("q", "a"))
