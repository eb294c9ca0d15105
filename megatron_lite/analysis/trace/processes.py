"""A file into which the traces of several processes were merged -> a Trace per process.

Scripts that merge traces (of HTA, SGLang and many jobs) keep or rewrite the process ids: 4711, "[TP03] 4711", "rank3",
3. Work of devices stands under ids of its own, mostly the device's number, and correlation ids of several processes
collide. So each device's work is given to the process whose id it shares, or whose launch calls fit it.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from megatron_lite.analysis.intervals import Flags, Integers, Numbers
from megatron_lite.analysis.trace.columns import DEVICE_KINDS, Events, Kind, Trace, make_no_memory_events

MIN_RANK_SHARE = 0.01  # of the largest process' operators: less is no rank of a job
CLEARLY = 0.2  # by so much of a device's work one process' calls must fit better than any other's
MIN_FITTING = 0.5  # of a device's work
MIN_TOLD_APART = 0.9  # of the work that several processes share a device's id for
_DIMENSION = re.compile(r"(?<![a-z])(rank|tp|dp|pp|ep|cp)[ _:#-]*0*(\d{1,6})", re.IGNORECASE)
_LAST_NUMBER = re.compile(r"\d+\s*$")
_STEP = re.compile(r"ProfilerStep#\d+$")
NO_PROCESS = -1


@dataclass(frozen=True)
class Owners:
    """Processes that the events belong to."""

    process: Integers  # int64 [n], index; NO_PROCESS for none
    doubt: str = ""  # why work of devices may be another process'; "" if it is certain


def split_processes(trace: Trace) -> tuple[Trace, ...]:
    """The traces of the processes in it, by id; `trace` itself if there is one.

    What cannot be told apart is told as damage.
    """
    pids = [pid for pid, _ in trace.threads]
    names = sorted(set(pids), key=_sort_key)
    place = {pid: number for number, pid in enumerate(names)}
    pid_of_thread = np.array([place[pid] for pid in pids], np.int64)
    # a trace without events may have no threads
    pid = pid_of_thread[trace.events.thread] if len(trace.events) else np.empty(0, np.int64)
    found = _find_processes(trace, pid, len(names))
    if len(found) < 2:
        return (_add_damage(trace, _find_mixed_steps(trace)),)
    owners = _find_owners(trace, pid, names, found)
    if owners is None:
        damage = f"the file holds {len(found)} processes, whose device work cannot be separated"
        without_cores = replace(trace, cores=None)
        return (_add_damage(without_cores, [damage]),)
    own_names = [names[number] for number in found]
    ranks = find_ranks(own_names)
    traces = []
    for number, rank in enumerate(ranks):
        traces.append(_take_process(trace, owners, number, own_names, rank))
    return tuple(traces)


def _add_damage(trace: Trace, damage: Iterable[str]) -> Trace:
    """The trace with more damage, which is noted, too; `trace` itself if there is none."""
    told = tuple(damage)
    if not told:
        return trace
    return replace(
        trace,
        notes=(*trace.notes, *told),
        damage=(*trace.damage, *told),
    )


def _sort_key(pid: str) -> tuple[str, int]:
    """Key that orders ids by what stands before their number, then by it."""
    number = _LAST_NUMBER.search(pid)
    before = _LAST_NUMBER.sub("", pid)
    return before, int(number[0]) if number else NO_PROCESS


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
    is_process = operators >= max(1, MIN_RANK_SHARE * operators.max(initial=0))
    if calls.any():
        is_process &= calls > 0
    found: list[int] = np.flatnonzero(is_process).tolist()
    return found


def find_ranks(pids: Sequence[str]) -> list[int | None]:
    """The rank in each id; None for all where they do not tell: "[TP03-DP01] 4711" does not."""
    named = [_DIMENSION.findall(pid) for pid in pids]
    if all(len(one) == 1 for one in named):
        # of (dimension, number)
        numbers = [int(one[0][1]) for one in named]
        written = {one[0][1] for one in named}
        if len(written) == len(pids):
            return [*numbers]
    if sorted(pids) == sorted(map(str, range(len(pids)))):
        return [int(pid) for pid in pids]
    return [None] * len(pids)


def _find_owners(
    trace: Trace,
    pid: Integers,
    names: list[str],
    found: list[int],
) -> Owners | None:
    """Find the process of each event.

    Args:
        trace: all events.
        pid: [n], the number of each event's id.
        names: the ids.
        found: numbers of the ids that are processes.

    Returns:
        None where work of devices cannot be told apart.
    """
    process = _find_owners_of_ids(names, found)[pid]
    on_device = np.isin(trace.events.kind, (*DEVICE_KINDS, Kind.SYNC, Kind.GPU_ANNOTATION))
    is_loose = on_device & (process == NO_PROCESS)
    groups = []
    for number in np.unique(pid[is_loose]).tolist():
        groups.append(np.flatnonzero(on_device & (pid == number)))
    if not groups:
        return Owners(process)
    fitting = [_find_fitting(trace, process == number) for number in range(len(found))]
    fits = np.stack(fitting)
    is_work = np.isin(trace.events.kind, DEVICE_KINDS)
    shares = [_measure_fitting(fits, rows[is_work[rows]]) for rows in groups]
    chosen = _choose_processes(np.stack(shares))
    doubt = ""
    is_unknown = chosen == NO_PROCESS
    if is_unknown.any() and len(groups) == len(found):
        # by order: the first process of a machine drives its first device
        chosen[is_unknown] = np.setdiff1d(np.arange(len(found)), chosen)
        doubt = (
            "device work is assigned to processes in the order of their ids: "
            "the launch calls of several match it equally well"
        )
    if (chosen == NO_PROCESS).any():
        return _tell_apart_by_call(process, np.concatenate(groups), fits, is_work)
    for rows, number in zip(groups, chosen.tolist()):
        process[rows] = number
    return Owners(process, doubt)


def _find_owners_of_ids(names: list[str], found: list[int]) -> Integers:
    """Find for each id (int64 [ids]) the only process whose id has the same text before its number; else NO_PROCESS."""
    prefixes = [_LAST_NUMBER.sub("", name).strip() for name in names]
    own_prefixes = [prefixes[number] for number in found]
    owner = np.full(len(names), NO_PROCESS)
    for number, prefix in enumerate(prefixes):
        if prefix and own_prefixes.count(prefix) == 1:
            owner[number] = own_prefixes.index(prefix)
    owner[found] = np.arange(len(found))
    return owner


def _measure_fitting(fits: NDArray[np.bool_], work: Integers) -> Numbers:
    """Measure the share of the device work that the calls of each process fit: float [processes].

    fits: [processes, n].
    """
    if not len(work):
        return np.zeros(len(fits))
    shares: Numbers = fits[:, work].mean(axis=1)
    return shares


def _find_fitting(trace: Trace, is_host: Flags) -> Flags:
    """Tell for each event (bool [n]) whether a call has its correlation id and begins before it.

    is_host: [n], the events among which calls count.
    """
    events = trace.events
    calls = trace.rows[Kind.RUNTIME]
    calls = calls[is_host[calls]]
    calls = calls[events.correlation[calls] >= 0]
    if not len(calls):
        return np.zeros(len(events), bool)
    calls = calls[np.argsort(events.correlation[calls], kind="stable")]
    at = np.searchsorted(events.correlation[calls], events.correlation)
    at = np.minimum(at, len(calls) - 1)
    call = calls[at]
    has_same_id = events.correlation[call] == events.correlation
    fits: Flags = has_same_id & (events.start_ns[call] <= events.start_ns)
    return fits


def _choose_processes(shares: Numbers) -> Integers:
    """Choose the process whose calls fit each device's work clearly best: int64 [groups]; NO_PROCESS where none does.

    Where there are as many devices as processes, each process drives one: what is taken by one device is not asked
    again.

    Args:
        shares: [groups, processes] of each device's work that the process' calls fit.
    """
    one_each = shares.shape[0] == shares.shape[1]
    chosen = np.full(len(shares), NO_PROCESS)
    free = np.ones(shares.shape[1], bool)
    found_more = True
    while found_more:
        found_more = False
        for group in np.flatnonzero(chosen == NO_PROCESS).tolist():
            best = _find_clearly_best(shares[group], np.flatnonzero(free))
            if best != NO_PROCESS:
                chosen[group] = best
                free[best] = not one_each
                found_more = True
    return chosen


def _find_clearly_best(shares: Numbers, candidates: Integers) -> int:
    """The process among the candidates whose calls fit clearly more of a device's work; NO_PROCESS for none.

    shares: [processes].
    """
    by_share = np.argsort(-shares[candidates], kind="stable")
    ordered = candidates[by_share]
    best, *others = shares[ordered].tolist()
    next_best = max(others, default=0.0)
    if best < MIN_FITTING or best - next_best < CLEARLY:
        return NO_PROCESS
    return int(ordered[0])


def _tell_apart_by_call(
    process: Integers,  # [n], of each event; is changed
    rows: Integers,  # [k], events of devices
    fits: NDArray[np.bool_],  # [processes, n], whether a call of the process fits the event
    is_work: Flags,  # [n]
) -> Owners | None:
    """Give each event to the only process with a call that fits; None where too many have several or none."""
    has_one = fits[:, rows].sum(axis=0) == 1
    told = rows[has_one]
    process[told] = fits[:, told].argmax(axis=0)
    if has_one[is_work[rows]].mean() < MIN_TOLD_APART:
        return None
    return Owners(process, "several processes share one device id: work that overlaps on a stream was cut")


def _take_process(
    trace: Trace,
    owners: Owners,
    number: int,
    names: list[str],
    rank: int | None,
) -> Trace:
    """The trace of the process with that number. names: of all processes."""
    is_own = owners.process == number
    columns = {}
    for one in fields(Events):
        columns[one.name] = getattr(trace.events, one.name)[is_own]
    world_size = trace.world_size
    if rank is not None:
        world_size = world_size or len(names)
    own = replace(
        trace,
        source=f"{trace.source} (process {names[number]})",
        rank=rank,
        world_size=world_size or None,
        events=Events(**columns),
        memory=make_no_memory_events(),
        # the header that was kept is one rank's, and does not say whose
        cores=None,
    )
    return _add_damage(own, [owners.doubt] if owners.doubt else [])


def _find_mixed_steps(trace: Trace) -> Iterator[str]:
    """A line of damage where marks of the same step overlap: processes were merged under one id."""
    events = trace.events
    rows = trace.find_named(_STEP.match, Kind.ANNOTATION)
    order = np.lexsort((events.start_ns[rows], events.name[rows]))
    rows = rows[order]
    earlier = rows[:-1]
    later = rows[1:]
    is_same = events.name[earlier] == events.name[later]
    overlaps = events.start_ns[later] < events.end_ns[earlier]
    mixed = later[is_same & overlaps]
    if len(mixed):
        name = trace.name_of(mixed[0])
        yield f"several processes share one process id ({name} overlaps itself), and cannot be separated"
