"""What in the environment of a run can cost its user something: variables, limits of the machine, missing tools."""

import re
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches

from megatron_lite.config.args import DataArgs
from megatron_lite.config.data_paths import BATCHES_AHEAD, parse_blend, with_files_read
from megatron_lite.config.machine import Machine
from megatron_lite.config.plan import Plan
from megatron_lite.errors import DataError
from megatron_lite.units import MIB, count, is_number, size
from megatron_lite.variables import (
    MORE_QUEUES,
    QUEUES,
    SWITCHES,
    THREADS,
    Place,
    fitting_threads,
    has_needless_order,
    switches_on,
)

# --- PYTORCH_ALLOC_CONF: options of torch's allocator for GPU memory

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the first one that is set counts
NATIVE_BACKEND, ASYNC_BACKEND = "native", "cudaMallocAsync"
SPLITTING = ("max_split_size_mb", "max_non_split_rounding_mb")
MIN_SPLITTING_MIB = 20
SWITCH = (("True", "False").__contains__, "write True or False, with a capital")
SPLIT_SIZE = (
    lambda value: value.isdigit() and int(value) >= MIN_SPLITTING_MIB,
    f"give a whole number of at least {MIN_SPLITTING_MIB}",
)
ANY: tuple[Callable[[str], bool], str] = (lambda value: True, "")
# option: (whether torch takes a value, what to write instead)
ALLOCATOR_OPTIONS: dict[str, tuple[Callable[[str], bool], str]] = {
    "expandable_segments": SWITCH,
    "pinned_use_background_threads": SWITCH,
    "pinned_use_cuda_host_register": SWITCH,
    "release_lock_on_cudamalloc": SWITCH,
    "graph_capture_record_stream_reuse": SWITCH,
    "throw_on_cudamalloc_oom": SWITCH,
    **dict.fromkeys(SPLITTING, SPLIT_SIZE),
    "backend": ((NATIVE_BACKEND, ASYNC_BACKEND).__contains__, f"there are {NATIVE_BACKEND} and {ASYNC_BACKEND}"),
    "garbage_collection_threshold": (
        lambda value: is_number(value) and 0 < float(value) < 1,
        "give a part of the memory between 0 and 1, such as 0.8",
    ),
    "roundup_power2_divisions": ANY,
    "pinned_num_register_threads": ANY,
    "pinned_reserve_segment_size_mb": ANY,
    "pinned_max_round_threshold_mb": ANY,
    "pinned_max_cached_size_mb": ANY,
    "large_segment_size_mb": ANY,
    "per_process_memory_fraction": ANY,
}


def allocator_hints(environ: Mapping[str, str]) -> Iterator[str]:
    """What is wrong with the settings, a line each: what torch refuses, and options that do nothing together."""
    name = next((name for name in ALLOCATOR_VARIABLES if name in environ), None)
    if name is None:
        return
    if name == ALLOCATOR_VARIABLES[0] and environ.get(ALLOCATOR_VARIABLES[1]) not in (None, "", environ[name]):
        yield f"{ALLOCATOR_VARIABLES[1]}={environ[ALLOCATOR_VARIABLES[1]]} does not count beside {name}={environ[name]}; unset one of them."
    settings, broken = _settings(environ[name])
    for words in broken:
        yield f"{name}: '{words}' is no option:value, which torch refuses; write such as expandable_segments:True."
    for option, value in settings.items():
        yield from (f"{name}={option}:{value}: {wrong}" for wrong in _wrong(option, value))
    if settings.get("expandable_segments") == "True" and "max_split_size_mb" in settings:
        yield (
            f"{name}: max_split_size_mb:{settings['max_split_size_mb']} does nothing with expandable_segments:True, whose "
            "blocks are always split; drop it."
        )
    native = sorted({"expandable_segments", "garbage_collection_threshold", *SPLITTING} & set(settings))
    if settings.get("backend") == ASYNC_BACKEND and native:
        yield f"{name}: backend:{ASYNC_BACKEND} ignores {', '.join(native)}; drop one or the other."


def _settings(text: str) -> tuple[dict[str, str], list[str]]:
    """({option: value}, the parts that are none). A value in brackets may hold commas; blanks do not count."""
    parts = re.findall(r"[^,\[\]]+(?:\[[^\]]*\])?", re.sub(r"\s", "", text))
    pairs = [part.partition(":") for part in parts]
    return (
        {option: value for option, colon, value in pairs if option and value},
        [option + colon + value for option, colon, value in pairs if not (option and value)],
    )


def _wrong(option: str, value: str) -> Iterator[str]:
    """Why torch does not take it, with the remedy."""
    if option not in ALLOCATOR_OPTIONS:
        near = get_close_matches(option, ALLOCATOR_OPTIONS, 1)
        hint = f"did you mean {near[0]}?" if near else "check its name."
        yield f"torch may refuse this option; {hint}"
        return
    accepts, remedy = ALLOCATOR_OPTIONS[option]
    if not accepts(value):
        yield f"is refused by torch; {remedy}."


TOKEN_BYTES = 8  # int64, as the loader hands them over
FILES_BESIDE = 256  # room for libraries, sockets of ranks, logs
# what a container gets that was not given more; NCCL asks for --shm-size=1g (its troubleshooting page)
MIN_SHM = 64 * MIB
# variables that change how fast a run is or how its memory is laid out; others may be secret, and are not written down
TELLING_VARIABLES = (QUEUES, THREADS, *ALLOCATOR_VARIABLES, *(switch.variable for switch in SWITCHES))


def hints(plan: Plan, environ: Mapping[str, str], machine: Machine | None) -> list[str]:
    """A line for each thing that can cost something: variable or flag, value, remedy. [] for a sound environment.

    `machine` is the one that trains; None where it is not this one, and then only variables and flags are judged.
    """
    rules = (_queues, _allocator, _switches, _threads, _nsys, _shared_memory, _open_files)
    return [text for rule in rules for text in rule(plan, environ, machine)]


def _queues(plan: Plan, environ: Mapping[str, str], machine: Machine | None) -> Iterator[str]:
    if plan.device == "cuda" and has_needless_order(environ.get(QUEUES), plan.world.size):
        yield (
            f"{QUEUES}=1: communication may wait for kernels that were launched before it; without tensor parallelism "
            f"unset it, or set {MORE_QUEUES}, and compare."
        )


def _allocator(plan: Plan, environ: Mapping[str, str], machine: Machine | None) -> Iterator[str]:
    if plan.device == "cuda":
        yield from allocator_hints(environ)


def _switches(plan: Plan, environ: Mapping[str, str], machine: Machine | None) -> Iterator[str]:
    place = Place(plan.device == "cuda", plan.world.size, plan.world.local_size)
    for setting, cost in switches_on(environ, place).items():
        yield f"{setting}: {cost}; unset it where speed matters."


def _threads(plan: Plan, environ: Mapping[str, str], machine: Machine | None) -> Iterator[str]:
    if plan.device != "cpu" or machine is None:
        return
    ranks, typed = plan.world.local_size, environ.get(THREADS, "")
    asked = int(typed) if typed.isdigit() and int(typed) else _threads_unset(environ, ranks, machine)
    threads = min(asked, machine.visible_cores)  # torch with MKL takes no more (seen with 2.13)
    given = f"{THREADS}={typed}" if typed else f"{THREADS} is not set"
    together = f"{ranks} rank{'s' if ranks > 1 else ''} x {threads} thread{'s' if threads > 1 else ''}"
    fewer, share = fitting_threads(threads, ranks, machine.cores), max(1, machine.cores // ranks)
    if fewer:
        yield f"{given}: {together} wait for each other on {machine.cores} cores; set {THREADS}={fewer}."
    elif 2 * threads * ranks < machine.cores:
        yield f"{given}: {together} leave most of {machine.cores} cores idle; set {THREADS}={share}."


def _threads_unset(environ: Mapping[str, str], ranks: int, machine: Machine) -> int:
    """What each rank gets: of torchrun, which has yet to start them, 1 beside others; of torch as many as it sees cores."""
    to_be_launched = ranks > 1 and "LOCAL_RANK" not in environ
    return 1 if to_be_launched else machine.visible_cores


def _nsys(plan: Plan, environ: Mapping[str, str], machine: Machine | None) -> Iterator[str]:
    p = plan.args.profile
    if not p.profile or p.use_pytorch_profiler or plan.world.under_nsys:
        return
    absent = ", which is not on the PATH" if machine is not None and not machine.has_nsys else ""
    yield (
        "--profile without --use-pytorch-profiler steers Nsight Systems, and this run is not under nsys: nothing will be "
        f"recorded; start it with nsys profile{absent}, or add --use-pytorch-profiler."
    )


def _shared_memory(plan: Plan, environ: Mapping[str, str], machine: Machine | None) -> Iterator[str]:
    if machine is None or machine.shm_bytes is None:
        return
    batch = plan.args.training.micro_batch_size * (plan.shape.seq_length + 1) * TOKEN_BYTES
    needed = plan.world.local_size * _batches_under_way(plan) * batch
    if needed > machine.shm_bytes:
        yield (
            f"--num-workers {plan.loader_workers}: loaders of {plan.world.local_size} ranks put up to {size(needed)} "
            f"into /dev/shm, which has {size(machine.shm_bytes)}; give a container --shm-size, or take fewer workers."
        )
    elif plan.backend == "nccl" and plan.world.local_size > 1 and machine.shm_bytes <= MIN_SHM:
        yield (
            f"/dev/shm has {size(machine.shm_bytes)}: NCCL may fail for lack of room between the GPUs of this machine; "
            "give a container --shm-size=1g."
        )


def _batches_under_way(plan: Plan) -> int:
    """Micro-batches of one rank that lie between its loaders' workers and itself; training and validation have theirs."""
    if plan.args.data.dataloader_type == "external":
        return 0
    return BATCHES_AHEAD * plan.loader_workers * (2 if plan.args.watch.eval_iters else 1)


def _open_files(plan: Plan, environ: Mapping[str, str], machine: Machine | None) -> Iterator[str]:
    """Every pair of data files stays mapped, and every micro-batch under way is a file in /dev/shm."""
    if machine is None or machine.open_files is None:
        return
    files = 2 * len(_prefixes(plan.args.data))
    needed = files + _batches_under_way(plan) + FILES_BESIDE
    if needed > machine.open_files >= 0:
        yield (
            f"ulimit -n {machine.open_files}: {count(files)} data files and the loader's batches need about {count(needed)} "
            f"open files in each process; raise it with ulimit -n {2 * needed}."
        )


def _prefixes(typed: DataArgs) -> set[str]:
    try:
        d = with_files_read(typed)
        words = (d.data_path, d.train_data_path, d.valid_data_path, d.test_data_path)
        return {prefix for some in words for prefix in parse_blend(some, "--data-path")[0]}
    except DataError:
        return set()  # the rules of data say it
