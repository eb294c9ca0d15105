"""Read what torch.distributed.debug leaves: its periodic dumps, and its pages where somebody saved them.

A dump asks all ranks, and has a section for each: stacks by faulthandler or py-spy, wait counters, or the flight
recorder as JSON (pages only). In front stands which ranks did not answer. The dump fr_trace has tables of torch's own
analysis in place of recordings: what they say of each collective is read. torch 2.13 writes no such dump of jobs on
gloo: its analysis needs the ranks of groups, which gloo's recorder does not list.

Form: torch/distributed/debug/_frontend.py and _debug_handlers.py of torch 2.10 to 2.13.
"""

import itertools
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from megatron_lite.plain_pickles import parse_json
from megatron_lite.postmortem.debug_tables import read_tables
from megatron_lite.postmortem.evidence import (
    JobEvidence,
    RankProgress,
    UnansweredRequest,
)
from megatron_lite.postmortem.flight_recordings import build_recordings
from megatron_lite.postmortem.process_stacks import parse_stacks
from megatron_lite.shared_files import read_foreign

MAX_DEBUG_DUMP_BYTES = 2**28
MAX_SECTIONS = 2**16
MAX_ANSWER_LETTERS = 300
SECTION = re.compile(
    r"^(?:=== |\s*<h[23]>)Rank (?P<rank>\d{1,6}): http://(?P<host>[^\s/]{1,255}?)(?::\d+)?/handler/"
    r"(?P<handler>\w{1,64})[^\n]*\n",
    re.MULTILINE,
)
PARTIAL = re.compile(
    r"^(?:\s*<pre>)?PARTIAL DATA: (?P<answered>\d{1,6})/(?P<asked>\d{1,6}) workers responded$", re.MULTILINE
)
FAILURE = re.compile(r"^  Rank (?P<rank>\d{1,6}): (?P<why>[^\n]*?)(?:</pre>)?$", re.MULTILINE)
SUMMARY_END = re.compile(r"\n\s*\n|</pre>(?=\n)")
# of a section, by the status of HTTP; other errors are answers: the rank does not know the request
FAILED_ANSWER = re.compile(r"\s*(?:Error: |<p>Failed to (?:fetch|dump): status=)(?P<status>\d{3})\b")
NO_ANSWER = {"408": "Timeout", "502": "Error", "503": "ConnectionError"}
REFUSED = re.compile(r"Connect call failed|Connection refused")
TIMED_OUT = re.compile(r"Timeout")
HANDLER_MISSING = re.compile(r"Handler \w+ not found")
IN_PAGE = re.compile(r"\s*<pre>(?P<text>.*?)</pre>", re.DOTALL)
TABLES = re.compile(r"^=== (?:TorchComms )?FR Trace(?: NCCL)? ===$", re.MULTILINE)
STORED_ADDRESS = re.compile(
    r"^debug_server/rank(?P<rank>\d{1,6}): b'http://(?P<host>[^\s/':]{1,255}):\d+'$", re.MULTILINE
)
# of the file's name, in local time
WRITTEN_AT = re.compile(r"_(\d{8}_\d{6})\.txt$")
COUNTER_PREFIX = "pytorch.wait_counter."


def is_debug_dump(head: bytes, path: Path) -> bool:
    """Whether a file that begins with `head` is a dump or page of torch.distributed.debug."""
    text = head.decode("utf-8", "replace")
    if PARTIAL.match(text) or TABLES.match(text) or STORED_ADDRESS.search(text):
        return True
    found = SECTION.search(text)
    is_page = text.lstrip().startswith("<") and "Torch Distributed Debug Server" in text
    if is_page:
        return found is not None or "<h2>Collectives</h2>" in text
    return found is not None and found.start() == 0


def read_debug_dump(path: Path) -> JobEvidence:
    """Read a dump or page; OSError for one that cannot be read."""
    text = read_foreign(path, MAX_DEBUG_DUMP_BYTES).decode("utf-8", "replace")
    return _DumpReader(str(path), _find_time(path)).read(text)


def _find_time(path: Path) -> float | None:
    """When a dump was written, by its name, as the clock of the machine that reads it understands it."""
    found = WRITTEN_AT.search(path.name)
    if found is None:
        return None
    try:
        return time.mktime(time.strptime(found[1], "%Y%m%d_%H%M%S"))
    except (ValueError, OverflowError):
        return None


# --- sections of ranks


@dataclass(frozen=True)
class _Section:
    rank: int
    host: str
    handler: str
    text: str


def _split_sections(text: str) -> Iterator[_Section]:
    """The answer of each rank."""
    found = list(SECTION.finditer(text))[:MAX_SECTIONS]
    ends = [section.start() for section in found[1:]]
    for section, end in zip(found, [*ends, len(text)], strict=False):
        answer = text[section.end() : end]
        if shown := IN_PAGE.match(answer):
            answer = shown["text"]
        yield _Section(int(section["rank"]), section["host"], section["handler"], answer)


class WaitCounter(msgspec.Struct):
    """How often a wait was entered, and how many threads are in it."""

    active_count: int


class _DumpReader:
    """Reads a dump or page, section by section."""

    def __init__(self, source: str, written_at: float | None):
        self._source = source
        self._written_at = written_at
        self._hosts: dict[int, str] = {}

    def read(self, text: str) -> JobEvidence:
        pieces = []
        sections = list(_split_sections(text))
        for section in sections:
            self._hosts[section.rank] = section.host
            if not FAILED_ANSWER.match(section.text):
                pieces.append(self._read_section(section))
        unanswered = self._read_unanswered(text, sections)
        progress = [one for piece in pieces for one in piece.progress] + self._read_addresses(text)
        silent = {request.rank for request in unanswered}
        return JobEvidence(
            recordings=(
                *(one for piece in pieces for one in piece.recordings),
                *read_tables(text, self._source, silent),
            ),
            stacks=tuple(one for piece in pieces for one in piece.stacks),
            progress=tuple(progress),
            unanswered=unanswered,
            world_size=self._find_world_size(text, progress),
            unread=tuple(line for piece in pieces for line in piece.unread),
        )

    def _read_section(self, section: _Section) -> JobEvidence:
        if section.text.lstrip()[:1] in ("{", "["):
            return self._read_json(section)
        stacks = parse_stacks(section.text, self._source, section.rank)
        placed = [replace(one, rank=section.rank, host=section.host, taken_at=self._written_at) for one in stacks]
        if not placed and section.text.strip():
            return JobEvidence(unread=(f"{self._source}: the answer of rank {section.rank} is of no known form.",))
        return JobEvidence(stacks=tuple(placed))

    def _read_json(self, section: _Section) -> JobEvidence:
        try:
            values = parse_json(section.text.encode("utf-8", "replace"))
        except (ValueError, RecursionError):
            return JobEvidence(unread=(f"{self._source}: the answer of rank {section.rank} is damaged JSON.",))
        try:
            counters = msgspec.convert(values, dict[str, WaitCounter])
        except msgspec.ValidationError:
            return build_recordings(values, self._source, section.rank)
        waits = [name.removeprefix(COUNTER_PREFIX) for name, counter in counters.items() if counter.active_count > 0]
        progress = RankProgress(
            source=self._source,
            rank=section.rank,
            host=section.host,
            seen_at=self._written_at,
            phase=", ".join(waits)[:MAX_ANSWER_LETTERS] or None,
        )
        return JobEvidence(progress=(progress,))

    def _find_world_size(self, text: str, progress: list[RankProgress]) -> int | None:
        """The number of ranks: all of them are asked, and write their addresses before."""
        if asked := PARTIAL.search(text):
            return int(asked["asked"])
        ranks = {*self._hosts, *(one.rank for one in progress)}
        return len(ranks) if ranks and max(ranks) + 1 == len(ranks) else None

    def _read_unanswered(self, text: str, sections: list[_Section]) -> tuple[UnansweredRequest, ...]:
        """Ranks that did not answer: the summary says why, a page's sections the status only."""
        reasons = {}
        if summary := PARTIAL.search(text):
            end = SUMMARY_END.search(text, summary.end())
            for found in FAILURE.finditer(text, summary.end(), end.start() if end else len(text)):
                reasons[int(found["rank"])] = found["why"]
        for section in sections:
            failed = FAILED_ANSWER.match(section.text)
            if failed and failed["status"] in NO_ANSWER:
                reasons.setdefault(section.rank, NO_ANSWER[failed["status"]])
        return tuple(
            self._describe_request(rank, why) for rank, why in sorted(reasons.items()) if not HANDLER_MISSING.match(why)
        )

    def _describe_request(self, rank: int, why: str) -> UnansweredRequest:
        was_refused = None
        if REFUSED.search(why):
            was_refused = True
        elif TIMED_OUT.match(why):
            was_refused = False
        shown = why[:MAX_ANSWER_LETTERS].strip().rstrip(":")
        return UnansweredRequest(self._source, rank, shown, was_refused, self._hosts.get(rank), self._written_at)

    def _read_addresses(self, text: str) -> list[RankProgress]:
        """The host of each rank, of a dump of the store; the rank itself is not heard of in it."""
        return [
            RankProgress(source=self._source, rank=int(one["rank"]), host=one["host"])
            for one in itertools.islice(STORED_ADDRESS.finditer(text), MAX_SECTIONS)
        ]


def keep_last_requests(evidence: JobEvidence) -> tuple[UnansweredRequest, ...]:
    """The last request to each rank that did not answer, unless the rank was heard of later."""
    heard: dict[int, float] = {}
    for stacks in evidence.stacks:
        if stacks.rank is not None and stacks.taken_at is not None:
            heard[stacks.rank] = max(heard.get(stacks.rank, 0.0), stacks.taken_at)
    for progress in evidence.progress:
        if progress.seen_at is not None:
            heard[progress.rank] = max(heard.get(progress.rank, 0.0), progress.seen_at)
    last: dict[int, UnansweredRequest] = {}
    for request in sorted(evidence.unanswered, key=lambda one: one.asked_at or 0.0):
        last[request.rank] = request
    kept = []
    for rank, request in sorted(last.items()):
        is_old = request.asked_at is not None and heard.get(rank, 0.0) > request.asked_at
        if not is_old:
            kept.append(request)
    return tuple(kept)
