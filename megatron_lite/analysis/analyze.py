"""From files to a Report: read, place, time, kernels, ranks, memory, run, findings, verdict. No printing here.

What only snapshots or run folders need is imported where they are read: a trace's report is not to wait for it.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_lite.analysis.contradictions import missing_gpu_work, weakened
from megatron_lite.analysis.discover import discover_sources
from megatron_lite.analysis.findings.rules import apply_rules
from megatron_lite.analysis.kernels.kernel_results import RankKernels
from megatron_lite.analysis.kernels.rank_kernels import rank_kernels
from megatron_lite.analysis.memory.memory_results import Snapshot
from megatron_lite.analysis.memory.trace_memory import measure_trace_memory
from megatron_lite.analysis.ranks.from_run import compare_ranks_of_run, only_lasting
from megatron_lite.analysis.ranks.rank_results import Ranks
from megatron_lite.analysis.ranks.ranks import compare_ranks
from megatron_lite.analysis.report import Report
from megatron_lite.analysis.run.run_results import Run
from megatron_lite.analysis.run_facts import Facts, RankFacts
from megatron_lite.analysis.time.rank_time import rank_time
from megatron_lite.analysis.time.step_windows import attribute_events
from megatron_lite.analysis.trace.columns import Trace
from megatron_lite.analysis.trace.read import are_large, file_bytes, readers, say_nothing
from megatron_lite.analysis.verdict import build_verdict
from megatron_lite.errors import UserError
from megatron_lite.units import size

# --- one line that says which run this is: name, ranks, device, model


def describe_run(paths: Sequence[Path | str], facts: Facts) -> str:
    """ "run-1: 2 ranks, NVIDIA H100, GPT 24 x 1024"; parts that are not known are left out."""
    parts = [_describe_ranks(facts), _device(facts), _model(facts.plan)]
    return f"{_name(paths)}: {', '.join(part for part in parts if part)}".removesuffix(": ")


def _name(paths: Sequence[Path | str]) -> str:
    first = Path(paths[0])
    name = first.name or first.resolve().name or str(first)
    return name if len(paths) == 1 else f"{name} and {len(paths) - 1} more"


def _describe_ranks(facts: Facts) -> str:
    seen = len(facts.ranks_seen)
    world = facts.ranks.world_size if facts.ranks else None
    world = world or next((rank.trace.world_size for rank in facts.ranks_seen if rank.trace.world_size), None)
    world = world or (facts.run.world_size if facts.run else None)
    if world and seen and seen < world:
        return f"{seen} of {world} ranks"
    if not world and all(rank.time.rank is None for rank in facts.ranks_seen):
        return _counted(seen, "process", "es") or _counted(len(facts.snapshots), "snapshot", "s")
    return _counted(world or seen, "rank", "s")


def _counted(number: int, what: str, plural: str) -> str:
    return f"{number} {what}{plural if number > 1 else ''}" if number else ""


def _device(facts: Facts) -> str:
    if facts.critical:
        one = facts.critical
        missing = missing_gpu_work(one, facts.run)
        if missing:
            return f"{one.trace.devices[0] if one.trace.devices else 'unknown device'} without its work"
        return one.time.device or ("GPU" if one.time.on_gpu else "CPU")
    hardware = facts.run.record.get("hardware") if facts.run else None
    device = hardware.get("device") if isinstance(hardware, dict) else None
    return "CPU" if device == "cpu" else str(device or "")


def _model(plan: dict) -> str:
    shape = plan.get("shape")
    if not isinstance(shape, dict) or "num_layers" not in shape or "hidden_size" not in shape:
        return ""
    return f"GPT {shape['num_layers']} x {shape['hidden_size']}"


# --- from files to a Report: read, place, time, kernels, ranks, memory, run, findings, verdict. No printing here


class _Gaps:
    """Runs a part of the analysis; one that fails becomes a named gap, so that the others still answer."""

    def __init__(self):
        self.found: list[str] = []

    def add(self, text: str):
        if text not in self.found:
            self.found.append(text)

    def attempt(self, what: str, work: Callable, *given):
        """`work(*given)`, or None with a gap: one line for an unreadable file, the place for a mistake of ours."""
        try:
            return work(*given)
        except UserError as error:
            self.add(" ".join(error.lines))
        except MemoryError:
            self.add(f"{what}: not enough memory to read it")
        except Exception as error:  # noqa: BLE001  a foreign file that nobody foresaw must not take the rest along
            kind = f"{type(error).__name__} {_place(error)}: {error}"
            self.add(f"{what}: could not be analysed, a mistake of this program ({kind}); please report it")
        return None


def analyze(paths: Sequence[Path | str], say: Callable = say_nothing) -> Report:
    """Everything that the files under `paths` tell of one run. say(text, lasting=False) is told what is being read.

    Raises UserError where nothing can be read; what cannot be read beside readable files is a gap of the report.
    """
    started, gaps = time.monotonic(), _Gaps()
    sources = discover_sources([Path(path) for path in paths])
    for path, why in sources.ignored:
        gaps.add(f"{path.name}: {why}")
    seen = _seen(sources.traces, say, gaps)
    snapshots = _snapshots(sources.snapshots, say, gaps)
    run = _run(sources.run_folders, gaps)
    if not (seen or snapshots or run):
        raise UserError(_nothing(paths, gaps.found))
    say("comparing ranks, looking for causes")
    facts = Facts(ranks_seen=seen, ranks=_ranks(seen, run, gaps), snapshots=snapshots, run=run, gaps=())
    facts = _with_prediction(_with_memory(facts, gaps), gaps)
    findings = weakened(gaps.attempt("findings", apply_rules, facts, gaps.add) or (), facts)
    facts = dataclasses.replace(facts, gaps=tuple(gaps.found))
    return Report(
        paths=tuple(map(str, paths)),
        title=describe_run(paths, facts),
        verdict=build_verdict(facts, findings),
        findings=findings,
        facts=facts,
        read_s=time.monotonic() - started,
    )


def _seen(paths: Sequence[Path], say: Callable, gaps: _Gaps) -> tuple[RankFacts, ...]:
    """Each process of each file, by rank."""
    seen = []
    for path, read in zip(paths, readers(paths, say)):
        for trace in gaps.attempt(path.name, read) or ():
            say(f"analysing {trace.source} ({len(trace.events):,} events)")
            seen.append(gaps.attempt(trace.source, _rank, trace, gaps))
    return tuple(sorted((one for one in seen if one), key=lambda one: (one.time.rank is None, one.time.rank or 0)))


def _rank(trace: Trace, gaps: _Gaps) -> RankFacts:
    placing = attribute_events(trace)
    times = rank_time(trace, placing)
    kernels = gaps.attempt(f"kernels of {trace.source}", rank_kernels, trace, placing, times) or _no_kernels(trace.rank)
    return RankFacts(trace=trace, placing=placing, time=times, kernels=kernels)


def _no_kernels(rank: int | None) -> RankKernels:
    return RankKernels(
        rank=rank,
        rows=(),
        operators=(),
        roles={},
        device_ms=0.0,
        matrix_ms=0.0,
        tensor_core_ms=0.0,
        maybe_tensor_core_ms=0.0,
        roofline=(),
        model_flops=None,
        achieved_tflops=None,
        peak_tflops=None,
        peak_dtype="",
        mfu=None,
        compiled_regions=0.0,
        notes=(),
    )


def _ranks(seen: Sequence[RankFacts], run: Run | None, gaps: _Gaps) -> Ranks | None:
    """From the traces; without any from the run's medians per rank."""
    if seen:
        ranks = gaps.attempt("ranks", compare_ranks, [(rank.trace, rank.placing, rank.time) for rank in seen])
        return only_lasting(ranks, run) if ranks and run else ranks
    return gaps.attempt("ranks", compare_ranks_of_run, run) if run else None


def _snapshots(paths: Sequence[Path], say: Callable, gaps: _Gaps) -> tuple[Snapshot, ...]:
    """By rank."""
    if not paths:
        return ()
    from megatron_lite.analysis.memory.read import read_snapshot

    found = []
    for path in paths:
        say(f"reading {path.name} ({size(file_bytes(path))})", lasting=are_large([path]))
        found.append(gaps.attempt(path.name, read_snapshot, path))
    return tuple(sorted((one for one in found if one), key=lambda one: (one.rank is None, one.rank or 0)))


def _with_memory(facts: Facts, gaps: _Gaps) -> Facts:
    """The ledger of the highest snapshot; without a snapshot what the traces say."""
    if facts.snapshots:
        from megatron_lite.analysis.memory.ledger import ledger

        rows = gaps.attempt("memory formulas", ledger, facts.highest_snapshot, facts.plan)
        return dataclasses.replace(facts, ledger=rows or ())
    found = [
        gaps.attempt(f"memory of {one.trace.source}", measure_trace_memory, one.trace, one.placing)
        for one in facts.ranks_seen
    ]
    return dataclasses.replace(facts, traced_memory=tuple(one for one in found if one))


def _with_prediction(facts: Facts, gaps: _Gaps) -> Facts:
    """What the run predicted of itself, beside what was measured."""
    if facts.run is None or not facts.run.record.get("prediction"):
        return facts
    from megatron_lite.analysis.predicted import compare_prediction

    return dataclasses.replace(facts, predicted=gaps.attempt("prediction", compare_prediction, facts))


def _run(folders: Sequence[Path], gaps: _Gaps) -> Run | None:
    """The newest; comparing is another command's."""
    if not folders:
        return None
    from megatron_lite.analysis.run.read import read_run

    runs = [gaps.attempt(folder.name, read_run, folder) for folder in folders[:1]]
    for folder in folders[1:]:
        gaps.add(f"{folder}: an older run's folder, left aside; name it alone, or use megatron-lite compare")
    return runs[0]


def _nothing(paths: Sequence[Path | str], gaps: Sequence[str]) -> str:
    if len(gaps) == 1:
        return gaps[0]
    more = f"; and {len(gaps) - 3} more" if len(gaps) > 3 else ""
    return f"{', '.join(map(str, paths))}: nothing in it can be read ({'; '.join(gaps[:3])}{more})"


def _place(error: Exception) -> str:
    """in FILE:LINE of the innermost frame."""
    frames = error.__traceback__
    while frames.tb_next:
        frames = frames.tb_next
    return f"in {Path(frames.tb_frame.f_code.co_filename).name}:{frames.tb_lineno}"
