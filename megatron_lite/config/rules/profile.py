"""What the flags of profiling must satisfy."""

from collections.abc import Iterator

from megatron_lite.config.args import Args
from megatron_lite.config.world import World


def profile_rules(args: Args, world: World) -> Iterator[str]:
    """Mistakes among windows, ranks and ways of profiling."""
    p = args.profile
    if p.profile_gzip and p.no_profile_gzip:
        yield "--profile-gzip and --no-profile-gzip exclude each other; keep one, or none: large traces are compressed."
    if not (p.profile or p.use_pytorch_profiler or p.record_memory_history):
        return
    if p.profile_step_start < 0:
        yield f"--profile-step-start {p.profile_step_start}: must be at least 0."
    if p.profile_step_end <= max(p.profile_step_start, 1):
        yield (
            f"--profile-step-end {p.profile_step_end}: must be greater than --profile-step-start "
            f"{p.profile_step_start} and than 1; the end is not profiled itself."
        )
    if p.memory_history_events < 1:
        yield f"--memory-history-events {p.memory_history_events}: must be at least 1; 1000000 when left out."
    outside = [rank for rank in p.profile_ranks if not -1 <= rank < world.size]
    if outside:
        yield f"--profile-ranks {outside[0]}: there are ranks 0 to {world.size - 1}; -1 means all."
    if p.use_pytorch_profiler and world.under_nsys and world.gpus:
        # CUPTI serves one of the two, and torch's trace would silently lack all kernels
        yield (
            "--use-pytorch-profiler does not work under nsys, which holds the GPU's counters; drop it, or start "
            "without nsys."
        )
