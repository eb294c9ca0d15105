"""The reading of stacks: the line of the user's program, and what the thread is about."""

import enum
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from megatron_lite.postmortem.evidence import ProcessStacks, StackFrame, ThreadStack

# files of libraries and of Python itself
LIBRARY = re.compile(
    r"(?:^|/)(?:site-packages|dist-packages)/|(?:^|/)lib(?:64)?/python\d[^/]*/|^<(?:frozen|string|__array)|"
    r"\.(?:so(?:\.\d+)*|cpp|cc|cu|h|hpp|c|pyx)$"
)
# packages that are often on stacks; py-spy writes files without the folder that they are installed in
PACKAGES = frozenset(
    {"torch", "torchvision", "torchdata", "triton", "numpy", "pandas", "pyarrow", "PIL", "tqdm", "fsspec"}
    | {"transformers", "datasets", "accelerate", "tokenizers", "safetensors", "huggingface_hub", "deepspeed"}
    | {
        "lightning",
        "pytorch_lightning",
        "lightning_fabric",
        "torchmetrics",
        "webdataset",
        "ray",
        "requests",
        "urllib3",
        "boto3",
        "botocore",
    }
)
# what watches a program stands on its stacks, too
OWN_WATCHERS = re.compile(
    r"(?:^|/)megatron_lite/(?:(?:watch|instruments|script_record|script_walk|postmortem)/|"
    r"parallel/(?:rank_status|watchdog|hang_diagnosis)\.py)"
)
OWN_PACKAGE = re.compile(r"(?:^|/)megatron_lite/")
OWN_DATA = re.compile(r"(?:^|/)megatron_lite/data/")
DISTRIBUTED = re.compile(
    r"(?:^|/)torch/distributed/(?!elastic/|run\.py|launch|checkpoint/|debug/)|(?:^|/)torch/nn/parallel/distributed\.py"
)
NATIVE_WAIT = re.compile(r"c10d::|gloo::|ncclGroupEnd|ncclCommInit|ProcessGroup(?:Gloo|NCCL)|TCPStore")
LOADERS = re.compile(r"(?:^|/)torch/utils/data/|(?:^|/)(?:webdataset|torchdata|streaming|litdata|grain)/")
LOADER_FILES = re.compile(r"(?:^|_)(?:data|dataset|datasets|dataloader|loader|loaders)$")
LOADER_FUNCTIONS = re.compile(
    r"__getitem__|(?:^|_)(?:get|next|load|read|fetch)_?\w*(?:batch|batches|data|sample|samples|shard)(?:es|s)?$"
)
CHECKPOINTS = re.compile(r"(?:^|/)torch/(?:distributed/checkpoint/|serialization\.py)|(?:^|/)safetensors/")
COMPILERS = re.compile(
    r"(?:^|/)torch/_inductor/(?:compile_fx|codecache|async_compile|scheduler|graph)|(?:^|/)triton/compiler"
)
DEVICE_FILES = re.compile(r"(?:^|/)torch/cuda/(?:__init__|streams|graphs)\.py")
DEVICE_CALLS = re.compile(r"cu(?:da)?(?:Stream|Device|Event|Ctx)Synchronize|_local_scalar_dense|cudaMemcpy")
THREAD_STARTS = ("_bootstrap", "Thread._bootstrap", "_bootstrap_inner")
BACKWARD = re.compile(r"(?:^|/)torch/autograd/")


class Activity(enum.Enum):
    """The work that a thread is about."""

    # inside a collective, a message or a store
    WAITS_FOR_RANKS = "waits for other ranks"
    LOADS_DATA = "loads data"
    WAITS_FOR_DEVICE = "waits for the device"
    SAVES = "reads or writes a checkpoint"
    COMPILES = "compiles"
    # autograd runs on a thread of its own: this may wait for ranks as well as compute
    BACKWARD = "is in backward"
    RUNS = "runs the program"
    UNKNOWN = "is at an unknown place"


@dataclass(frozen=True)
class StackPlace:
    """Where a thread is, and what it does there."""

    activity: Activity
    # line of the user's program: "train.py:88 in step"; "" where no frame is of it
    call_site: str
    # the innermost frame: "sleep", "wait (threading.py:327)"
    innermost: str
    # only names of files or functions speak for the activity
    is_guess: bool = False
    # the thread uses no core, or its process is stopped; None where the writer does not tell
    is_idle: bool | None = None


def is_of_program(frame: StackFrame) -> bool:
    """Tell whether a frame is of the user's program: neither torch, nor an installed package, nor Python itself.

    This package's trainer counts as a program; what it puts around programs of others does not.
    """
    if OWN_PACKAGE.search(frame.file):
        return OWN_WATCHERS.search(frame.file) is None
    if not frame.file or LIBRARY.search(frame.file):
        return False
    first = PurePosixPath(frame.file).parts[0].removesuffix(".py")
    return first not in PACKAGES and first not in sys.stdlib_module_names


def find_program_frame(frames: Sequence[StackFrame]) -> StackFrame | None:
    """Find the innermost frame of the user's program; None where there is none."""
    return next((frame for frame in frames if is_of_program(frame)), None)


def write_frame(frame: StackFrame) -> str:
    """Write a frame as "train.py:88 in step"."""
    name = PurePosixPath(frame.file).name or frame.file
    line = f":{frame.line}" if frame.line is not None else ""
    function = f" in {frame.function}" if frame.function and frame.function != "<module>" else ""
    return f"{name}{line}{function}"


def find_call_site(frames: Sequence[StackFrame]) -> str:
    """Write the line of the user's program on a stack, innermost frame first; "" where there is none."""
    frame = find_program_frame(frames)
    return write_frame(frame) if frame else ""


def find_main_thread(stacks: ProcessStacks) -> ThreadStack | None:
    """Find the thread that runs the program: the one that is marked so, else one that Python's threading did not
    start."""
    marked = [thread for thread in stacks.threads if thread.is_main or thread.name == "MainThread"]
    if marked:
        return marked[0]
    with_frames = [thread for thread in stacks.threads if thread.frames]
    first = [thread for thread in with_frames if thread.frames[-1].function not in THREAD_STARTS]
    candidates = first or with_frames
    of_program = [thread for thread in candidates if find_program_frame(thread.frames)]
    return next(iter([*of_program, *candidates]), None)


def find_place(frames: Sequence[StackFrame]) -> StackPlace:
    """Find out what a thread is about.

    The innermost frame that says so decides, but for loaders of data: they call the program's own code.
    """
    if not frames:
        return StackPlace(Activity.UNKNOWN, "", "")
    site = find_call_site(frames)
    innermost = write_frame(frames[0])
    for frame in frames:
        activity = _judge_library_frame(frame)
        if activity is not None:
            return StackPlace(activity, site, innermost)
        if is_of_program(frame):
            break
    if any(LOADERS.search(frame.file) or OWN_DATA.search(frame.file) for frame in frames):
        return StackPlace(Activity.LOADS_DATA, site, innermost)
    frame_of_program = find_program_frame(frames)
    if frame_of_program is None:
        return StackPlace(Activity.UNKNOWN, site, innermost)
    if _is_named_like_loader(frame_of_program):
        return StackPlace(Activity.LOADS_DATA, site, innermost, is_guess=True)
    return StackPlace(Activity.RUNS, site, innermost)


def _judge_library_frame(frame: StackFrame) -> Activity | None:
    """Read what a frame of a library says of its thread; None where it says nothing."""
    if NATIVE_WAIT.search(frame.function) or DISTRIBUTED.search(frame.file):
        return Activity.WAITS_FOR_RANKS
    is_synchronization = frame.function == "synchronize" and DEVICE_FILES.search(frame.file)
    if is_synchronization or DEVICE_CALLS.search(frame.function):
        return Activity.WAITS_FOR_DEVICE
    if LOADERS.search(frame.file):
        return Activity.LOADS_DATA
    if CHECKPOINTS.search(frame.file):
        return Activity.SAVES
    if COMPILERS.search(frame.file):
        return Activity.COMPILES
    if BACKWARD.search(frame.file):
        return Activity.BACKWARD
    return None


def _is_named_like_loader(frame: StackFrame) -> bool:
    stem = PurePosixPath(frame.file).stem
    return bool(LOADER_FILES.search(stem) or LOADER_FUNCTIONS.search(frame.function))
