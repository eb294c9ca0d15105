"""From files to a Report: read, place, time, kernels, ranks, memory, run, findings, verdict. No printing here.

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
from megatron_lite.analysis.findings.rules import apply_rules
from megatron_lite.analysis.kernels.kernel_results import RankKernels
from megatron_lite.analysis.kernels.rank_kernels import rank_kernels
from megatron_lite.analysis.memory.memory_results import Snapshot
from megatron_lite.analysis.memory.trace_memory import measure_trace_memory
from megatron_lite.analysis.rank_facts import RankFacts
from megatron_lite.analysis.ranks.from_run import compare_ranks_of_run, find_only_dimension, only_lasting
from megatron_lite.analysis.ranks.ranks import compare_ranks
from megatron_lite.analysis.report import Report
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.analysis.time.rank_time import rank_time
from megatron_lite.analysis.time.step_windows import attribute_events
from megatron_lite.analysis.trace.columns import Trace
from megatron_lite.analysis.trace.read import are_large, file_bytes, read_traces, readers, say_nothing
from megatron_lite.analysis.verdict import build_verdict
from megatron_lite.errors import UserError
from megatron_lite.units import size

Result = TypeVar("Result")


def describe_run(paths: Sequence[Path | str], facts: Facts) -> str:
    """ "run-1: 2 ranks, NVIDIA H100, GPT 24 x 1024"; parts that are not known are left out."""
    first = Path(paths[0])
    name = first.name or first.resolve().name or str(first)
    name += f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    seen, run, one = len(facts.ranks_seen), facts.run, facts.critical
    sizes = [facts.ranks.world_size if facts.ranks else None, *(rank.trace.world_size for rank in facts.ranks_seen)]
    sizes.append(run.world_size if run else None)
    world = next(filter(None, sizes), None)
    number, what, plural = world or seen, "rank", "s"
    if not world and all(rank.time.rank is None for rank in facts.ranks_seen):
        number, what, plural = (seen, "process", "es") if seen else (len(facts.snapshots), "snapshot", "s")
    ranks = f"{number} {what}{plural if number > 1 else ''}" if number else ""
    if world and 0 < seen < world:
        ranks = f"{seen} of {world} ranks"
    device = ""
    if one and missing_gpu_work(one, run):
        device = f"{one.trace.devices[0] if one.trace.devices else 'unknown device'} without its work"
    elif one:
        device = one.time.device or ("GPU" if one.time.on_gpu else "CPU")
    elif run:
        device = run.record.hardware.device or ""
        device = "CPU" if device == "cpu" else device
    shape, model = facts.shape, ""
    if shape.num_layers and shape.hidden_size:
        model = f"GPT {shape.num_layers} x {shape.hidden_size}"
    elif run and run.record.model is not None:
        model = f"--model {run.record.model.function}"
    return f"{name}: {', '.join(part for part in (ranks, device, model) if part)}".removesuffix(": ")


class _Gaps:
    """Runs a part of the analysis; one that fails becomes a named gap, so that the others still answer."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def add(self, text: str) -> None:
        if text not in self.found:
            self.found.append(text)

    def attempt(self, what: str, work: Callable[..., Result], *given: Any) -> Result | None:
        """`work(*given)`, or None with a gap: one line for an unreadable file, the place for a mistake of ours."""
        try:
            return work(*given)
        except UserError as error:
            self.add(" ".join(error.lines))
        except MemoryError:
            self.add(f"{what}: not enough memory to read it")
        except Exception as error:  # noqa: BLE001  a foreign file that nobody foresaw must not take the rest along
            *_, innermost = traceback.extract_tb(error.__traceback__)
            kind = f"{type(error).__name__} in {Path(innermost.filename).name}:{innermost.lineno}: {error}"
            self.add(f"{what}: could not be analyzed: a bug in megatron_lite ({kind}); please report it")
        return None


def analyze(paths: Sequence[Path | str], say: Callable[..., None] = say_nothing) -> Report:
    """Everything that the files under `paths` tell of one run. say(text, lasting=False) is told what is being read.

    Raises UserError where nothing can be read; what cannot be read beside readable files is a gap of the report.
    """
    started, gaps = time.monotonic(), _Gaps()
    sources = discover_sources([Path(path) for path in paths])
    for path, why in sources.ignored:
        gaps.add(f"{path.name}: {why}")
    seen: list[RankFacts] = []
    for path, read in zip(sources.traces, readers(sources.traces, analyze_file, say)):
        ranks_seen, missing = gaps.attempt(path.name, read) or ((), ())
        seen.extend(ranks_seen)
        for text in missing:
            gaps.add(text)
    seen.sort(key=lambda one: (one.time.rank is None, one.time.rank or 0))
    snapshots = _read_snapshots(sources.snapshots, say, gaps)
    run = None
    for folder in sources.run_folders:
        from megatron_lite.analysis.run.read import read_run

        run = gaps.attempt(folder.name, read_run, folder)
    if not (seen or snapshots or run):
        more = f"; and {len(gaps.found) - 3} more" if len(gaps.found) > 3 else ""
        said = f"{', '.join(map(str, paths))}: nothing in it can be read ({'; '.join(gaps.found[:3])}{more})"
        raise UserError(gaps.found[0] if len(gaps.found) == 1 else said)
    say("comparing ranks, looking for causes")
    if seen:
        ranks = gaps.attempt("ranks", compare_ranks, seen, find_only_dimension(run))
        ranks = only_lasting(ranks, run, [one.trace for one in seen]) if ranks else None
    else:
        ranks = gaps.attempt("ranks", compare_ranks_of_run, run) if run else None
    facts = Facts(ranks_seen=tuple(seen), ranks=ranks, snapshots=snapshots, run=run, gaps=())
    if snapshots:
        from megatron_lite.analysis.memory.ledger import ledger

        rows = gaps.attempt("memory formulas", ledger, facts.highest_snapshot, facts.plan)
        facts = replace(facts, ledger=rows or ())
    else:
        told = ((f"memory of {one.trace.source}", measure_trace_memory, one.trace, one.placing) for one in seen)
        facts = replace(facts, traced_memory=tuple(filter(None, [gaps.attempt(*one) for one in told])))
    if run and run.record.prediction is not None:
        from megatron_lite.analysis.predicted import compare_prediction

        facts = replace(facts, predicted=gaps.attempt("prediction", compare_prediction, facts))
    findings = weakened(gaps.attempt("findings", apply_rules, facts, gaps.add) or (), facts)
    facts = replace(facts, gaps=tuple(map(facts.in_words, gaps.found)))
    title, verdict = describe_run(paths, facts), build_verdict(facts, findings)
    findings = limit_certainty(findings, verdict.confidence)
    return Report(tuple(map(str, paths)), title, verdict, findings, facts, read_s=time.monotonic() - started)


def analyze_file(path: Path, max_events: int, report: Callable[[int], None]) -> tuple[list[RankFacts], list[str]]:
    """What each trace in a file gives, and a line for each part of the analysis that failed. Raises what read_traces raises.

    Args:
        path, max_events, report: As of read_traces.
    """
    gaps = _Gaps()
    ranks = [gaps.attempt(one.source, _analyze_trace, one, gaps) for one in read_traces(path, max_events, report)]
    return [one for one in ranks if one], gaps.found


def _analyze_trace(trace: Trace, gaps: _Gaps) -> RankFacts:
    placing = attribute_events(trace)
    times = rank_time(trace, placing)
    kernels = gaps.attempt(f"kernels of {trace.source}", rank_kernels, trace, placing, times)
    return RankFacts(trace=trace, placing=placing, time=times, kernels=kernels or RankKernels(trace.rank))


def _read_snapshots(paths: Sequence[Path], say: Callable[..., None], gaps: _Gaps) -> tuple[Snapshot, ...]:
    """By rank."""
    if not paths:
        return ()
    from megatron_lite.analysis.memory.read import read_snapshot

    found = []
    for path in paths:
        say(f"reading {path.name} ({size(file_bytes(path))})", lasting=are_large([path]))
        found.append(gaps.attempt(path.name, read_snapshot, path))
    return tuple(sorted(filter(None, found), key=lambda one: (one.rank is None, one.rank or 0)))
