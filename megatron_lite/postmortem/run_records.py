"""Reads what this package's trainer writes of a run, and `watch` for scripts of others.

These are ranks.json, last_words-RANK.json, steps.jsonl and run.json.

Each is recognized by its content. Its reader returns what the file holds as evidence, and raises UserError, one line,
or OSError for a file that cannot be read.
"""

import json
import math
import re
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from megatron_lite.errors import UserError, describe_io_error
from megatron_lite.formats.failure_record import NO_ERROR, FailureRecord, RankAtFailure
from megatron_lite.formats.file_names import LAST_WORDS, RUN_FILE
from megatron_lite.formats.run_record import MAX_RANKS, RunRecord
from megatron_lite.formats.sound_fields import convert_sound
from megatron_lite.formats.step_records import (
    MAX_STEP_LINE_BYTES,
    HardwareRecord,
    RankInterval,
    RanksRecord,
    StepRecord,
)
from megatron_lite.postmortem.elastic_table import FailureTable
from megatron_lite.postmortem.evidence import (
    ALL_RANKS_GROUP,
    EventKind,
    FlightRecording,
    GroupProgress,
    JobEvidence,
    LogEvent,
    ProcessEnd,
    ProcessStacks,
    RankProgress,
    RecordedGroup,
    StackFrame,
    ThreadStack,
)
from megatron_lite.postmortem.hardware_events import MAX_HARDWARE_EVENTS, find_gpu_errors, find_own_gpu_errors
from megatron_lite.postmortem.log_prefixes import LineOrigin
from megatron_lite.process_state import is_there
from megatron_lite.shared_files import open_foreign, read_foreign

MAX_MESSAGE_CHARACTERS = 2_000  # characters of a message that are kept
STEPS_OF_MEDIAN = 64  # the last ones
MAX_NOT_FINITE = 100  # steps that are named
FRAME_OF_STATUS = re.compile(r"(?P<function>.*) \((?P<file>.*):(?P<line>\d{1,9})\)")
ERROR_OF_STATUS = re.compile(r"(?P<error>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?", re.DOTALL)
FAILED = "failed: "
NAME_OF_LAST_WORDS = re.compile(re.escape(LAST_WORDS) + r"(?P<rank>\d{1,7})\.json")
VERDICT_FIELD = re.compile(rb'"verdict"\s*:\s*"')
PLACE_FIELDS = (re.compile(rb'"pids"\s*:'), re.compile(rb'"phase_s"\s*:'), re.compile(rb'"blameless"\s*:'))
RANKS_FIELD = re.compile(rb'"ranks"\s*:\s*\{')
SCHEMA_FIELD = re.compile(rb'"schema"\s*:\s*\d')
STATUS_FIELD = re.compile(rb'"status"\s*:\s*"')
START_FIELD = re.compile(rb'"started"\s*:\s*"')
STEP_LINE = re.compile(rb'^\{"kind":\s?"(?:step|ranks|hardware)"', re.MULTILINE)


def is_ranks_file(head: bytes, path: Path) -> bool:
    """Whether a file that begins with `head` is a ranks.json, whatever its name."""
    return head.lstrip()[:1] == b"{" and bool(VERDICT_FIELD.search(head)) and bool(RANKS_FIELD.search(head))


def is_last_words(head: bytes, path: Path) -> bool:
    """Whether a file that begins with `head` holds the last words of a rank, whatever its name."""
    return head.lstrip()[:1] == b"{" and all(field.search(head) for field in PLACE_FIELDS)


def is_run_file(head: bytes, path: Path) -> bool:
    """Whether a file that begins with `head` is a run.json, whatever its name."""
    is_object = head.lstrip()[:1] == b"{"
    return is_object and all(field.search(head) for field in (SCHEMA_FIELD, STATUS_FIELD, START_FIELD))


def is_steps_file(head: bytes, path: Path) -> bool:
    """Whether a file that begins with `head` is a steps.jsonl, whatever its name."""
    return STEP_LINE.search(head) is not None


def read_ranks_file(path: Path) -> JobEvidence:
    """Read ranks.json: the last status of each rank of a run that died, hung or failed."""
    failure, lost = convert_sound(_load_object(path), FailureRecord)
    statuses = {}
    for name, status in failure.ranks.items():
        if name.isdecimal() and len(name) < len(str(MAX_RANKS)):
            statuses[int(name)] = status
        else:
            lost.append(f"ranks.{name[:MAX_MESSAGE_CHARACTERS]}: no rank")
    found = describe_statuses(str(path), statuses)
    return replace(found, unread=tuple(f"{path}: {problem}" for problem in lost))


def describe_statuses(source: str, statuses: Mapping[int, RankAtFailure]) -> JobEvidence:
    """Make evidence of what ranks said of themselves last.

    Args:
        source: Names where they said it.
        statuses: By rank.
    """
    return JobEvidence(
        recordings=tuple(_describe_collectives(source, rank, status) for rank, status in statuses.items()),
        stacks=tuple(_describe_stack(source, rank, status) for rank, status in statuses.items() if status.stack),
        ends=tuple(_describe_leaving(source, rank, status) for rank, status in statuses.items() if has_ended(status)),
        progress=tuple(_describe_progress(source, rank, status) for rank, status in statuses.items()),
    )


def read_last_words(path: Path) -> JobEvidence:
    """Read last_words-RANK.json: what a rank under `watch` said of itself last."""
    status, lost = convert_sound(_load_object(path), RankAtFailure)
    source = str(path)
    rank = status.rank
    if rank is None:
        rank = find_rank_in_name(path.name)
    ends = [_describe_leaving(source, rank, status)] if has_ended(status) else []
    # a launcher under watch: its error lists the processes that failed, as its console does
    table = FailureTable()
    for number, line in enumerate(status.message.splitlines(), start=1):
        table.feed(number, line, LineOrigin())
    ends += [replace(end, source=source) for end, _ in table.list_ends(source)]
    # how far each group is stands in the flight recording of the rank
    return JobEvidence(
        stacks=(_describe_stack(source, rank, status),) if status.stack else (),
        ends=tuple(ends),
        events=tuple(replace(root, source=source) for root in table.list_roots(source)),
        progress=() if rank is None else (_describe_progress(source, rank, status),),
        world_size=status.world_size or None,
        unread=tuple(f"{source}: {problem}" for problem in lost),
    )


def find_rank_in_name(name: str) -> int | None:
    """The rank in the name of a file of last words."""
    found = NAME_OF_LAST_WORDS.search(name)
    return int(found["rank"]) if found else None


def has_ended(status: RankAtFailure) -> bool:
    """Whether a rank has said how it ended, or others saw that it has."""
    is_dead = status.process_state == "dead" or status.exit_code is not None or status.ended_at is not None
    return bool(is_dead or status.left or status.error)


def _load_object(path: Path) -> dict[str, Any]:
    """The JSON object of a file. UserError where there is none."""
    try:
        values = json.loads(read_foreign(path))
    except OSError as error:
        raise UserError(f"{path}: {describe_io_error(error)}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: is no JSON.") from error
    if not isinstance(values, dict):
        raise UserError(f"{path}: is no JSON object.")
    return values


def _describe_progress(source: str, rank: int, status: RankAtFailure) -> RankProgress:
    """Where the rank was when it was heard last."""
    # a start counts its own steps, and iterations go on
    iteration = status.step + (status.started_at or 0)
    return RankProgress(
        source=source,
        rank=rank,
        host=status.host,
        pid=status.pid,
        seen_at=status.wall_time,
        step=iteration,
        phase=status.phase,
        phase_s=status.phase_s,
        step_s=status.step_s or None,
        still_s=status.still_s or None,
        usual_step_s=status.usual_step_s,
        place=status.place[:MAX_MESSAGE_CHARACTERS],
        process_state=status.process_state,
    )


def _describe_collectives(source: str, rank: int, status: RankAtFailure) -> FlightRecording:
    """How far the rank is in each of its groups; the calls themselves are not in this file."""
    progress = {ALL_RANKS_GROUP: GroupProgress(enqueued=status.begun, completed=status.finished)}
    groups = {ALL_RANKS_GROUP: RecordedGroup(name=ALL_RANKS_GROUP)}
    for name, number in status.groups.items():
        progress[name] = GroupProgress(enqueued=number)
        groups[name] = RecordedGroup(name=name)
    return FlightRecording(
        source=source,
        rank=rank,
        backend="",
        calls=(),
        groups=groups,
        progress=progress,
        has_forgotten=True,
    )


def _describe_stack(source: str, rank: int | None, status: RankAtFailure) -> ProcessStacks:
    """Where the main thread was."""
    return ProcessStacks(
        source=source,
        threads=(ThreadStack(name="MainThread", frames=_read_frames(status.stack), is_main=True),),
        rank=rank,
        host=status.host,
        pid=status.pid,
        taken_at=status.wall_time,
    )


def _read_frames(calls: tuple[str, ...]) -> tuple[StackFrame, ...]:
    """Frames of calls such as "function (file.py:12)"."""
    frames = []
    for text in calls:
        found = FRAME_OF_STATUS.fullmatch(text)
        if found:
            frames.append(StackFrame(found["function"], found["file"], int(found["line"])))
        else:
            frames.append(StackFrame(text, ""))
    return tuple(frames)


def _describe_leaving(source: str, rank: int | None, status: RankAtFailure) -> ProcessEnd:
    """How a rank ended, by itself or by whoever looked after it."""
    said = status.left or ""
    is_well = said == NO_ERROR
    error, message = _split_error(said)
    exit_code = status.exit_code
    if exit_code is None and is_well:
        exit_code = 0
    if status.error:
        error = status.error[:MAX_MESSAGE_CHARACTERS]
        message = status.message[:MAX_MESSAGE_CHARACTERS]
    if not message and status.signal is not None:
        message = f"signal {status.signal}"
    return ProcessEnd(
        source=source,
        rank=rank,
        host=status.host,
        pid=status.pid,
        local_rank=status.local_rank,
        exit_code=exit_code,
        error="" if is_well else error,
        message=message,
        frames=_read_frames(status.error_stack),
        ended_at=status.wall_time if status.ended_at is None else status.ended_at,
        is_consequence=True if status.blameless and not is_well else None,
    )


def _split_error(text: str) -> tuple[str, str]:
    """The class of the exception and what it says; "" and the text where no class stands in front."""
    text = text[:MAX_MESSAGE_CHARACTERS]
    found = ERROR_OF_STATUS.fullmatch(text)
    if not found:
        return "", text
    return found["error"], found["message"] or ""


def read_run_file(path: Path) -> JobEvidence:
    """Read run.json: how the process that wrote it ended, and how many ranks there were."""
    record, lost = convert_sound(_load_object(path), RunRecord)
    end = _describe_end(str(path), record)
    return JobEvidence(
        ends=(end,) if end else (),
        world_size=_find_world_size(record),
        unread=tuple(f"{path}: {problem}" for problem in lost),
    )


def _find_world_size(record: RunRecord) -> int | None:
    if record.plan is not None:
        return record.plan.world.size
    return record.updated.ranks if record.updated is not None else None


def _find_writer(record: RunRecord) -> int | None:
    """The rank that writes; None where the record does not say."""
    if record.plan is not None:
        return record.plan.world.rank
    # the first rank of a watched script
    return 0 if record.command is not None else None


def _describe_end(source: str, record: RunRecord) -> ProcessEnd | None:
    """How the writing process ended; None for one that may still run."""
    process = record.process
    status = (record.status or "")[:MAX_MESSAGE_CHARACTERS]
    is_gone = process is not None and is_there(msgspec.to_builtins(process)) is False
    if not status or (status == "running" and not is_gone):
        return None
    message = status
    error = ""
    if status == "running":
        message = "it is gone, and has not written how it ended"
    if status.startswith(FAILED):
        error, message = _split_error(status.removeprefix(FAILED))
    return ProcessEnd(
        source=source,
        rank=_find_writer(record),
        local_rank=record.plan.world.local_rank if record.plan is not None else None,
        host=process.host if process is not None else None,
        pid=process.pid if process is not None else None,
        exit_code=0 if status == "finished" else None,
        error=error,
        message=message,
        ended_at=_read_time(record.ended),
        # it stopped since another rank had died, hung or failed
        is_consequence=True if error == "RanksError" else None,
    )


def _read_time(text: str | None) -> float | None:
    """Seconds since 1970 of a time as run.json has it."""
    try:
        return datetime.strptime(text or "", "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except (ValueError, OverflowError):
        return None


class _Steps:
    """The last start in steps.jsonl: what is kept of its lines."""

    def __init__(self) -> None:
        self.last_step = math.inf
        self._begin()
        # lines that are no records
        self.bad_lines = 0
        self.first_bad_line = 0

    def _begin(self) -> None:
        self.iteration: int | None = None
        self.ordinary_ms: deque[float] = deque(maxlen=STEPS_OF_MEDIAN)
        self.not_finite: list[tuple[int, int, StepRecord]] = []
        self.interval: RankInterval | None = None
        # errors of GPUs
        self.hardware: list[LogEvent] = []

    def add_hardware(self, events: Iterable[LogEvent]) -> None:
        """Take errors of GPUs, of which the first ones count."""
        room = MAX_HARDWARE_EVENTS - len(self.hardware)
        self.hardware.extend(islice(events, room))

    def add_step(self, number: int, record: StepRecord) -> None:
        """Take a step from line `number`."""
        if record.step <= self.last_step:
            self._begin()
        self.last_step = record.step
        self.iteration = record.iteration
        if not (record.profiled or record.beside_profile or record.compiling):
            self.ordinary_ms.append(record.ms)
        if record.skipped is True:
            return
        if (record.loss is None or record.grad_norm is None) and len(self.not_finite) < MAX_NOT_FINITE:
            self.not_finite.append((number, record.iteration, record))

    def add_bad_line(self, number: int) -> None:
        """Count a line that is no record."""
        self.bad_lines += 1
        self.first_bad_line = self.first_bad_line or number


def read_steps_file(path: Path) -> JobEvidence:
    """Read steps.jsonl: how far the ranks are, how long their steps take, and which ones were not finite.

    Which rank wrote it stands in run.json beside it.
    """
    with open_foreign(path) as file:
        steps = _read_lines(file, str(path))
    writer = None
    # what is wrong with run.json is named by its own reader
    with suppress(UserError):
        record, _ = convert_sound(_load_object(path.with_name(RUN_FILE)), RunRecord)
        writer = _find_writer(record)
    source = str(path)
    unread = []
    if steps.bad_lines:
        unread.append(f"{source}:{steps.first_bad_line}: no record of a step, as {steps.bad_lines} lines in all")
    return JobEvidence(
        events=(*steps.hardware, *(_describe_not_finite(source, writer, *found) for found in steps.not_finite)),
        progress=tuple(_describe_speeds(source, writer, steps)),
        unread=tuple(unread),
    )


def _read_lines(file: BinaryIO, source: str) -> _Steps:
    """Read the file line by line, without holding more than one."""
    decode = msgspec.json.Decoder(StepRecord | RanksRecord[RankInterval] | HardwareRecord).decode
    steps = _Steps()
    number = 0
    while text := file.readline(MAX_STEP_LINE_BYTES):
        number += 1
        try:
            record = decode(text)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            # the last line of a process that was killed may be cut
            if text.endswith(b"\n") or len(text) == MAX_STEP_LINE_BYTES:
                steps.add_bad_line(number)
            continue
        if isinstance(record, StepRecord):
            steps.add_step(number, record)
        elif isinstance(record, HardwareRecord):
            steps.add_hardware(find_own_gpu_errors(f"{source}:{number}", record))
        else:
            steps.interval = record.ranks
            steps.add_hardware(find_gpu_errors(f"{source}:{number}", record.ranks))
    return steps


def _describe_not_finite(source: str, writer: int | None, number: int, iteration: int, record: StepRecord) -> LogEvent:
    """A step whose loss or norm of gradients is not finite."""
    what = "loss" if record.loss is None else "norm of gradients"
    return LogEvent(
        kind=EventKind.NOT_FINITE,
        source=f"{source}:{number}",
        text=f"iteration {iteration}: the {what} is not finite",
        # otherwise it is a mean of all ranks
        rank=writer if record.local else None,
        code=iteration,
    )


def _measure_own_step(interval: RankInterval, rank: int) -> float | None:
    """Measure a rank's work in a step without backward's waiting for others, in seconds; None where it is not told."""
    own_backward_ms = interval.own_backward_ms
    if own_backward_ms is None or rank >= len(own_backward_ms):
        return None
    total_ms = own_backward_ms[rank]
    for phase, by_rank in interval.phases_ms.items():
        ms = by_rank[rank] if rank < len(by_rank) else None
        if phase != "backward" and ms is not None and total_ms is not None:
            total_ms += ms
    return None if total_ms is None else total_ms / 1000


def _describe_speeds(source: str, writer: int | None, steps: _Steps) -> list[RankProgress]:
    """The last step of each rank, as far as it is written, and how long its steps took."""
    found: dict[int, RankProgress] = {}
    interval = steps.interval
    if interval is not None:
        for rank, ms in enumerate(interval.step_ms[:MAX_RANKS]):
            usual_s = None if ms is None else ms / 1000
            found[rank] = RankProgress(
                source=source,
                rank=rank,
                step=interval.iterations[1],
                usual_step_s=usual_s,
                own_step_s=_measure_own_step(interval, rank),
            )
    if writer is not None and steps.iteration is not None:
        usual_s = statistics.median(steps.ordinary_ms) / 1000 if steps.ordinary_ms else None
        of_others = found.get(writer, RankProgress(source=source, rank=writer))
        found[writer] = replace(of_others, step=steps.iteration, usual_step_s=usual_s)
    return list(found.values())
