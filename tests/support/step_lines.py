"""Lines of steps.jsonl with every field."""

from megatron_lite.formats.hardware_record import HardwareFigures
from megatron_lite.formats.step_records import RankInterval, StepRecord

STEP = StepRecord(
    iteration=11,
    step=1,
    consumed_samples=44,
    batch_size=4,
    ms=12.5,
    phases_ms={"forward": 3.25, "backward": 8.0},
    gpu_ms=12.25,
    gpu_phases_ms={"forward": 3.0},
    reduce_wait_ms=0.5,
    gpu_reduce_wait_ms=0.25,
    cpu_ms=13.0,
    core_wait_ms=0.125,
    involuntary_switches=2,
    host_memory_bytes=2**31,
    peak_memory_bytes=2**33,
    compile_ms=1.5,
    profiled=True,
    beside_profile=True,
    compiling=True,
    loss=2.75,
    grad_norm=1.25,
    loss_scale=1024.0,
    skipped=True,
    next_lr=1e-4,
    local=True,
)


INTERVAL = RankInterval(
    iterations=(1, 11),
    steps=[10, 9],
    step_ms=[12.5, 12.75],
    phases_ms={"forward": [3.25, None]},
    gpu_ms=[12.25, 12.5],
    gpu_phases_ms={"forward": [3.0, None]},
    own_backward_ms=[7.5, 7.75],
    host_memory_bytes=[2**31, 2**30],
    peak_memory_bytes=[2**33, 2**32],
    cpu_ms=[13.0, 14.0],
    core_wait_ms=[0.125, 0.25],
    involuntary_switches=[2.0, 3.0],
    hardware={name: [1.0, 2.0] for name in HardwareFigures.__struct_fields__} | {"idle": [0.0, 0.5]},
)
