"""Text files to indexed data sets."""

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_lite.data.indexed import IndexedWriter
from megatron_lite.data.tokenizers import Tokenizer
from megatron_lite.errors import DataError

REPORT_EVERY = 1000  # documents


@dataclass(frozen=True)
class Summary:
    """What was written. documents, tokens: summed over all keys; empty: documents that gave no token."""

    prefixes: tuple[str, ...]  # what --data-path takes
    documents: int
    tokens: int
    text_bytes: int
    empty: int


def preprocess(
    inputs: Sequence[str | Path],
    output_prefix: str | Path,
    tokenizer: Tokenizer,
    *,
    json_keys: Sequence[str] = ("text",),
    append_eod: bool = True,
    report: Callable[[int, int], None] = lambda documents, text_bytes: None,
) -> Summary:
    """Tokenizes documents one by one and writes PREFIX_KEY_document.bin and .idx for each of json_keys.

    .jsonl: one object a line, one document for each key; any other file: one document, its whole text.
    A document that gives no token is left out, as in Megatron. report(documents, bytes so far) is called now and then
    and at the end. DataError for a file, line or key that is missing or no text; nothing is written then.
    """
    _check_inputs(inputs, json_keys)
    prefixes = tuple(f"{output_prefix}_{key}_document" for key in json_keys)
    num_documents = text_bytes = empty = 0
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(IndexedWriter(prefix, tokenizer.vocab_size)) for prefix in prefixes]
        for number, texts in enumerate(_documents(inputs, json_keys), start=1):
            for writer, text in zip(writers, texts):
                ids = tokenizer.encode(text)
                text_bytes += len(text.encode("utf-8", errors="replace"))
                if not ids:
                    empty += 1
                    continue
                writer.add_document([*ids, tokenizer.eod] if append_eod else ids)
                num_documents += 1
            if number % REPORT_EVERY == 0:
                report(num_documents, text_bytes)
    report(num_documents, text_bytes)
    return Summary(prefixes, num_documents, sum(writer.num_tokens for writer in writers), text_bytes, empty)


def _is_jsonl(path: str | Path) -> bool:
    return Path(path).suffix == ".jsonl"


def _check_inputs(inputs: Sequence[str | Path], json_keys: Sequence[str]) -> None:
    for path in inputs:
        if not Path(path).is_file():
            what = "is a folder" if Path(path).is_dir() else "does not exist"
            raise DataError(f"--input {path}: {what}; give .jsonl or text files")
        if len(json_keys) > 1 and not _is_jsonl(path):
            raise DataError(f"--json-keys {' '.join(json_keys)}: {path} is plain text without keys; give one key only")


def _documents(inputs: Iterable[str | Path], json_keys: Sequence[str]) -> Iterator[list[str]]:
    """The texts of each document, one for each key."""
    for path in inputs:
        if _is_jsonl(path):
            yield from _json_lines(path, json_keys)
        else:
            with open(path, "rb") as file:
                yield [_decoded(file.read(), str(path))]


def _json_lines(path: str | Path, json_keys: Sequence[str]) -> Iterator[list[str]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                where = f"{path}:{number}"
                yield _texts(_decoded(line, where), json_keys, where)


def _decoded(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: byte {raw[error.start]:#04x} is not UTF-8; convert the file (iconv -t UTF-8)") from None


def _texts(line: str, json_keys: Sequence[str], where: str) -> list[str]:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON ({error}); mend the line, or name a plain text file .txt") from None
    if not isinstance(document, dict):
        raise DataError(f"{where}: a {type(document).__name__}, not an object; write {{\"text\": \"...\"}} on each line")
    for key in json_keys:
        if not isinstance(document.get(key), str):
            raise DataError(f"{where}: no text under '{key}'; it has {', '.join(document) or 'nothing'} (--json-keys)")
    return [document[key] for key in json_keys]
