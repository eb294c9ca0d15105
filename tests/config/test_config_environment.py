"""What is said about the environment of a run before it starts, and that a sound one is silent."""

import re
from dataclasses import replace

import pytest
from support.command_lines import plan, read_table
from support.wording import wording

from megatron_lite.config.environment import TELLING_VARIABLES, hints
from megatron_lite.config.world import World
from megatron_lite.machine import Machine, read_limits, read_machine
from megatron_lite.units import GIB, MIB

SIZES = {"memory_bytes": 64 * GIB, "shm_bytes": 32 * GIB, "open_files": 65536}
MACHINE = Machine(cores=16, visible_cores=16, **SIZES, has_nsys=True)
ONE_GPU, GPUS, NODES = World(gpus=1), World(size=2, local_size=2, gpus=2), World(size=4, local_size=2, gpus=2)
ON_CPU, TWO_ON_CPU = World(), World(size=2, local_size=2)
WORLDS = {
    "ONE_GPU": ONE_GPU, "GPUS": GPUS, "NODES": NODES, "ON_CPU": ON_CPU, "TWO_ON_CPU": TWO_ON_CPU,
    "FOUR_ON_CPU": World(size=4, local_size=4),
}  # fmt: skip
SOUND = {"OMP_NUM_THREADS": "8"}
NSYS = "--profile without --use-pytorch-profiler steers Nsight Systems"


def said(world: World, changes: str = "", machine: Machine | None = MACHINE, **environ: str) -> list[str]:
    return hints(plan(changes, world), SOUND | environ, machine)


COSTS = read_table("""
GPUS | CUDA_DEVICE_MAX_CONNECTIONS=1 | CUDA_DEVICE_MAX_CONNECTIONS=1: communication may wait for kernels that were launched before it; without
ONE_GPU | CUDA_LAUNCH_BLOCKING=1 | CUDA_LAUNCH_BLOCKING=1: the host waits for every kernel; unset it
ONE_GPU | PYTORCH_NO_CUDA_MEMORY_CACHING=1 | PYTORCH_NO_CUDA_MEMORY_CACHING=1: every tensor is a cudaMalloc
TWO_ON_CPU | TORCH_DISTRIBUTED_DEBUG=detail | TORCH_DISTRIBUTED_DEBUG=detail: every collective is checked
GPUS | NCCL_DEBUG=TRACE | NCCL_DEBUG=TRACE: every collective is printed; unset it where speed matters.
GPUS | NCCL_P2P_DISABLE=1 | NCCL_P2P_DISABLE=1: GPUs of one machine talk through host memory
NODES | NCCL_IB_DISABLE=1 | NCCL_IB_DISABLE=1: InfiniBand is not used
GPUS | TORCH_NCCL_ENABLE_TIMING=1 | TORCH_NCCL_ENABLE_TIMING=1: events around every collective
ONE_GPU | PYTORCH_CUDA_ALLOC_CONF=expandable_segments=True | PYTORCH_CUDA_ALLOC_CONF: 'expandable_segments=True' is no option:value, which torch refuses; write such as
ONE_GPU | PYTORCH_ALLOC_CONF=expandable_segments:true | PYTORCH_ALLOC_CONF=expandable_segments:true: is refused by torch; write True or False, with a capital.
ONE_GPU | PYTORCH_ALLOC_CONF=expandable_segment:True | PYTORCH_ALLOC_CONF=expandable_segment:True: torch may refuse this option; did you mean expandable_segments?
ONE_GPU | PYTORCH_ALLOC_CONF=zzz:1 | PYTORCH_ALLOC_CONF=zzz:1: torch may refuse this option; check its name.
ONE_GPU | PYTORCH_ALLOC_CONF=max_split_size_mb:10 | PYTORCH_ALLOC_CONF=max_split_size_mb:10: is refused by torch; give a whole number of at least 20.
ONE_GPU | PYTORCH_ALLOC_CONF=garbage_collection_threshold:2 | PYTORCH_ALLOC_CONF=garbage_collection_threshold:2: is refused by torch; give a part of the memory between 0 and 1
ONE_GPU | PYTORCH_ALLOC_CONF=backend:cuda | PYTORCH_ALLOC_CONF=backend:cuda: is refused by torch; there are native and cudaMallocAsync.
ONE_GPU | PYTORCH_ALLOC_CONF=backend:cudaMallocAsync,expandable_segments:True | PYTORCH_ALLOC_CONF: backend:cudaMallocAsync ignores expandable_segments; drop one or the other.
ONE_GPU | PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128, expandable_segments:True | PYTORCH_CUDA_ALLOC_CONF: max_split_size_mb:128 does nothing with expandable_segments:True
ONE_GPU | PYTORCH_ALLOC_CONF=backend:native ; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True | PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True does not count beside PYTORCH_ALLOC_CONF=backend:native; unset
TWO_ON_CPU | OMP_NUM_THREADS=16 | OMP_NUM_THREADS=16: 2 ranks x 16 threads wait for each other on 16 cores; set OMP_NUM_THREADS=8.
TWO_ON_CPU | OMP_NUM_THREADS=1 | OMP_NUM_THREADS=1: 2 ranks x 1 thread leave most of 16 cores idle; set OMP_NUM_THREADS=8.
TWO_ON_CPU | OMP_NUM_THREADS= | OMP_NUM_THREADS is not set: 2 ranks x 1 thread leave most of 16 cores idle; set OMP_NUM_THREADS=8.
TWO_ON_CPU | OMP_NUM_THREADS= ; LOCAL_RANK=0 | OMP_NUM_THREADS is not set: 2 ranks x 16 threads wait for each other on 16 cores; set OMP_NUM_THREADS=8.
""")


@pytest.mark.parametrize(("world", "environ", "line"), COSTS)
def test_a_variable_that_costs_something_is_one_line(world, environ, line):
    told = said(WORLDS[world], **dict(setting.split("=", 1) for setting in environ.split(" ; ")))
    assert len(told) == 1 and told[0].startswith(line), told


COSTS_NOTHING = read_table("""
ONE_GPU | CUDA_DEVICE_MAX_CONNECTIONS=1 ; NCCL_P2P_DISABLE=1 ; TORCH_DISTRIBUTED_DEBUG=DETAIL
GPUS | CUDA_DEVICE_MAX_CONNECTIONS=8 ; NCCL_IB_DISABLE=1 ; NCCL_DEBUG=INFO
GPUS | CUDA_LAUNCH_BLOCKING=0 ; TORCH_DISTRIBUTED_DEBUG=INFO ; OMP_NUM_THREADS=1
GPUS | PYTORCH_ALLOC_CONF=expandable_segments:True,roundup_power2_divisions:[256:1,512:2,>:4]
GPUS | PYTORCH_CUDA_ALLOC_CONF= ; PYTORCH_ALLOC_CONF= max_split_size_mb : 512 ,garbage_collection_threshold:0.8,
GPUS | PYTORCH_ALLOC_CONF=expandable_segments:True ; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
ON_CPU | CUDA_LAUNCH_BLOCKING=1 ; PYTORCH_ALLOC_CONF=nonsense ; CUDA_DEVICE_MAX_CONNECTIONS=1
ON_CPU | OMP_NUM_THREADS=
FOUR_ON_CPU | OMP_NUM_THREADS=4
ON_CPU | OMP_NUM_THREADS=64
""")


@pytest.mark.parametrize(("world", "environ"), COSTS_NOTHING)
def test_what_costs_nothing_there_is_not_said(world, environ):
    assert said(WORLDS[world], **dict(setting.split("=", 1) for setting in environ.split(" ; "))) == []


def test_threads_are_judged_by_the_cores_that_are_granted():
    two = replace(MACHINE, cores=2)  # of more that are seen
    assert said(ON_CPU, machine=two, OMP_NUM_THREADS="") == [wording("config/omp-num-threads-is", 1, 16, 2, 2)]
    assert said(World(size=4, local_size=4), machine=two, OMP_NUM_THREADS="1") == [], "as few as there can be"
    # the limits of another machine are not judged
    assert said(GPUS, "--num-workers 8 --micro-batch-size 4096 --global-batch-size 8192", None) == []
    assert said(TWO_ON_CPU, "", None, OMP_NUM_THREADS="64") == []
    this = read_machine()
    assert 1 <= this.cores <= this.visible_cores
    assert this.memory_bytes is None or this.memory_bytes > 2**28
    assert said(ON_CPU, machine=this, OMP_NUM_THREADS=str(this.cores)) == []


def test_a_profile_for_a_tool_that_does_not_watch():
    with_tool = said(ON_CPU, "--profile")
    assert len(with_tool) == 1 and with_tool[0].startswith(NSYS) and wording("config/not-on-path") not in with_tool[0]
    without = said(ON_CPU, "--profile", machine=replace(MACHINE, has_nsys=False))
    assert wording("config/start-it-with-nsys", "--use-pytorch-profiler") in without[0]
    assert said(ON_CPU, "--profile --use-pytorch-profiler") == said(World(under_nsys=True), "--profile") == []


@pytest.mark.parametrize(
    ("changes", "machine", "line"),
    [
        (
            "--num-workers 8 --micro-batch-size 4096 --global-batch-size 8192",
            {"shm_bytes": 64 * MIB},
            "--num-workers 8: loaders of 2 ranks put up to 132.0 MiB into /dev/shm, which has 64.0 MiB; give a container",
        ),
        ("", {"shm_bytes": 64 * MIB}, "/dev/shm has 64.0 MiB: NCCL may fail for lack of room between the GPUs"),
        (
            "--num-workers 64 !--mock-data --data-path a b c",
            {"open_files": 512},
            "ulimit -n 512: 6 data files and the loader's batches need about 774 open files in each process; raise it",
        ),
    ],
)
def test_a_limit_of_the_machine_that_the_run_exceeds(changes, machine, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in "abc":
        for ending in (".bin", ".idx"):
            (tmp_path / (name + ending)).write_text("")
    told = said(GPUS, changes, replace(MACHINE, **machine))
    assert len(told) == 1 and told[0].startswith(line), told


V1 = {"cpu/cpu.cfs_quota_us": "150000", "cpu/cpu.cfs_period_us": "100000", "memory/memory.limit_in_bytes": "8192"}


@pytest.mark.parametrize(
    ("files", "limits"),
    [
        ({}, (None, None)),
        ({"cpu.max": "max 100000", "memory.max": "max"}, (None, None)),
        ({"cpu.max": "200000 100000", "memory.max": "1073741824\n"}, (2.0, GIB)),
        # the group itself is granted more than the one around it
        ({"job/cpu.max": "800000 100000", "cpu.max": "400000 100000", "job/step/memory.max": "4096"}, (4.0, 4096)),
        (V1, (1.5, 8192)),
        (V1 | {"cpu/cpu.cfs_quota_us": "-1", "memory/memory.limit_in_bytes": str(2**63 - 4096)}, (None, None)),
    ],
)
def test_what_control_groups_grant(files, limits, tmp_path):
    membership = tmp_path / "membership"
    membership.write_text("12:cpuset:/other\n0::/job/step\n")
    root = tmp_path / "groups"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    assert read_limits(root, membership) == limits


def test_every_variable_that_is_judged_is_written_into_the_record():
    loud = {name: "1" for name in TELLING_VARIABLES}
    lines = said(NODES, "", replace(MACHINE, shm_bytes=0), **loud) + said(TWO_ON_CPU, "", **loud)
    judged = {match for line in lines for match in re.findall(r"\b[A-Z][A-Z0-9_]{5,}(?==| is not set|:)", line)}
    assert judged and judged <= set(TELLING_VARIABLES)
