"""A trace of torch.profiler (Kineto), of any year -> Trace."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from megatron_lite.analysis.trace.columns import DEVICE_KINDS, Kind, MemoryEvents, Trace
from megatron_lite.analysis.trace.kinds import DEVICE_WAIT, KIND_OF_PROCESS, OPERATORS_OF_2021, is_annotation_of_2021
from megatron_lite.analysis.trace.kineto_chunks import Chunks
from megatron_lite.analysis.trace.kineto_columns import (
    COLUMNS,
    LOST_NS,
    MAX_EVENTS,
    MEMORY_COLUMNS,
    Collected,
    joined,
    kinds_of,
    paired,
)  # fmt: skip
from megatron_lite.analysis.trace.kineto_header import Header, last_number, shapes_of
from megatron_lite.analysis.trace.refused import TraceError
from megatron_lite.analysis.trace.repair import repaired

_UNIX_NS = 10**18  # larger times count from 1970 (2001 and later), by the clock of the machine
_MANY_LOST = 0.01  # of the events, without a time; profilers lose single ones in sound files
_LONG_AFTER_0 = 10**12  # a trace whose times are larger did not begin at 0


def read_kineto(
    path: Path, max_events: int = MAX_EVENTS, report: Callable[[int], None] = lambda bytes_read: None
) -> Trace:
    """The trace in the file `path`, its first part in time where it has more than max_events. Raises TraceError for what is none.

    report(bytes of the file that are read) is called now and then.
    """
    chunks, collected, notes, damage = Chunks(path), Collected(max_events), [], []
    for events in chunks:
        collected.add(events)
        report(chunks.bytes_read)
    if chunks.damage:
        damage.append(f"{path.name}: {chunks.damage}")
    if collected.halves:
        spans, alone = paired(collected.halves)
        collected.add(spans)
        if alone:
            notes.append(f"beginnings or ends of spans without a counterpart: {alone:,}, left out")
    if not collected.spans:
        raise TraceError(f"{path}: {chunks.damage or 'a trace without events; was the profiler on?'}")
    trace = _trace(path, Header(chunks.header, path), collected, notes, damage)
    return replace(trace, cut=chunks.cut or collected.until_ns is not None)


def _trace(path: Path, header: Header, collected: Collected, notes: list[str], damage: list[str]) -> Trace:
    columns = joined(collected.spans, COLUMNS)
    first_ns = _place_in_time(columns, notes, damage)
    if first_ns is None:
        raise TraceError(f"{path}: no event of it has a start time, so there is nothing to analyse.")
    if collected.until_ns is not None:
        seconds, of_all = ((end - first_ns) / 1e9 for end in (collected.until_ns, collected.last_ns))
        notes.append(
            f"{path.name}: more than {collected.max_events:,} events; what ends in its first {seconds:.3g} of {of_all:.3g} s was read, "
            "the rest left out; a window of fewer steps (--profile-step-end) is read whole"
        )
    names = tuple(collected.names)
    columns["kind"] = _kinds(columns, names, list(collected.categories), list(collected.threads))
    _place_on_devices(columns, list(collected.threads))
    columns["thread"], threads = _threads(collected, columns["thread"])
    events, more = repaired(columns)
    notes += more
    return Trace(
        source=path.name, writer="pytorch", rank=header.rank, world_size=header.world_size, devices=header.devices,
        base_ns=header.clock_ns(first_ns) if header.has_clock or first_ns > _UNIX_NS else None,
        with_stack=header.says("with_stack") or bool((events.kind == Kind.PYTHON).any()),
        with_shapes=header.says("record_shapes") or bool((events.shapes >= 0).any()),
        names=names, threads=threads, shapes=shapes_of(collected.shapes),
        collectives=tuple(collected.collectives), events=events, memory=_memory(collected, first_ns), notes=(*damage, *notes),
        damage=tuple(damage), without_gpu=header.without_gpu, facts=header.facts,
    )  # fmt: skip


def _place_in_time(columns: dict, notes: list[str], damage: list[str]) -> int | None:
    """Make start_ns relative to the first event, end_ns of length_ns, and drop events without a time; the first's start
    by the file's clock, None if no event has one."""
    start, length = columns["start_ns"], columns.pop("length_ns")
    usable = start != LOST_NS
    if usable.any() and np.median(start[usable]) > _LONG_AFTER_0:
        usable &= start > 0  # the profiler lost their time: pytorch/kineto#109
    if not usable.any():
        return None
    if not usable.all():
        many = (~usable).mean() > _MANY_LOST
        (damage if many else notes).append(f"events without a start time: {(~usable).sum():,}, left out")
        for name, column in columns.items():
            columns[name] = column[usable]
        start, length = columns["start_ns"], length[usable]
    if negative := int((length < 0).sum()):
        notes.append(f"events with a negative duration: {negative:,}, taken as instants")
    first = int(start.min())
    columns["start_ns"] = start - first
    columns["end_ns"] = columns["start_ns"] + np.maximum(length, 0)
    return first


def _kinds(columns: dict, names: tuple[str, ...], categories: list[str], threads: list[tuple]) -> np.ndarray:
    kind = kinds_of(categories)[columns.pop("category")]
    of_process = np.array([KIND_OF_PROCESS.get(pid, Kind.OTHER) for pid, _ in threads], np.uint8)
    kind = np.where(kind == Kind.OTHER, of_process[columns["thread"]], kind)
    if OPERATORS_OF_2021 in categories:
        named_by_code = np.fromiter(map(is_annotation_of_2021, names), bool, len(names))
        kind[(kind == Kind.OP) & named_by_code[columns["name"]]] = Kind.ANNOTATION
    waits = np.fromiter((bool(DEVICE_WAIT.fullmatch(name)) for name in names), bool, len(names))
    kind[(kind == Kind.KERNEL) & waits[columns["name"]]] = Kind.SYNC
    return kind


def _place_on_devices(columns: dict, threads: list[tuple]):
    """device and stream of device work and syncs: its arguments, else (work) its pid and tid; -1 for the host's events."""
    kind, thread = columns["kind"], columns["thread"]
    on_device = np.isin(kind, (*DEVICE_KINDS, Kind.GPU_ANNOTATION))
    for name, which, largest, dtype in (("device", 0, 2**15, np.int16), ("stream", 1, 2**31, np.int32)):
        place = np.array([last_number(ids[which]) for ids in threads], np.int64)[thread]
        value = np.where(on_device & (columns[name] < 0), place, columns[name])
        columns[name] = np.where((value >= 0) & (value < largest), value, -1).astype(dtype)


def _threads(collected: Collected, thread: np.ndarray) -> tuple[np.ndarray, tuple[tuple[str, str], ...]]:
    """Threads by their text: files of 2021 write the same id as a number and as a string."""
    texts = [(str(pid), str(tid)) for pid, tid in collected.threads]
    number = {text: i for i, text in enumerate(dict.fromkeys(texts))}
    return np.array([number[text] for text in texts], np.int32)[thread], tuple(number)


def _memory(collected: Collected, first_ns: int) -> MemoryEvents:
    m = joined(collected.instants, MEMORY_COLUMNS)
    order = np.argsort(m["time_ns"], kind="stable")
    order = order[m["time_ns"][order] != LOST_NS]
    m = {name: column[order] for name, column in m.items()}
    device = np.where(m.pop("device_type") == 0, -1, m["device"])
    m["device"] = np.clip(device, -1, 2**15 - 1).astype(np.int16)
    return MemoryEvents(**m | {"time_ns": m["time_ns"] - first_ns})
