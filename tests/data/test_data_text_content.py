"""What a file holds decides how it is read; its name is only a promise, and a broken one is told."""

import bz2
import gzip
import io
import json
import lzma
import tarfile
import zipfile

import pytest
import zstandard
from support.wording import wording

from megatron_lite.cli.main import main
from megatron_lite.data.compression import list_file_kinds
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.data.preprocess import preprocess
from megatron_lite.data.tokenizers import make_tokenizer
from megatron_lite.errors import DataError

BYTES = make_tokenizer("ByteTokenizer")
LINES = "".join(json.dumps({"text": f"document {i} ü"}, ensure_ascii=i % 2 == 0) + "\n" for i in range(9)).encode()
KNOWN = ["a.jsonl", "a.json", "a.ndjson", "a.jsonlines", "a.JSONL", "a.NDJson"]
OTHERS = ["part-00000", "a.txt", "a.jsonl.done", "c4-train.00000-of-01024", "a.en", "noending"]


def read(path, **options):
    """(its documents, what was said)."""
    said = []
    summary = preprocess([path], path.parent / "out", BYTES, append_eod=False, say=said.append, **options)
    indexed = IndexedDataset(summary.prefixes[0])
    return [BYTES.decode(indexed.tokens(i)) for i in range(len(indexed))], said


def write(folder, name, content):
    path = folder / name
    path.write_bytes(content)
    return path


def zipped(**members):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return packed.getvalue()


def tarred(content):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        member = tarfile.TarInfo("a.jsonl")
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()


@pytest.mark.parametrize("name", KNOWN + OTHERS)
def test_json_lines_are_read_as_such_by_any_name(tmp_path, name):
    documents, said = read(write(tmp_path, name, LINES))
    assert documents == [f"document {i} ü" for i in range(9)]
    assert len(said) == (name in OTHERS)


PACKERS = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.compress,
    ".zip": lambda content: zipped(member=content),
}


@pytest.mark.parametrize("ending", PACKERS)
def test_compression_is_known_by_its_first_bytes(tmp_path, ending):
    packed = PACKERS[ending](LINES)
    documents, said = read(write(tmp_path, f"a.jsonl{ending}", packed))
    assert len(documents) == 9 and said == []
    for name in ("part-0001", "a.jsonl", "a.jsonl.gz" if ending != ".gz" else "a.jsonl.bz2"):
        documents, said = read(write(tmp_path, name, packed))
        assert len(documents) == 9 and wording("data/by-its-content") in said[0]
    with pytest.raises(DataError, match="cannot be read|damaged"):
        read(write(tmp_path, f"cut.jsonl{ending}", packed[:-5]))


def test_what_is_not_compressed_is_read_as_it_is(tmp_path):
    documents, said = read(write(tmp_path, "a.jsonl.gz", LINES))
    assert len(documents) == 9 and len(said) == 1 and wording("data/is-not-compressed") in said[0]


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path, name):
    content = LINES if name == "a.jsonl" else b"plain"
    documents, _ = read(write(tmp_path, name, b"\xef\xbb\xbf" + content))
    assert documents[0] == ("document 0 ü" if name == "a.jsonl" else "plain")


PRETTY = json.dumps([{"text": "a", "n": 1}, {"text": "b"}], indent=1)
REFUSED = {  # name, content: what is said of it
    "utf-16": ("a.jsonl", LINES.decode().encode("utf-16"), "is UTF-16, .*iconv -f UTF-16"),
    "utf-16 without a mark": ("a.jsonl", LINES.decode().encode("utf-16-le"), "UTF-16"),
    "utf-32": ("a.txt", "abc".encode("utf-32"), "is UTF-32"),
    "lz4": ("a.jsonl.lz4", b"\x04\x22\x4d\x18dD\xa7" + b"\x00" * 20, "is lz4, .*lz4 -d"),
    "parquet": ("part-0.parquet", b"PAR1\x15\x04\x15" + b"\x00" * 20, "is Parquet.*read_parquet"),
    "tar": ("a.tar", tarred(LINES), "is tar, .*unpack"),
    "tar in gzip": ("a.tgz", gzip.compress(tarred(LINES)), "is tar inside of gzip"),
    "gzip twice": ("a.jsonl.gz", gzip.compress(gzip.compress(LINES)), "is gzip inside of gzip, .*unpack it once"),
    "two files": ("a.zip", zipped(a=LINES, b=LINES), "zip archive of 2 files"),
    "our own": ("a_text_document.idx", b"MMIDIDX\x00\x00" + b"\x00" * 20, "tokenized already"),
    "a list": ("a.json", PRETTY.encode(), r"one JSON list; .*jq -c '\.\[\]'"),
    "a list on a line": ("part-0", json.dumps([{"text": "a"}, {"text": "b"}]).encode(), "one JSON list"),
    "pretty": ("a.json", json.dumps({"text": "a", "n": 1}, indent=1).encode(), "not one a line; .*jq -c '.'"),
    "pretty, another name": ("part-0", b'{\n "text": "a"\n}\n{\n "text": "b"\n}\n', "not one a line"),
    "side by side": ("a.jsonl", b'{"text": "a"}{"text": "b"}\n', "not one a line"),
    "csv": ("a.csv", b"n,body\n1,x\n", "a table .*'n,body'.*read_csv"),
    "csv by its header": ("part-0", b'id,"text"\n1,x\n', "a table"),
    "tsv in gzip": ("a.tsv.gz", gzip.compress(b"id\ttext\n1\tx\n"), "a table"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_neither_text_nor_json_lines_is_one_line_with_a_remedy(tmp_path, kind):
    name, content, message = REFUSED[kind]
    path = write(tmp_path, name, content)
    with pytest.raises(DataError, match=rf"^--input \S+{name}: .*{message}") as raised:
        read(path)
    assert "\n" not in str(raised.value) and list(tmp_path.iterdir()) == [path]


PLAIN = {  # near misses: texts that stay one document
    "prose": "Once, upon a time\nthere, was, text.\n",
    "a template": "{% block body %}\nhi\n{% endblock %}\n",
    "C": '{\n  "text";\n  return 0;\n}\n',
    "a citation": "[1] A. Author, a text, 2020\n[2] B. Author\n",
    "a tutorial": 'A line of JSON is:\n{"text": "one"}\nand that is all of it.\n',
    "JSON without such a key": '{\n "name": "x"\n}\n',
    "names of formats": "ORCHIDS\nBZh is what bzip2 begins with\n",
    "Parquet's mark": "PAR1 is four letters\n",
    "one line, with a comma": "a, text",
    "a first line that ends so": "In this chapter, text\nis, as ever, plain.\n",
    "two words": "more,text\nbut no table\n",
    "empty braces": "{}{}{}",
}


@pytest.mark.parametrize("kind", PLAIN)
def test_plain_text_stays_one_document(tmp_path, kind):
    documents, said = read(write(tmp_path, "a.txt", PLAIN[kind].encode()))
    assert (documents, said) == ([PLAIN[kind]], [])


def test_lines_that_are_no_objects_are_named_among_those_that_are(tmp_path):
    path = write(tmp_path, "part-0", LINES + b"no JSON\n" + LINES)
    documents, said = read(path, on_error="skip")
    assert len(documents) == 18 and f"skipped {path}:10: not JSON" in said[1]
    with pytest.raises(DataError, match="part-0:10: not JSON"):
        read(path)


def test_an_integer_of_too_many_digits_is_a_line_that_is_not_json(tmp_path):
    """Python refuses to read it, without a place where it stands."""
    path = write(tmp_path, "a.jsonl", b'{"text": "a", "n": ' + b"1" * 5000 + b"}\n")
    with pytest.raises(DataError, match="a.jsonl:1: not JSON"):
        read(path)


def test_a_first_line_longer_than_the_sample(tmp_path):
    long = json.dumps({"text": "x" * 100_000}).encode() + b"\n"
    documents, _ = read(write(tmp_path, "part-0", long + LINES))
    assert [len(document) for document in documents[:2]] == [100_000, len("document 0 ü")]


def test_the_table_of_kinds_is_one_of_distinct_beginnings():
    kinds = list_file_kinds()
    assert len({(kind.offset, kind.magic) for kind in kinds}) == len(kinds)
    assert all(kind.reader or kind.remedy for kind in kinds)


ARGUMENTS = ["--tokenizer-type", "ByteTokenizer", "--append-eod"]


@pytest.mark.parametrize(
    "flags",
    [
        ["--json-key", "body"],
        ["--jsonl-keys=body"],
        ["--json_keys", "body"],
        ["--json-keys", "body", "--num-docs", "3"],
    ],
)
def test_older_names_of_flags_are_taken(tmp_path, capsys, flags):
    path = write(tmp_path, "a.jsonl", b'{"body": "x"}\n')
    assert main(["preprocess", "--input", str(path), "--output-prefix", f"{tmp_path}/o", *ARGUMENTS, *flags]) == 0
    assert len(IndexedDataset(f"{tmp_path}/o_body_document")) == 1
    told = capsys.readouterr().err
    assert told.count("note:") == ("_" not in flags[0] or "=" in flags[0])


def test_older_names_of_tokenizers_are_taken(tmp_path, capsys):
    path = write(tmp_path, "a.jsonl", LINES)
    argv = ["preprocess", "--input", str(path), "--output-prefix", f"{tmp_path}/o"]
    assert main([*argv, "--tokenizer-type", "PretrainedFromHF", "--tokenizer-name-or-path", f"{tmp_path}/none"]) == 2
    told = capsys.readouterr().err
    assert "HuggingFaceTokenizer" in told and "--tokenizer-model" in told.splitlines()[-1]


def test_a_pattern_that_no_shell_expanded(tmp_path, capsys):
    for name in ("b.jsonl", "a.jsonl"):
        write(tmp_path, name, json.dumps({"text": name}).encode())
    argv = ["preprocess", "--output-prefix", f"{tmp_path}/o", *ARGUMENTS, "--input"]
    assert main([*argv, f"{tmp_path}/*.jsonl"]) == 0
    indexed = IndexedDataset(f"{tmp_path}/o_text_document")
    assert [BYTES.decode(indexed.tokens(i)[:-1]) for i in range(2)] == ["a.jsonl", "b.jsonl"]
    assert "2 files" in capsys.readouterr().err
    assert main([*argv, f"{tmp_path}/*.txt"]) == 2
    assert wording("data/no-file-fits-this") in capsys.readouterr().err


def test_inspect_says_that_documents_are_json(tmp_path, capsys):
    path = tmp_path / "json.txt"
    path.write_bytes(LINES)
    document, prefix = path.read_text(encoding="utf-8"), str(tmp_path / "d")
    from megatron_lite.data.indexed_writer import IndexedWriter

    for text, warned in ((document, True), (PLAIN["C"], False), (PLAIN["a tutorial"], False)):
        with IndexedWriter(prefix, BYTES.vocab_size) as writer:
            writer.add_document([*BYTES.encode(text), BYTES.eod])
        for more in ([], ["--tokenizer-type", "ByteTokenizer"]):
            assert main(["inspect", prefix, *more]) == 0
            assert ("are JSON" in capsys.readouterr().out) == warned
    # ids of a tokenizer that is not known say nothing
    with IndexedWriter(prefix, 50_000) as writer:
        writer.add_document([*BYTES.encode(document), 40_000])
    assert main(["inspect", prefix]) == 0
    assert ": sound\n" in capsys.readouterr().out
