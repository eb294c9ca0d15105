"""A file into which the traces of several processes were merged -> a Trace per process.

Scripts that merge traces (of HTA, SGLang and many jobs) keep or rewrite the process ids: 4711, "[TP03] 4711", "rank3",
3. Work of devices stands under ids of its own, mostly the device's number, and correlation ids of several processes
collide. So each device's work is given to the process whose id it shares, or whose launch calls fit it.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from megatron_lite.analysis.intervals import Flags, Integers, Numbers
from megatron_lite.analysis.trace.columns import DEVICE_KINDS, Events, Kind, MemoryEvents, Trace

MIN_SHARE = 0.01  # of the largest process' operators: less is no rank of a job
CLEARLY = 0.2  # by so much of a device's work one process' calls must fit better than any other's
MIN_FITTING = 0.5  # of a device's work
MIN_TOLD_APART = 0.9  # of the work that several processes share a device's id for
_DIMENSION = re.compile(r"(?<![a-z])(rank|tp|dp|pp|ep|cp)[ _:#-]*0*(\d{1,6})", re.IGNORECASE)
_LAST_NUMBER = re.compile(r"\d+\s*$")
_STEP = re.compile(r"ProfilerStep#\d+$")
UNKNOWN = -1


@dataclass(frozen=True)
class Owners:
    """Which process each event belongs to."""

    process: Integers  # int64 [n], index; UNKNOWN for none
    doubt: str = ""  # why work of devices may be another process'; "" if it is certain


def split_processes(trace: Trace) -> tuple[Trace, ...]:
    """The traces of the processes in it, by id; `trace` itself if there is one.

    What cannot be told apart is told as damage.
    """
    pids = [pid for pid, _ in trace.threads]
    names = sorted(set(pids), key=_sort_key)
    place = {pid: number for number, pid in enumerate(names)}
    pid_of_thread = np.array([place[pid] for pid in pids], np.int64)
    pid = pid_of_thread[trace.events.thread] if len(trace.events) else np.empty(0, np.int64)
    found = _find_processes(trace, pid, len(names))
    if len(found) < 2:
        return (_tell_mixed_steps(trace),)
    own_names = [names[number] for number in found]
    owners = _find_owners(trace, pid, names, found)
    if owners is None:
        who = f"the file holds {len(found)} processes, whose device work cannot be separated"
        return (replace(trace, cores=None, notes=(*trace.notes, who), damage=(*trace.damage, who)),)
    ranks = find_ranks(own_names)
    return tuple(_take_process(trace, owners, number, own_names, ranks[number]) for number in range(len(found)))


def _sort_key(pid: str) -> tuple[str, int]:
    """Ids by what stands before their number, then by it."""
    number = _LAST_NUMBER.search(pid)
    return _LAST_NUMBER.sub("", pid), int(number[0]) if number else UNKNOWN


def _find_processes(trace: Trace, pid: Integers, count: int) -> list[int]:
    """Numbers of the ids that are processes of a job: they run operators, and launch work if any of them does."""
    rows = trace.rows

    def count_by_pid(*kinds: Kind) -> Integers:
        chosen = np.concatenate([rows[kind] for kind in kinds])
        return np.bincount(pid[chosen], minlength=count)

    operators = count_by_pid(Kind.OP)
    if not operators.any():
        operators = count_by_pid(Kind.ANNOTATION)
    calls = count_by_pid(Kind.RUNTIME)
    is_process = operators >= max(1, MIN_SHARE * operators.max(initial=0))
    if calls.any():
        is_process &= calls > 0
    found: list[int] = np.flatnonzero(is_process).tolist()
    return found


def find_ranks(pids: Sequence[str]) -> list[int | None]:
    """The rank in each id; None for all where they do not tell: "[TP03-DP01] 4711" does not."""
    named = [_DIMENSION.findall(pid) for pid in pids]
    if all(len(one) == 1 for one in named) and len({one[0][1] for one in named}) == len(pids):
        return [int(one[0][1]) for one in named]
    if sorted(pids) == sorted(map(str, range(len(pids)))):
        return [int(pid) for pid in pids]
    return [None] * len(pids)


def _find_owners(trace: Trace, pid: Integers, names: list[str], found: list[int]) -> Owners | None:
    """None where work of devices cannot be told apart."""
    prefixes = [_LAST_NUMBER.sub("", names[number]).strip() for number in found]
    by_prefix = {prefix: number for number, prefix in enumerate(prefixes) if prefix and prefixes.count(prefix) == 1}
    owner_of_pid = np.full(len(names), UNKNOWN)
    for number, name in enumerate(names):
        owner_of_pid[number] = by_prefix.get(_LAST_NUMBER.sub("", name).strip(), UNKNOWN)
    owner_of_pid[found] = np.arange(len(found))
    process = owner_of_pid[pid]
    on_device = np.isin(trace.events.kind, (*DEVICE_KINDS, Kind.SYNC, Kind.GPU_ANNOTATION))
    loose = np.unique(pid[on_device & (process == UNKNOWN)]).tolist()
    groups = [np.flatnonzero(on_device & (pid == number)) for number in loose]
    if not groups:
        return Owners(process)
    fits = np.stack([_find_fitting(trace, np.flatnonzero(process == number)) for number in range(len(found))])
    work = np.isin(trace.events.kind, DEVICE_KINDS)
    shares = np.stack(
        [fits[:, rows[work[rows]]].mean(axis=1) if work[rows].any() else np.zeros(len(found)) for rows in groups]
    )
    chosen = _choose_processes(shares)
    doubt = ""
    if len(groups) == len(found) and (chosen == UNKNOWN).any():
        # by order: the first process of a machine drives its first device
        chosen[chosen == UNKNOWN] = np.setdiff1d(np.arange(len(found)), chosen)
        doubt = (
            "device work is assigned to processes in the order of their ids: "
            "the launch calls of several match it equally well"
        )
    if (chosen != UNKNOWN).all():
        for rows, number in zip(groups, chosen.tolist()):
            process[rows] = number
        return Owners(process, doubt)
    return _tell_apart_by_call(process, np.concatenate(groups), fits, work)


def _find_fitting(trace: Trace, host: Integers) -> Flags:
    """bool [n]: whether one of the calls among `host` has the event's correlation id,
    and begins before the event does."""
    events = trace.events
    calls = host[(events.kind[host] == Kind.RUNTIME) & (events.correlation[host] >= 0)]
    calls = calls[np.argsort(events.correlation[calls], kind="stable")]
    if not len(calls):
        return np.zeros(len(events), bool)
    at = np.minimum(np.searchsorted(events.correlation[calls], events.correlation), len(calls) - 1)
    call = calls[at]
    fits: Flags = (events.correlation[call] == events.correlation) & (events.start_ns[call] <= events.start_ns)
    return fits


def _choose_processes(shares: Numbers) -> Integers:
    """int64 [groups]: the process whose calls fit each device's work clearly best; UNKNOWN where none does.

    Where there are as many devices as processes, each process drives one: what is taken by one device is not asked
    again.

    Args:
        shares: [groups, processes] of each device's work that the process' calls fit.
    """
    one_each = shares.shape[0] == shares.shape[1]
    chosen = np.full(len(shares), UNKNOWN)
    free = np.ones(shares.shape[1], bool)
    found_more = True
    while found_more:
        found_more = False
        for group in np.flatnonzero(chosen == UNKNOWN).tolist():
            candidates = np.flatnonzero(free)
            ordered = candidates[np.argsort(-shares[group, candidates], kind="stable")]
            best, *others = shares[group, ordered].tolist()
            if best >= MIN_FITTING and best - max(others, default=0.0) >= CLEARLY:
                chosen[group] = ordered[0]
                free[ordered[0]] = not one_each
                found_more = True
    return chosen


def _tell_apart_by_call(process: Integers, rows: Integers, fits: NDArray[np.bool_], work: Flags) -> Owners | None:
    """Each event to the only process with a call that fits; None where too many have several or none."""
    one = fits[:, rows].sum(axis=0) == 1
    told = rows[one]
    process[told] = fits[:, told].argmax(axis=0)
    doubt = "several processes share one device id: work that overlaps on a stream was cut"
    return Owners(process, doubt) if one[work[rows]].mean() >= MIN_TOLD_APART else None


def _take_process(trace: Trace, owners: Owners, number: int, names: list[str], rank: int | None) -> Trace:
    chosen = owners.process == number
    events = Events(**{one.name: getattr(trace.events, one.name)[chosen] for one in fields(Events)})
    none = np.empty(0, np.int64)
    doubt = (owners.doubt,) if owners.doubt else ()
    return replace(
        trace,
        source=f"{trace.source} (process {names[number]})",
        rank=rank,
        world_size=trace.world_size or (len(names) if rank is not None else None),
        events=events,
        memory=MemoryEvents(none, none, none, none, none.astype(np.int16)),
        # the header that was kept is one rank's, and does not say whose
        cores=None,
        notes=(*trace.notes, *doubt),
        damage=(*trace.damage, *doubt),
    )


def _tell_mixed_steps(trace: Trace) -> Trace:
    """The trace, with a line of damage where marks of the same step overlap: processes were merged under one id."""
    doubt = tuple(_find_mixed_steps(trace))
    return replace(trace, notes=(*trace.notes, *doubt), damage=(*trace.damage, *doubt)) if doubt else trace


def _find_mixed_steps(trace: Trace) -> Iterator[str]:
    events, ranges = trace.events, trace.rows[Kind.ANNOTATION]
    rows = ranges[trace.passing(_STEP.match, Kind.ANNOTATION)[events.name[ranges]]]
    rows = rows[np.lexsort((events.start_ns[rows], events.name[rows]))]
    same = events.name[rows][1:] == events.name[rows][:-1]
    overlaps = same & (events.start_ns[rows][1:] < events.end_ns[rows][:-1])
    if overlaps.any():
        name = trace.name_of(rows[1:][overlaps][0])
        yield f"several processes share one process id ({name} overlaps itself), and cannot be separated"
