"""What a run folder of this trainer says: run.json and steps.jsonl (formats: megatron_lite/run_folder.py)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RankMedians:
    """Every rank's medians over the run's ordinary steps; lists have a number per rank."""

    step_ms: tuple[float, ...]
    gpu_ms: tuple[float, ...]
    phases_ms: dict[str, tuple[float, ...]]
    gpu_phases_ms: dict[str, tuple[float, ...]]
    host_memory_bytes: tuple[tuple[int, ...], ...]  # [console line][rank], to see growth
    peak_memory_bytes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Run:
    """One run, as it described itself."""

    folder: str
    plan: dict  # run.json's plan
    record: dict  # the rest of run.json: versions, hardware, how it ended
    steps: int
    iterations: tuple[int, ...]
    step_ms: tuple[float, ...]  # per step
    ordinary: tuple[bool, ...]  # neither profiled, beside a profile, compiling, evaluating nor saving
    profiled: tuple[bool, ...]
    phases_ms: dict[str, tuple[float, ...]]  # per step, 0 where it had none
    loss_scale: tuple[float, ...]
    skipped: tuple[bool, ...]
    host_memory_bytes: tuple[int, ...]
    peak_memory_bytes: tuple[int, ...]
    first_step_ms: float | None
    steady_step_ms: float | None  # median of ordinary steps
    profiled_step_ms: float | None  # median inside the window
    tokens_per_second: float | None  # of ordinary steps
    mfu_causal: float | None
    mfu_full: float | None
    model_tflops: float | None  # per GPU, causal
    ranks: RankMedians | None
    notes: tuple[str, ...]
