"""`megatron-lite make-corpus` makes a data set of real text that every machine has: the sources of Python's own
standard library.

A folder holds one corpus: PREFIX_text_document.{bin,idx}, vocab.json and merges.txt if it has a vocabulary of its
own, and corpus.json, which says what the rest is and whether it is complete.
"""

import hashlib
import json
import platform
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from megatron_lite.cli.parser import Parser
from megatron_lite.data.indexed_writer import IndexedWriter
from megatron_lite.data.tokenizers import make_tokenizer
from megatron_lite.errors import DataError
from megatron_lite.live_line import LiveLine
from megatron_lite.run_folder import write_atomically
from megatron_lite.shared_files import read_foreign
from megatron_lite.terminal import print_lines
from megatron_lite.units import MIB, count, duration, size

MARK = "corpus.json"
DOCUMENT_CHARACTERS = 4000
# Not everywhere installed, or tables rather than text: left out, so that machines agree more or less.
LEFT_OUT = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "turtledemo",
    "distutils",
    "encodings",
    "pydoc_data",
    "__pycache__",
}


class Wanted(msgspec.Struct, frozen=True):
    """The request for a corpus, from the command line."""

    name: str  # of its files
    bpe: int | None  # tokens of its own vocabulary; None: bytes
    max_mb: float  # megabytes of text at most


class CorpusMark(msgspec.Struct, frozen=True, omit_defaults=True):
    """The contents of corpus.json."""

    wanted: Wanted | None = None
    complete: bool = False
    summary: str = ""
    sizes: dict[str, int] = {}  # bytes by name of file


def run(argv: list[str]) -> None:
    """Build the corpus that `argv` asks for, unless it is there already. UserError for a mistake."""
    parser = Parser(
        "make-corpus",
        "A data set from the sources of Python's standard library; nothing is downloaded.",
    )
    add = parser.add_argument
    add(
        "--output-prefix",
        required=True,
        metavar="PREFIX",
        help="writes PREFIX_text_document.bin and .idx",
    )
    add(
        "--bpe",
        type=int,
        metavar="N",
        help="train a BPE of N tokens on it (vocab.json, merges.txt); else bytes",
    )
    add(
        "--max-mb",
        type=float,
        default=8.0,
        metavar="X",
        help="megabytes of text at most [%(default)s]",
    )
    options = parser.parse_args(argv)
    if options.max_mb <= 0:
        raise DataError(f"--max-mb {options.max_mb:g}: must be above 0; 8 is usual")
    prefix = Path(options.output_prefix)
    wanted = Wanted(name=prefix.name, bpe=options.bpe, max_mb=options.max_mb)
    mark = _read_mark(prefix)
    if mark is not None and mark.wanted == wanted and mark.complete:
        sizes = {}
        for path in _list_files(prefix, options.bpe):
            sizes[path.name] = path.stat().st_size if path.is_file() else None
        if sizes == mark.sizes:
            print_lines([f"corpus: {prefix}_text_document is there already: {mark.summary}"])
            return
    started = time.monotonic()
    line = LiveLine()
    try:
        summary = _build(prefix, wanted, line)
    finally:
        line.wipe()
    print_lines([f"corpus: {prefix}_text_document made in {duration(time.monotonic() - started)}: {summary}"])


def _read_mark(prefix: Path) -> CorpusMark | None:
    """Read the corpus.json of an earlier call. DataError for a vocabulary or data set of other origin."""
    file = prefix.parent / MARK
    mark = None
    other = None
    try:
        mark = msgspec.json.decode(read_foreign(file), type=CorpusMark)
    except (FileNotFoundError, NotADirectoryError):
        foreign = [path for path in _list_files(prefix, 0) if path.exists()]
        other = f"{foreign[0]} exists and is not make-corpus's" if foreign else None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        raise DataError(f"{file}: not readable as JSON; delete it with its folder, or choose another") from None
    if mark is not None and (mark.wanted is None or mark.wanted.name != prefix.name):
        other = f"{prefix.parent} holds another corpus"
    if other:
        raise DataError(f"--output-prefix {prefix}: {other}; choose another folder")
    return mark


def _write_mark(prefix: Path, mark: CorpusMark) -> None:
    try:
        write_atomically(prefix.parent / MARK, json.dumps(msgspec.to_builtins(mark), indent=1) + "\n")
    except OSError as error:
        why = f"cannot be written ({error.strerror})"
        raise DataError(f"--output-prefix {prefix}: {why}; choose another folder") from None


def _list_files(prefix: Path, bpe: int | None) -> list[Path]:
    indexed = [Path(f"{prefix}_text_document{ending}") for ending in (".bin", ".idx")]
    return indexed if bpe is None else [*indexed, prefix.parent / "vocab.json", prefix.parent / "merges.txt"]


def library_sources(stdlib: Path, max_bytes: float) -> Iterator[str]:
    """The documents of the library's files, until the next file would exceed max_bytes.

    In the order of their names' hashes: fixed, and mixed, so that the last ones, which a split uses for validation,
    are like the first.
    """
    names = [path.relative_to(stdlib).as_posix() for path in stdlib.rglob("*.py")]
    names = [name for name in names if not LEFT_OUT & set(name.split("/"))]
    for name in sorted(names, key=lambda name: hashlib.sha256(name.encode()).hexdigest()):
        try:
            text = (stdlib / name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue  # a few files of the library show off other encodings
        max_bytes -= len(text.encode("utf-8"))
        if max_bytes < 0:
            return
        yield from pieces(text)


def pieces(text: str) -> Iterator[str]:
    """A source file cut before definitions at its outermost level, into documents of DOCUMENT_CHARACTERS or more.

    A few hundred whole files would leave none for the test share of a split such as 949,50,1.
    """
    piece: list[str] = []
    length = 0
    for line in text.splitlines(keepends=True):
        if length >= DOCUMENT_CHARACTERS and line.startswith(("def ", "class ", "async def ", "@")):
            yield "".join(piece)
            piece = []
            length = 0
        piece.append(line)
        length += len(line)
    if piece:
        yield "".join(piece)


def _build(prefix: Path, wanted: Wanted, line: LiveLine) -> str:
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    bpe = wanted.bpe
    texts = list(library_sources(stdlib, wanted.max_mb * MIB))
    if not texts:
        raise DataError(f"{stdlib}: this Python has no .py sources; use another one, or megatron-lite preprocess")
    _write_mark(prefix, CorpusMark(wanted))
    if bpe is None:
        tokenizer = make_tokenizer("ByteTokenizer")
    else:
        # its packages take as long to import as the rest
        from megatron_lite.data.byte_pairs import train_bpe, write_bpe

        line.draw(f"training a BPE of {count(bpe)} tokens")
        write_bpe(prefix.parent, *train_bpe(texts, bpe))
        vocab, merges = _list_files(prefix, bpe)[2:]
        tokenizer = make_tokenizer("GPT2BPETokenizer", vocab_file=str(vocab), merge_file=str(merges))
    end = tokenizer.eod
    assert end is not None
    text_bytes = 0
    with IndexedWriter(f"{prefix}_text_document", tokenizer.vocab_size) as writer:
        for number, text in enumerate(texts, start=1):
            writer.add_document([*tokenizer.encode(text), end])
            text_bytes += len(text.encode("utf-8"))
            line.draw(f"{count(number)} documents, {size(text_bytes)}")
    summary = (
        f"{count(len(texts))} documents of Python {platform.python_version()}'s library, {size(text_bytes)}, "
        f"{count(writer.written.tokens)} tokens of {count(tokenizer.vocab_size)}"
    )
    sizes = {path.name: path.stat().st_size for path in _list_files(prefix, bpe)}
    _write_mark(prefix, CorpusMark(wanted, True, summary, sizes))
    return summary
