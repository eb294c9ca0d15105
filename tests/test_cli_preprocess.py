import io
import json
import sys

import pytest

from megatron_lite.cli.main import main
from megatron_lite.data.indexed import IndexedDataset

BYTES = ["--tokenizer-type", "ByteTokenizer"]


def test_a_text_file_becomes_one_document(tmp_path, capsys):
    text = tmp_path / "a text.txt"
    text.write_text("To be, or not.")
    assert main(["preprocess", "--input", str(text), "--output-prefix", f"{tmp_path}/out", *BYTES, "--append-eod"]) == 0
    output = capsys.readouterr()
    assert "1 documents (14 B): 15 tokens in" in output.out and f"--data-path {tmp_path}/out_text_document" in output.out
    assert output.err == ""  # progress is for terminals
    assert IndexedDataset(f"{tmp_path}/out_text_document").tokens(0).tolist() == [*b"To be, or not.", 256]


def test_without_append_eod_documents_end_with_their_text(tmp_path):
    (tmp_path / "a.txt").write_text("ab")
    main(["preprocess", "--input", f"{tmp_path}/a.txt", "--output-prefix", f"{tmp_path}/out", *BYTES])
    assert IndexedDataset(f"{tmp_path}/out_text_document").tokens(0).tolist() == [*b"ab"]


def test_each_json_key_gets_its_files(tmp_path, capsys):
    lines = [{"title": "one", "body": "1 1"}, {"title": "", "body": "2 2 2"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    argv = ["--input", f"{tmp_path}/a.jsonl", "--output-prefix", f"{tmp_path}/out", "--json-keys", "title", "body"]
    assert main(["preprocess", *argv, *BYTES]) == 0
    assert "1 empty ones left out" in capsys.readouterr().out
    assert len(IndexedDataset(f"{tmp_path}/out_title_document")) == 1
    assert len(IndexedDataset(f"{tmp_path}/out_body_document")) == 2


def test_ids_for_the_null_tokenizer(tmp_path):
    (tmp_path / "a.txt").write_text("7 0 31")
    argv = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "32", "--append-eod"]
    main(["preprocess", "--input", f"{tmp_path}/a.txt", "--output-prefix", f"{tmp_path}/out", *argv])
    assert IndexedDataset(f"{tmp_path}/out_text_document").tokens(0).tolist() == [7, 0, 31, 32]


@pytest.mark.parametrize(("name", "content", "argv", "said"), [
    (None, "", BYTES, "does not exist"),
    ("a.txt", "", BYTES, "not a single token to write; check the input files"),
    ("a.jsonl", "{\n", BYTES, "a.jsonl:1: not JSON"),
    ("a.txt", "x", [], "--vocab-file: missing, GPT2BPETokenizer needs it"),
    ("a.txt", "x", ["--tokenizer-type", "NullTokenizer"], "--vocab-size None: NullTokenizer needs the number of ids"),
    ("a.txt", "x", ["--tokenizer-type", "Llama2Tokenizer"], "--tokenizer-type Llama2Tokenizer: not available"),
])
def test_a_mistake_is_one_line_and_exit_code_2(name, content, argv, said, tmp_path, capsys):
    path = tmp_path / (name or "missing.txt")
    if name:
        path.write_text(content)
    assert main(["preprocess", "--input", str(path), "--output-prefix", f"{tmp_path}/out", *argv]) == 2
    message = capsys.readouterr().err
    assert said in message and message.count("\n") == 1


def test_progress_on_a_terminal_is_wiped_before_the_summary(tmp_path, monkeypatch, capsys):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    (tmp_path / "a.txt").write_text("ab")
    main(["preprocess", "--input", f"{tmp_path}/a.txt", "--output-prefix", f"{tmp_path}/out", *BYTES])
    assert sys.stderr.getvalue() == "\r\033[K1 documents, 2 B\r\033[K"
    assert capsys.readouterr().out.startswith("1 documents")
