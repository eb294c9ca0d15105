"""Which instruments watch this rank: the only place that asks what is to be profiled."""

from pathlib import Path

from megatron_lite.config.plan import Plan
from megatron_lite.instruments.base import Instrument
from megatron_lite.instruments.memory_history import MemoryHistory
from megatron_lite.instruments.nsys_range import NsysRange
from megatron_lite.instruments.timeline import Timeline
from megatron_lite.instruments.torch_profiler import TorchProfiler


def choose(plan: Plan, run_dir: Path, timeline: Timeline, tell) -> list[Instrument]:
    """The instruments of this rank. One that does not concern it is not made."""
    p, rank = plan.args.profile, plan.world.rank
    if rank not in plan.profile_ranks or not plan.profile_window:
        return [timeline]
    members: list[Instrument] = []
    if p.use_pytorch_profiler:
        folder = Path(plan.args.watch.tensorboard_dir or run_dir)
        members.append(TorchProfiler(
            plan.profile_window, folder, rank, p.pytorch_profiler_collect_shapes,
            p.pytorch_profiler_collect_callstack, tell,
        ))
    elif p.profile and plan.device == "cuda":
        members.append(NsysRange(plan.profile_window, p.nvtx_ranges, p.record_shapes))
    if p.record_memory_history and plan.device == "cuda":
        path = Path(p.memory_snapshot_path)
        members.append(MemoryHistory(plan.profile_window, path.with_stem(f"{path.stem}_rank{rank}"), tell))
    return [*members, timeline]  # innermost: what the others do between steps is not the step's time
