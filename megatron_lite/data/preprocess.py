"""Turns text files into indexed data sets."""

import contextlib
import hashlib
import json
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_lite.data.indexed_writer import PairWriter, checked_ids, token_dtype
from megatron_lite.data.resume_state import ENDING, DataProgress, Unfinished
from megatron_lite.data.text_content import TextContent, look_into
from megatron_lite.data.text_files import Chunk, chunks
from megatron_lite.data.tokenizers import Tokenizer
from megatron_lite.errors import DataError, UserError

ON_ERROR = ("stop", "skip")
NAMES_SHOWN = 10
MAX_DOCUMENT_MB = 128  # Python needs about six times as much for one, in each worker
SECONDS_TO_DIE = 10
Report = Callable[[int, int, float], None]  # takes documents, bytes of text, and the share of the input that is done
Say = Callable[[str], None]
AHEAD = 2  # tasks under way or waiting for an earlier one, per worker


@dataclass
class Summary(DataProgress):
    """The data sets that were written, counted."""

    prefixes: tuple[str, ...] = ()  # what --data-path takes
    tokens: int = 0  # of all keys


def preprocess(
    inputs: Sequence[str | Path],
    output_prefix: str | Path,
    tokenizer: Tokenizer,
    *,
    json_keys: Sequence[str] = ("text",),
    append_eod: bool = True,
    workers: int = 1,
    on_error: str = "stop",
    max_document_mb: int = MAX_DOCUMENT_MB,
    report: Report = lambda documents, text_bytes, share: None,
    say: Say = lambda line: None,
) -> Summary:
    """Tokenizes documents and writes PREFIX_KEY_document.bin and .idx for each of json_keys.

    A file whose lines are JSON objects, whatever its name: one document for each key and line; any other file of text:
    one document, its whole text. Either may be compressed (gzip, zstandard, bzip2, xz, zip of one file). The bytes are
    the same for any number of workers, and after any interruption, which the next call with the same arguments goes on
    from. A document that gives no token is left out, as in Megatron.

    Args:
        inputs: Paths of the files.
        output_prefix: The beginning of the new files' paths.
        tokenizer: Must be picklable.
        json_keys: Keys of JSON objects whose texts are documents.
        append_eod: Whether documents end with the end-of-document token.
        workers: Processes that tokenize; 1 is this process itself.
        on_error: stop, or skip bad lines.
        max_document_mb: MiB of the longest line, or file that is one document; a longer one is a bad line.
        report: Is called now and then with documents, bytes of text, and the share of the input that is done.
        say: Is told of each bad line that is left out, of what is continued, and of names that mislead.

    Raises:
        DataError: A file, line or key is missing or no text; no pair appears under its name then.
        WorkerDied: A worker process ended before its work did.
    """
    contents = _check(inputs, json_keys, workers, max_document_mb)
    if append_eod and tokenizer.eod is None:
        raise UserError("--append-eod: this tokenizer has no end-of-document token; leave it out, or choose another")
    for note in _list_notes(contents):
        say(f"  note: {note}")
    prefixes = tuple(f"{output_prefix}_{key}_document" for key in json_keys)
    pairs = [PairWriter(prefix, token_dtype(tokenizer.vocab_size), ENDING) for prefix in prefixes]
    files = [_identify_file(path) for path in inputs]
    settings = _describe_settings(files, tokenizer, json_keys, append_eod, max_document_mb)
    input_bytes = max(1, sum(file.size for file in files))
    tokenize = partial(tokenize_chunk, tokenizer, tuple(json_keys), append_eod)
    with Unfinished(str(output_prefix), pairs, settings, on_error == "skip", say) as unfinished:
        progress = unfinished.progress
        tasks = chunks(inputs, contents, progress.place, max_document_mb)
        with contextlib.closing(in_order(tokenize, tasks, workers)) as results:
            for chunk, result in results:
                _take_mistakes(result.mistakes, on_error, say)
                _append(pairs, result, progress)
                progress.place = chunk.end
                unfinished.save_progress()
                report(progress.documents, progress.text_bytes, chunk.bytes_read / input_bytes)
    tokens = sum(pair.written.tokens for pair in pairs)
    return Summary(**vars(progress), prefixes=prefixes, tokens=tokens)


class _FileFacts(NamedTuple):
    """Facts that change when a file is replaced or written."""

    path: str  # absolute
    size: int  # bytes
    changed_ns: int


def _identify_file(path: str | Path) -> _FileFacts:
    """Note what tells an input from another one."""
    status = os.stat(path)
    return _FileFacts(os.path.abspath(path), status.st_size, status.st_mtime_ns)


def _describe_settings(
    files: Sequence[_FileFacts],
    tokenizer: Tokenizer,
    json_keys: Sequence[str],
    append_eod: bool,
    max_document_mb: int,
) -> dict[str, object]:
    """Describe all that decides the bytes written: an interrupted call is continued only with the same.

    Args:
        files: The inputs.
        tokenizer: Turns text into ids.
        json_keys: Keys of JSON objects whose texts are documents.
        append_eod: Whether documents end with the end-of-document token.
        max_document_mb: MiB of the longest line or file.
    """
    return {
        "--input": [list(file) for file in files],
        "--json-keys": list(json_keys),
        "--append-eod": append_eod,
        "--max-document-mb": max_document_mb,
        "the tokenizer": hashlib.sha256(pickle.dumps(tokenizer)).hexdigest(),
    }


def _take_mistakes(mistakes: Sequence[str], on_error: str, say: Say) -> None:
    """Report the lines of a chunk that are left out.

    Args:
        mistakes: FILE:LINE: what is wrong with it.
        on_error: stop or skip.
        say: Is told of each line that is skipped.

    Raises:
        DataError: There is a mistake, and on_error is stop.
    """
    for mistake in mistakes:
        if on_error == "stop":
            raise DataError(mistake)
        say(f"skipped {mistake}")


def _append(pairs: Sequence[PairWriter], result: "Tokenized", progress: DataProgress) -> None:
    """Add what became of a chunk to the pairs, one for each key, and to the counts."""
    for pair, (tokens, lengths) in zip(pairs, result.columns):
        pair.append(tokens, lengths, np.arange(1, len(lengths) + 1))
        progress.documents += len(lengths)
    progress.text_bytes += result.text_bytes
    progress.empty += result.empty
    progress.skipped += len(result.mistakes)


def _check(
    inputs: Sequence[str | Path], json_keys: Sequence[str], workers: int, max_document_mb: int
) -> list[TextContent]:
    """Look into each input, and return what it holds. UserError for the first mistake."""
    if workers < 1:
        raise UserError(f"--workers {workers}: must be 1 or more; the number of cores is usual")
    if max_document_mb < 1:
        raise UserError(f"--max-document-mb {max_document_mb}: must be 1 or more; {MAX_DOCUMENT_MB} is usual")
    if len(set(json_keys)) < len(json_keys):
        raise DataError(f"--json-keys {' '.join(json_keys)}: one key is named twice; name it once")
    contents: list[TextContent] = []
    for path in inputs:
        if not Path(path).is_file():
            raise DataError(f"--input {path}: {_describe_no_file(Path(path))}")
        content = look_into(path, json_keys)
        contents.append(content)
        if len(json_keys) > 1 and not content.is_jsonl:
            raise DataError(f"--json-keys {' '.join(json_keys)}: {path} is plain text without keys; give one key only")
    return contents


def _list_notes(contents: Sequence[TextContent]) -> list[str]:
    """Collect the remarks on all inputs."""
    return [note for content in contents for note in content.notes]


def _describe_no_file(path: Path) -> str:
    """Say what stands at a path that is no file, with the remedy."""
    if path.is_dir():
        return f"is a folder; give the files in it ({path}/*)"
    if path.exists():
        return "is no regular file; write the text into one first"
    return "does not exist; give .jsonl or text files"


class Tokenized(NamedTuple):
    """The tokens of a chunk."""

    # for each key the bytes of all tokens, and int32 [documents], their lengths in tokens
    columns: list[tuple[bytes, NDArray[np.int32]]]
    text_bytes: int
    empty: int  # documents that gave no token
    mistakes: list[str]  # FILE:LINE: what is wrong with it


def tokenize_chunk(tokenizer: Tokenizer, json_keys: tuple[str, ...], append_eod: bool, chunk: Chunk) -> Tokenized:
    """The tokens of a chunk's documents. A document or line that cannot be used is a mistake, and left out.

    Args:
        tokenizer: Turns text into ids.
        json_keys: Keys of JSON objects whose texts are documents.
        append_eod: Whether documents end with the end-of-document token.
        chunk: Lines, or one document.
    """
    end = [tokenizer.eod] if append_eod and tokenizer.eod is not None else []
    columns: list[list[NDArray[np.integer]]] = [[] for _ in json_keys]
    mistakes = [chunk.mistake] if chunk.mistake else []
    text_bytes = 0
    empty = 0
    for where, raw in _list_places(chunk):
        try:
            text = raw.decode("utf-8")
            texts = [text] if chunk.first_line is None else _read_texts(text, json_keys)
            documents = [_tokenize(tokenizer, text, end) for text in texts]
        except UnicodeDecodeError as error:
            byte = error.object[error.start]
            mistakes.append(f"{where}: byte {byte:#04x} is not UTF-8; convert the file (iconv -t UTF-8)")
            continue
        except DataError as error:
            mistakes.append(f"{where}: {error}")
            continue
        text_bytes += sum(len(text.encode("utf-8", errors="replace")) for text in texts)
        for column, ids in zip(columns, documents):
            if ids.size:
                column.append(ids)
            else:
                empty += 1
    return Tokenized([_join(column) for column in columns], text_bytes, empty, mistakes)


def _list_places(chunk: Chunk) -> Iterator[tuple[str, bytes]]:
    """The lines of a chunk that are not blank, or its one document, and where each stands, as FILE:LINE."""
    if chunk.first_line is not None:
        for number, line in enumerate(chunk.raw.split(b"\n"), start=chunk.first_line):
            if line.strip():
                yield f"{chunk.path}:{number}", line
    elif not chunk.mistake:
        yield chunk.path, chunk.raw


def _tokenize(tokenizer: Tokenizer, text: str, end: list[int]) -> NDArray[np.integer]:
    """The ids of one document, in the type that they are stored in. DataError for ids that cannot be.

    Args:
        tokenizer: Turns text into ids.
        text: The document's text.
        end: Ids that follow those of a document that has any.
    """
    ids = tokenizer.encode(text)
    if len(ids) and end:
        ids = [*ids, *end]
    return checked_ids(ids, tokenizer.vocab_size, "the text").astype(token_dtype(tokenizer.vocab_size))


def _join(documents: list[NDArray[np.integer]]) -> tuple[bytes, NDArray[np.int32]]:
    """The bytes of all documents' ids, and their lengths in tokens."""
    lengths = np.array([len(ids) for ids in documents], np.int32)
    return b"".join(ids.tobytes() for ids in documents), lengths


def _read_texts(line: str, json_keys: Sequence[str]) -> list[str]:
    """The texts of a line of JSON, one for each key. DataError if one is missing."""
    try:
        document = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"not JSON ({error}); mend the line, or name a plain text file .txt") from None
    if not isinstance(document, dict):
        raise DataError(f'a {type(document).__name__}, not an object; write {{"text": "..."}} on each line')
    for key in json_keys:
        if key in document and not isinstance(document[key], str):
            raise DataError(
                f"the value of '{key}' is {_name_json_kind(document[key])}, not a text; mend or drop the line"
            )
        if key not in document:
            # repr for what would break the line, or command the terminal.
            names = [name if name.isprintable() else repr(name) for name in list(document)[:NAMES_SHOWN]]
            if len(document) > NAMES_SHOWN:
                names.append("...")
            known = ", ".join(names) or "nothing"
            raise DataError(f"no text under '{key}'; it has {known} (--json-keys)")
    return [document[key] for key in json_keys]


def _name_json_kind(value: object) -> str:
    """Name a value that JSON can hold, but for a text."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    names = {list: "a list", dict: "an object", int: "a number", float: "a number"}
    return names[type(value)]


# --- work spread over processes


class WorkerDied(UserError):
    """A worker process ended before its work did."""

    exit_code = 1


def in_order(
    function: Callable[[Chunk], Tokenized], tasks: Iterable[Chunk], workers: int
) -> Generator[tuple[Chunk, Tokenized], None, None]:
    """Do tasks in worker processes. To be closed when it is not read to its end.

    Args:
        function: Does one of them; it is pickled, as tasks are.
        tasks: Read a little ahead of what is done.
        workers: How many processes; 1 is this process itself.

    Yields:
        Each task with its result, in their order.

    Raises:
        WorkerDied: A worker is killed or fails.
    """
    if workers == 1:
        for task in tasks:
            yield task, function(task)
        return
    context = multiprocessing.get_context("spawn")  # forking copies locks that other threads hold
    unrelated = set(multiprocessing.active_children())
    pending: deque[tuple[Chunk, Future[Tokenized]]] = deque()
    processes: set[BaseProcess] = set()
    pool = ProcessPoolExecutor(workers, context, _prepare_worker, (function,))
    try:
        for task in tasks:
            pending.append((task, pool.submit(_work, task)))
            processes.update(set(multiprocessing.active_children()) - unrelated)
            if len(pending) == AHEAD * workers:
                first, result = pending.popleft()
                yield first, result.result()
        while pending:
            first, result = pending.popleft()
            yield first, result.result()
    except BrokenProcessPool:
        raise _describe_death(processes) from None
    finally:
        for process in processes:
            process.terminate()
        pool.shutdown(cancel_futures=True)


def _describe_death(processes: set[BaseProcess]) -> WorkerDied:
    """The error that says how the first worker to end did so; the pool terminates the rest."""
    give_up = time.monotonic() + SECONDS_TO_DIE
    # not by join: the pool's own thread may have waited for one, and tell its exit code in a moment
    while any(process.exitcode is None for process in processes) and time.monotonic() < give_up:
        time.sleep(0.01)
    codes = [process.exitcode for process in processes if process.exitcode is not None]
    code = next((code for code in codes if code != -signal.SIGTERM), -signal.SIGTERM)
    how = f"exit code {code}"
    remedy = "its own message stands above; --workers 1 does without processes"
    if code < 0:
        how = signal.Signals(-code).name
        remedy = "mostly for lack of memory; choose a smaller number"
    return WorkerDied(f"--workers: a worker process died ({how}), {remedy}")


_function: Callable[[Chunk], Tokenized]  # in a worker: what it does with each task


def _prepare_worker(function: Callable[[Chunk], Tokenized]) -> None:
    """Keep what a worker does with each task.

    It ends with its parent, whose Ctrl-C reaches the whole process group.
    """
    global _function
    _function = function
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Wait for the end of the process that started this worker, and end it too."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)


def _work(task: Chunk) -> Tokenized:
    """Do one task in a worker, which an error ends."""
    try:
        return _function(task)
    except Exception:  # noqa: BLE001 - whatever it is, its place is the worker's
        traceback.print_exc()
        os._exit(1)
