"""Finds what makes a run slow or fail in its environment: variables, limits of the machine, missing tools."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from megatron_lite.config.args import DataArgs
from megatron_lite.config.data_paths import BATCHES_AHEAD, parse_blend, read_argument_files
from megatron_lite.config.plan import Plan
from megatron_lite.errors import DataError
from megatron_lite.machine import Machine
from megatron_lite.units import MIB, count, counted, is_number, size
from megatron_lite.variables import (
    MORE_QUEUES,
    QUEUES,
    SWITCHES,
    THREADS,
    RunPlace,
    fitting_threads,
    has_needless_order,
    switches_on,
)

# --- PYTORCH_ALLOC_CONF: options of torch's allocator for GPU memory

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the first one that is set counts
ASYNC_BACKEND = "cudaMallocAsync"
ON_OR_OFF = (
    "expandable_segments",
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "release_lock_on_cudamalloc",
    "graph_capture_record_stream_reuse",
    "throw_on_cudamalloc_oom",
)
UNCHECKED = (
    "roundup_power2_divisions",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "large_segment_size_mb",
    "pinned_max_round_threshold_mb",
    "pinned_max_cached_size_mb",
    "per_process_memory_fraction",
)


@dataclass(frozen=True)
class OptionValues:
    """The values that torch takes for an option of its allocator."""

    accepts: Callable[[str], bool]
    remedy: str  # where it does not


SWITCH_VALUES = OptionValues(lambda value: value in ("True", "False"), "write True or False, with a capital")
SPLIT_SIZES = OptionValues(lambda value: value.isdigit() and int(value) >= 20, "give a whole number of at least 20")
BACKENDS = OptionValues(lambda value: value in ("native", ASYNC_BACKEND), f"there are native and {ASYNC_BACKEND}")
SHARES = OptionValues(
    lambda value: is_number(value) and 0 < float(value) < 1,
    "give a part of the memory between 0 and 1, such as 0.8",
)
JUDGED = {
    **dict.fromkeys(ON_OR_OFF, SWITCH_VALUES),
    "max_split_size_mb": SPLIT_SIZES,
    "max_non_split_rounding_mb": SPLIT_SIZES,
    "backend": BACKENDS,
    "garbage_collection_threshold": SHARES,
}
KNOWN_OPTIONS = (*JUDGED, *UNCHECKED)
IGNORED_BY_ASYNC = (
    "expandable_segments",
    "garbage_collection_threshold",
    "max_non_split_rounding_mb",
    "max_split_size_mb",
)


def list_allocator_hints(environ: Mapping[str, str]) -> Iterator[str]:
    """A line for each allocator setting that torch refuses or ignores."""
    name = next((name for name in ALLOCATOR_VARIABLES if name in environ), None)
    if name is None:
        return
    other = ALLOCATOR_VARIABLES[1]
    if name != other and environ.get(other) not in (None, "", environ[name]):
        yield f"{other}={environ[other]} does not count beside {name}={environ[name]}; unset one of them."
    settings: dict[str, str] = {}
    # a value in brackets may hold commas; blanks do not count
    for part in re.findall(r"[^,\[\]]+(?:\[[^\]]*\])?", re.sub(r"\s", "", environ[name])):
        option, _, value = part.partition(":")
        if option and value:
            settings[option] = value
        else:
            yield f"{name}: '{part}' is no option:value, which torch refuses; write such as expandable_segments:True."
    for option, value in settings.items():
        setting = f"{name}={option}:{value}"
        if option not in KNOWN_OPTIONS:
            near = get_close_matches(option, KNOWN_OPTIONS, 1)
            hint = f"did you mean {near[0]}?" if near else "check its name."
            yield f"{setting}: torch may refuse this option; {hint}"
        elif option in JUDGED and not JUDGED[option].accepts(value):
            yield f"{setting}: is refused by torch; {JUDGED[option].remedy}."
    if settings.get("expandable_segments") == "True" and "max_split_size_mb" in settings:
        yield (
            f"{name}: max_split_size_mb:{settings['max_split_size_mb']} does nothing with expandable_segments:True, "
            "whose blocks are always split; drop it."
        )
    native = [option for option in IGNORED_BY_ASYNC if option in settings]
    if settings.get("backend") == ASYNC_BACKEND and native:
        yield f"{name}: backend:{ASYNC_BACKEND} ignores {', '.join(native)}; drop one or the other."


TOKEN_BYTES = 8  # int64, as the loader hands them over
FILES_BESIDE = 256  # room for libraries, sockets of ranks, logs
# what a container gets that was not given more; NCCL asks for --shm-size=1g (its troubleshooting page)
MIN_SHM = 64 * MIB
# variables that change how fast a run is or how its memory is laid out; others may be secret, and are not written down
TELLING_VARIABLES = (QUEUES, THREADS, *ALLOCATOR_VARIABLES, *(switch.variable for switch in SWITCHES))


def hints(plan: Plan, environ: Mapping[str, str], machine: Machine | None) -> list[str]:
    """List problems of this run's environment, a line each: variable or flag, value, remedy.

    Args:
        plan: The run's plan.
        environ: Variables of the environment.
        machine: The machine that trains; None where it is not this one, and then only variables and flags are judged.
    """
    found = []
    world = plan.world
    is_on_gpu = plan.device == "cuda"
    if is_on_gpu and has_needless_order(environ.get(QUEUES), world.size, plan.layout.tensor, plan.layout.context):
        found.append(
            f"{QUEUES}=1: communication may wait for kernels that were launched before it; without tensor parallelism "
            f"unset it, or set {MORE_QUEUES}, and compare."
        )
    if is_on_gpu:
        found += list_allocator_hints(environ)
    switches = switches_on(environ, RunPlace(is_on_gpu, world.size, world.local_size))
    found += [f"{setting}: {cost}; unset it where speed matters." for setting, cost in switches.items()]
    if plan.device == "cpu" and machine is not None:
        found += _judge_threads(world.local_size, environ, machine)
    profile = plan.args.profile
    if profile.profile and not profile.use_pytorch_profiler and not world.under_nsys:
        absent = ", which is not on the PATH" if machine is not None and not machine.has_nsys else ""
        found.append(
            "--profile without --use-pytorch-profiler steers Nsight Systems, and this run is not under nsys: nothing "
            f"will be recorded; start it with nsys profile{absent}, or add --use-pytorch-profiler."
        )
    if machine is not None:
        batches = _count_loaded_batches(plan)
        found += _judge_shared_memory(plan, machine, batches)
        found += _judge_open_files(plan, machine, batches)
    return found


def _judge_threads(ranks: int, environ: Mapping[str, str], machine: Machine) -> Iterator[str]:
    """A line where a CPU's ranks have too many or too few threads for its cores."""
    typed = environ.get(THREADS, "")
    # unset: torchrun gives each of several ranks 1, and torch takes as many as it sees cores
    unset = 1 if ranks > 1 and "LOCAL_RANK" not in environ else machine.visible_cores
    asked = int(typed) if typed.isdigit() and int(typed) else unset
    threads = min(asked, machine.visible_cores)  # torch with MKL takes no more (seen with 2.13)
    given = f"{THREADS}={typed}" if typed else f"{THREADS} is not set"
    together = f"{counted(ranks, 'rank')} x {counted(threads, 'thread')}"
    fewer = fitting_threads(threads, ranks, machine.cores)
    share = max(1, machine.cores // ranks)
    if fewer:
        yield f"{given}: {together} wait for each other on {machine.cores} cores; set {THREADS}={fewer}."
    elif 2 * threads * ranks < machine.cores:
        yield f"{given}: {together} leave most of {machine.cores} cores idle; set {THREADS}={share}."


def _count_loaded_batches(plan: Plan) -> int:
    """Micro-batches that the loaders of one rank hold ready, at most."""
    if plan.args.data.dataloader_type == "external":
        return 0
    loaders = 2 if plan.args.watch.eval_iters else 1  # training and validation have theirs
    return BATCHES_AHEAD * plan.loader_workers * loaders


def _judge_shared_memory(plan: Plan, machine: Machine, batches: int) -> Iterator[str]:
    """A line where /dev/shm, in which batches of the loaders lie, has too little room."""
    if machine.shm_bytes is None:
        return
    ranks = plan.world.local_size
    batch_bytes = plan.args.training.micro_batch_size * (plan.shape.seq_length + 1) * TOKEN_BYTES
    needed = ranks * batches * batch_bytes
    room = size(machine.shm_bytes)
    if needed > machine.shm_bytes:
        yield (
            f"--num-workers {plan.loader_workers}: loaders of {ranks} ranks put up to {size(needed)} "
            f"into /dev/shm, which has {room}; give a container --shm-size, or take fewer workers."
        )
    elif plan.backend == "nccl" and ranks > 1 and machine.shm_bytes <= MIN_SHM:
        yield (
            f"/dev/shm has {room}: NCCL may fail for lack of room between the GPUs of this machine; "
            "give a container --shm-size=1g."
        )


def _judge_open_files(plan: Plan, machine: Machine, batches: int) -> Iterator[str]:
    """A line where a process may open too few files: data files stay mapped, and each batch of a loader is one."""
    if machine.open_files is None:
        return
    files = _count_data_files(plan.args.data)
    needed = files + batches + FILES_BESIDE
    if needed > machine.open_files >= 0:
        yield (
            f"ulimit -n {machine.open_files}: {count(files)} data files and the loader's batches need about "
            f"{count(needed)} open files in each process; raise it with ulimit -n {2 * needed}."
        )


def _count_data_files(typed: DataArgs) -> int:
    """Files of all data sets that the flags name: a .bin and an .idx of each."""
    prefixes: set[str] = set()
    try:
        d = read_argument_files(typed)
        for words in (d.data_path, d.train_data_path, d.valid_data_path, d.test_data_path):
            prefixes.update(parse_blend(words, "--data-path")[0])
    except DataError:
        return 0  # the rules of data say it
    return 2 * len(prefixes)
