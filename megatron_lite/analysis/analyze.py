"""Analysis from files to a Report: read, place, time, kernels, ranks, memory, run, findings, verdict. No printing here.

What only snapshots or run folders need is imported where they are read: a trace's report is not to wait for it.
"""

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from megatron_lite.analysis.contradictions import limit_certainty, missing_gpu_work, weakened
from megatron_lite.analysis.discover import discover_sources
from megatron_lite.analysis.failed_job import find_failure
from megatron_lite.analysis.findings.checks import answer_checks
from megatron_lite.analysis.findings.rules import Judgement, judge
from megatron_lite.analysis.gains import GainedFindings, describe_next_steps, find_gains
from megatron_lite.analysis.kernels.kernel_results import RankKernels
from megatron_lite.analysis.kernels.rank_kernels import rank_kernels
from megatron_lite.analysis.memory.memory_results import Snapshot
from megatron_lite.analysis.memory.trace_memory import measure_trace_memory
from megatron_lite.analysis.rank_facts import RankFacts
from megatron_lite.analysis.ranks.from_run import compare_ranks_of_run, find_only_dimension, only_lasting
from megatron_lite.analysis.ranks.rank_results import RankComparison, name_ranks
from megatron_lite.analysis.ranks.ranks import compare_ranks
from megatron_lite.analysis.report import Report
from megatron_lite.analysis.run.run_results import Run
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.analysis.time.rank_time import rank_time
from megatron_lite.analysis.time.step_windows import attribute_events
from megatron_lite.analysis.trace.columns import Trace
from megatron_lite.analysis.trace.read import are_large, file_bytes, read_traces, readers, say_nothing
from megatron_lite.analysis.verdict import build_verdict
from megatron_lite.errors import UserError
from megatron_lite.postmortem.postmortem_results import Postmortem
from megatron_lite.units import counted, size

Result = TypeVar("Result")
MAX_GAPS_NAMED = 3  # in the message where nothing can be read


def describe_run(paths: Sequence[Path | str], facts: Facts) -> str:
    """Write the title of a report: "run-1: 2 ranks, NVIDIA H100, GPT 24 x 1024".

    Parts that are not known are left out.
    """
    first = Path(paths[0])
    name = first.name
    if not name:
        # "." and ".." have no name of their own
        name = first.resolve().name or str(first)
    if len(paths) > 1:
        name += f" and {len(paths) - 1} more"
    parts = [
        _describe_ranks(facts),
        _describe_device(facts),
        _describe_model(facts),
    ]
    known = [part for part in parts if part]
    if not known:
        return name
    return f"{name}: {', '.join(known)}"


def _describe_ranks(facts: Facts) -> str:
    """Write "8 ranks", "2 of 8 ranks", "1 process", "3 snapshots"; '' where there is none of them."""
    seen = len(facts.ranks_seen)
    world_size = _find_world_size(facts)
    if world_size and 0 < seen < world_size:
        return f"{seen} of {world_size} ranks"
    if not world_size and all(rank.time.rank is None for rank in facts.ranks_seen):
        if seen:
            return _count(seen, "process", "processes")
        return _count(len(facts.snapshots), "snapshot", "snapshots")
    return _count(world_size or seen, "rank", "ranks")


def _count(number: int, singular: str, plural: str) -> str:
    """Write "1 rank" or "8 ranks"; '' for none."""
    if number == 0:
        return ""
    return f"{number} {singular if number == 1 else plural}"


def _find_world_size(facts: Facts) -> int | None:
    """The number of ranks by the first source that knows it: the ranks' comparison, a trace, the run folder."""
    world_sizes = [rank.trace.world_size for rank in facts.ranks_seen]
    if facts.ranks:
        world_sizes.insert(0, facts.ranks.world_size)
    if facts.run:
        world_sizes.append(facts.run.world_size)
    for world_size in world_sizes:
        if world_size:
            return world_size
    return None


def _describe_device(facts: Facts) -> str:
    """Name the device on which the run took place; '' where nothing tells."""
    rank = facts.critical
    if rank is None:
        device = facts.run.record.hardware.device if facts.run else None
        return "CPU" if device == "cpu" else device or ""
    if missing_gpu_work(rank, facts.run):
        device = rank.trace.devices[0] if rank.trace.devices else "unknown device"
        return f"{device} without its work"
    if rank.time.device:
        return rank.time.device
    return "GPU" if rank.time.on_gpu else "CPU"


def _describe_model(facts: Facts) -> str:
    """Name the model by its shape or by the function that builds it; '' where nothing tells."""
    shape = facts.shape
    if shape.num_layers and shape.hidden_size:
        return f"GPT {shape.num_layers} x {shape.hidden_size}"
    if facts.run and facts.run.record.model is not None:
        return f"--model {facts.run.record.model.function}"
    return ""


class _Gaps:
    """Runs a part of the analysis; one that fails becomes a named gap, so that the others still answer."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def add(self, text: str) -> None:
        if text not in self.found:
            self.found.append(text)

    def attempt(self, what: str, work: Callable[..., Result], *given: Any) -> Result | None:
        """Return `work(*given)`; None where it fails.

        The gap is one line for an unreadable file, and names the place for a mistake of ours.

        Args:
            what: names the part in the line.
            work: does it.
            given: arguments of `work`.
        """
        try:
            return work(*given)
        except UserError as error:
            self.add(" ".join(error.lines))
        except MemoryError:
            self.add(f"{what}: not enough memory to read it")
        except Exception as error:  # noqa: BLE001  a foreign file that nobody foresaw must not take the rest along
            *_, innermost = traceback.extract_tb(error.__traceback__)
            place = f"{Path(innermost.filename).name}:{innermost.lineno}"
            kind = f"{type(error).__name__} in {place}: {error}"
            self.add(f"{what}: could not be analyzed: a bug in megatron_lite ({kind}); please report it")
        return None


def analyze(paths: Sequence[Path | str], say: Callable[..., None] = say_nothing) -> Report:
    """Read all files under `paths` and explain the run that they are of.

    Args:
        paths: traces, snapshots and run folders of one run, or folders that hold them.
        say: called as say(text, lasting=False) with what is being read.

    Returns:
        The report. What cannot be read beside readable files is a gap of it.

    Raises:
        UserError: nothing under `paths` can be read.
    """
    started = time.monotonic()
    gaps = _Gaps()
    places = [Path(path) for path in paths]
    failure = gaps.attempt("evidence of a failure", find_failure, places)
    sources = discover_sources(places, may_be_none=failure is not None)
    for path, why in sources.ignored:
        gaps.add(f"{path.name}: {why}")
    ranks_seen = _read_ranks(sources.traces, say, gaps)
    snapshots = _read_snapshots(sources.snapshots, say, gaps)
    run = _read_run(sources.run_folders, gaps)
    if not (ranks_seen or snapshots or run or failure):
        raise UserError(_describe_unreadable(paths, gaps.found))
    say("comparing ranks, looking for causes")
    facts = _gather_facts(ranks_seen, snapshots, run, gaps)
    report = _conclude(paths, facts, failure, gaps)
    return replace(report, read_s=time.monotonic() - started)


def _conclude(
    paths: Sequence[Path | str],
    facts: Facts,
    failure: Postmortem | None,
    gaps: _Gaps,
) -> Report:
    """Ask the rules, say what limits the run, and replay its steps with the remedies.

    Args:
        paths: what was read.
        facts: the run.
        failure: why the job failed, where its folder tells.
        gaps: collects what fails.
    """
    judgement = gaps.attempt("findings", judge, facts, gaps.add) or Judgement((), {})
    findings = weakened(judgement.findings, facts)
    verdict = build_verdict(facts, findings, failure)
    findings = limit_certainty(findings, verdict.confidence)
    gained = gaps.attempt("gains", find_gains, facts, findings, verdict) or GainedFindings(findings, None)
    if gained.findings != findings:
        # its sentence names the first one
        verdict = build_verdict(facts, gained.findings, failure)
    checks = gaps.attempt("checks", answer_checks, facts, gained.findings, judgement.looks)
    next_steps = describe_next_steps(gained.gains)
    facts = replace(facts, gaps=tuple(facts.in_words(gap) for gap in gaps.found))
    return Report(
        paths=tuple(str(path) for path in paths),
        title=describe_run(paths, facts),
        verdict=replace(verdict, next_steps=facts.in_words(next_steps)),
        findings=gained.findings,
        facts=facts,
        read_s=0.0,
        looks=judgement.looks,
        checks=checks or (),
        gains=gained.gains,
        failure=failure,
    )


def _gather_facts(
    ranks_seen: Sequence[RankFacts], snapshots: tuple[Snapshot, ...], run: Run | None, gaps: _Gaps
) -> Facts:
    """Put together what was read, ranks beside each other, memory beside formulas, all beside what was predicted.

    Args:
        ranks_seen: the facts of each trace.
        snapshots: the memory snapshots.
        run: the run folder, where there is one.
        gaps: is told what fails.
    """
    ranks = _compare_ranks(ranks_seen, run, gaps)
    facts = Facts(ranks_seen=tuple(ranks_seen), ranks=ranks, snapshots=snapshots, run=run, gaps=())
    facts = _add_memory(facts, gaps)
    if run and run.record.prediction is not None:
        from megatron_lite.analysis.predicted import compare_prediction

        facts = replace(facts, predicted=gaps.attempt("prediction", compare_prediction, facts))
    return facts


def _read_ranks(paths: Sequence[Path], say: Callable[..., None], gaps: _Gaps) -> list[RankFacts]:
    """Read and analyze trace files.

    Args:
        paths: the trace files.
        say: called as say(text, lasting=False) with what is being read.
        gaps: collects what could not be read.

    Returns:
        The facts of every trace in them by rank; those that do not tell their rank come last.
    """
    found: list[RankFacts] = []
    for path, read in zip(paths, readers(paths, analyze_file, say)):
        result = gaps.attempt(path.name, read)
        if result is None:
            continue
        ranks, missing = result
        found.extend(ranks)
        for text in missing:
            gaps.add(text)
    found.sort(key=lambda rank: (rank.time.rank is None, rank.time.rank or 0))
    return found


def _read_run(folders: Sequence[Path], gaps: _Gaps) -> Run | None:
    """Read the run folder; None where there is none, or where it cannot be read, which then is a gap."""
    run = None
    for folder in folders:
        from megatron_lite.analysis.run.read import read_run

        run = gaps.attempt(folder.name, read_run, folder)
    return run


def _describe_unreadable(paths: Sequence[Path | str], gaps: Sequence[str]) -> str:
    """Say why nothing under `paths` can be read: the only gap itself, else the first ones."""
    if len(gaps) == 1:
        return gaps[0]
    reasons = "; ".join(gaps[:MAX_GAPS_NAMED])
    if len(gaps) > MAX_GAPS_NAMED:
        reasons += f"; and {len(gaps) - MAX_GAPS_NAMED} more"
    names = ", ".join(str(path) for path in paths)
    return f"{names}: nothing in it can be read ({reasons})"


def _compare_ranks(ranks_seen: Sequence[RankFacts], run: Run | None, gaps: _Gaps) -> RankComparison | None:
    """Compare ranks by their traces or, without a trace, by what the run folder has of each rank.

    Args:
        ranks_seen: the facts of each trace.
        run: the run folder, where there is one.
        gaps: is told where the comparison fails.
    """
    if ranks_seen:
        ranks = gaps.attempt("ranks", compare_ranks, ranks_seen, find_only_dimension(run))
        return only_lasting(ranks, run, [rank.trace for rank in ranks_seen]) if ranks else None
    return gaps.attempt("ranks", compare_ranks_of_run, run) if run else None


def _add_memory(facts: Facts, gaps: _Gaps) -> Facts:
    """Add what snapshots tell of memory beside formulas or, without a snapshot, what the traces tell of it."""
    if facts.snapshots:
        from megatron_lite.analysis.memory.ledger import build_ledger

        if facts.run is None:
            return facts
        unread = facts.ranks_without_snapshot
        if unread:
            gaps.add(
                f"no snapshot of {counted(len(unread), 'rank')} ({name_ranks(unread)}): memory may peak higher there"
            )
        rows = gaps.attempt("memory formulas", build_ledger, facts.highest_snapshot, facts.run.record)
        return replace(facts, ledger=rows or ())
    measured = []
    for rank in facts.ranks_seen:
        what = f"memory of {rank.trace.source}"
        memory = gaps.attempt(what, measure_trace_memory, rank.trace, rank.placing)
        if memory:
            measured.append(memory)
    return replace(facts, traced_memory=tuple(measured))


def analyze_file(path: Path, max_events: int, report: Callable[[int], None]) -> tuple[list[RankFacts], list[str]]:
    """Read and analyze the traces of one file.

    Args:
        path: the file.
        max_events: how many events are read at most.
        report: called with the number of events that were read so far.

    Returns:
        The facts of each trace, and a line for each part of the analysis that failed.

    Raises:
        What read_traces raises.
    """
    gaps = _Gaps()
    found = []
    for trace in read_traces(path, max_events, report):
        rank = gaps.attempt(trace.source, _analyze_trace, trace, gaps)
        if rank:
            found.append(rank)
    return found, gaps.found


def _analyze_trace(trace: Trace, gaps: _Gaps) -> RankFacts:
    """Attribute a trace's events to steps, measure its time, and analyze its kernels where that succeeds."""
    placing = attribute_events(trace)
    times = rank_time(trace, placing)
    kernels = gaps.attempt(f"kernels of {trace.source}", rank_kernels, trace, placing, times)
    return RankFacts(trace=trace, placing=placing, time=times, kernels=kernels or RankKernels(trace.rank))


def _read_snapshots(paths: Sequence[Path], say: Callable[..., None], gaps: _Gaps) -> tuple[Snapshot, ...]:
    """Read memory snapshots.

    Args:
        paths: the snapshot files.
        say: called as say(text, lasting=False) with what is being read.
        gaps: collects what could not be read.

    Returns:
        The snapshots by rank; those that do not tell their rank come last.
    """
    if not paths:
        return ()
    from megatron_lite.analysis.memory.read import read_snapshot

    found = []
    for path in paths:
        file_size = size(file_bytes(path))
        say(f"reading {path.name} ({file_size})", lasting=are_large([path]))
        snapshot = gaps.attempt(path.name, read_snapshot, path)
        if snapshot:
            found.append(snapshot)
    found.sort(key=lambda snapshot: (snapshot.rank is None, snapshot.rank or 0))
    return tuple(found)
