import json
import os
import sysconfig
from pathlib import Path

import pytest
from support.wording import wording

from megatron_lite.cli.corpus import LEFT_OUT, MARK, library_sources, pieces
from megatron_lite.cli.main import main
from megatron_lite.data.gpt_dataset import split_bounds
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.data.tokenizers import ByteTokenizer, make_tokenizer

SMALL = ["--max-mb", "0.2"]


def make(prefix, *argv) -> int:
    return main(["make-corpus", "--output-prefix", str(prefix), *argv])


def contents(prefix) -> list[bytes]:
    return [Path(f"{prefix}_text_document{ending}").read_bytes() for ending in (".bin", ".idx")]


@pytest.mark.slow
def test_the_usual_corpus_is_megabytes_of_text_with_something_for_each_split(tmp_path, capsys):
    assert make(tmp_path / "a b" / "python") == 0
    assert f"{tmp_path}/a b/python_text_document made in" in capsys.readouterr().out
    data = IndexedDataset(str(tmp_path / "a b" / "python_text_document"))
    assert 3e6 < data.num_tokens < 9e6
    text = ByteTokenizer().decode(data.tokens(0))
    assert "import" in "".join(ByteTokenizer().decode(data.tokens(i)) for i in range(20))
    assert text.endswith("<|endoftext|>")
    assert all(sum(data.sequence_lengths[i] for i in part) > 2049 for part in split_bounds("949,50,1", len(data)))


def test_its_own_bpe_reads_back_the_sources(tmp_path):
    make(tmp_path / "python", *SMALL, "--bpe", "400")
    files = {"vocab_file": f"{tmp_path}/vocab.json", "merge_file": f"{tmp_path}/merges.txt"}
    tokenizer = make_tokenizer("GPT2BPETokenizer", **files)
    data = IndexedDataset(f"{tmp_path}/python_text_document")
    first = next(library_sources(Path(sysconfig.get_paths()["stdlib"]), 1e6))
    assert tokenizer.vocab_size == 400
    assert tokenizer.decode(data.tokens(0)) == first + "<|endoftext|>"


def test_a_complete_corpus_is_reused_and_any_other_made_anew(tmp_path, capsys):
    """Of other settings, never finished, cut short, or without its file; equal builds have equal bytes."""
    make(tmp_path / "python", *SMALL)
    good = contents(tmp_path / "python")
    mark, data, index = tmp_path / MARK, tmp_path / "python_text_document.bin", tmp_path / "python_text_document.idx"
    os.utime(index, (1, 1))
    capsys.readouterr()
    assert make(tmp_path / "python", *SMALL) == 0
    assert index.stat().st_mtime == 1 and wording("cli/is-there-already") in capsys.readouterr().out
    make(tmp_path / "python", "--max-mb", "0.1")
    assert contents(tmp_path / "python") != good

    def forget():
        mark.write_text(json.dumps(json.loads(mark.read_text()) | {"complete": False}))
        data.write_bytes(bytes(data.stat().st_size))

    for spoil in (lambda: None, forget, lambda: data.write_bytes(b""), data.unlink):
        spoil()
        assert make(tmp_path / "python", *SMALL) == 0
        assert contents(tmp_path / "python") == good


def test_files_of_other_origin_are_left_alone_and_one_folder_holds_one_corpus(tmp_path, capsys):
    (tmp_path / "vocab.json").write_text("mine")
    assert make(tmp_path / "python", *SMALL, "--bpe", "300") == 2
    assert wording("cli/vocab-json-exists-and") in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["vocab.json"]
    (tmp_path / "vocab.json").unlink()
    make(tmp_path / "python", *SMALL)
    assert make(tmp_path / "other", *SMALL) == 2
    assert wording("cli/holds-another-corpus-choose", tmp_path) in capsys.readouterr().err


def test_what_cannot_be_made_is_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / MARK).write_text("{")
    for name, argv, said in (
        ("python", [*SMALL, "--bpe", "100"], "--vocab-size 100: 256 bytes and <|endoftext|> need 257 or more"),
        ("python", ["--max-mb", "0"], "--max-mb 0: must be above 0; 8 is usual"),
        ("python", ["--max-mb", "0.000001"], "has no .py sources"),
        ("file/python", SMALL, "cannot be written"),
        ("odd/python", SMALL, f"{tmp_path / 'odd' / MARK}: not readable as JSON"),
    ):
        assert make(tmp_path / name, *argv) == 2
        assert said in capsys.readouterr().err.splitlines()[-1]  # on a busy machine lines of progress stand before it


def test_sources_keep_within_their_limit_and_leave_tables_and_tests_out(tmp_path):
    for name in ("a.py", "b/c.py", "test/d.py", "b/tests/e.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(f"# {name}\n")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    assert sorted(library_sources(tmp_path, 1000)) == ["# a.py\n", "# b/c.py\n"]
    assert len(list(library_sources(tmp_path, 10))) == 1
    assert {"test", "tests", "site-packages"} <= LEFT_OUT


def test_pieces_lose_nothing_and_begin_at_definitions():
    text = "import x\n" + "".join(f"\n\ndef f{i}():\n" + "    pass  # so long\n" * 100 for i in range(20)) + "end"
    documents = list(pieces(text))
    assert "".join(documents) == text
    assert len(documents) > 5 and all(document.startswith("def ") for document in documents[1:])
    assert list(pieces("")) == []
