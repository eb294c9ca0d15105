"""What a stack tells: the line of the program, and what its thread is about."""

import pytest

from megatron_lite.postmortem.call_sites import Activity, find_main_thread, find_place, is_of_program
from megatron_lite.postmortem.evidence import ProcessStacks, StackFrame, ThreadStack

LIB = "/usr/lib/python3.11/"
SITE = f"{LIB}site-packages/"
STEP = StackFrame("step", "/home/u/train.py", 88)


@pytest.mark.parametrize(
    ("file", "is_program"),
    [
        ("/home/u/train.py", True),
        ("train.py", True),
        ("models/gpt.py", True),
        ("/opt/Megatron-LM/megatron/training/training.py", True),
        (f"{SITE}torch/nn/modules/module.py", False),
        ("torch/nn/modules/module.py", False),
        ("re/__init__.py", False),
        ("threading.py", False),
        (f"{LIB}queue.py", False),
        ("<frozen importlib._bootstrap>", False),
        ("/usr/lib/x86_64-linux-gnu/libc.so.6", False),
        (f"{SITE}megatron_lite/train/step.py", True),
        ("/code/megatron_lite/watch/profiler.py", False),
    ],
)
def test_files_of_the_program_are_told_from_libraries(file, is_program):
    assert is_of_program(StackFrame("f", file, 1)) is is_program


@pytest.mark.parametrize(
    ("frames", "activity"),
    [
        ([("wait", "threading.py"), ("all_reduce", f"{SITE}torch/distributed/distributed_c10d.py")], "WAITS_FOR_RANKS"),
        ([("synchronize", f"{SITE}torch/cuda/__init__.py")], "WAITS_FOR_DEVICE"),
        ([("select", "selectors.py"), ("_try_get_data", "torch/utils/data/dataloader.py")], "LOADS_DATA"),
        ([("_engine_run_backward", "torch/autograd/graph.py")], "BACKWARD"),
        ([("_save", "torch/serialization.py")], "SAVES"),
        ([("match", "re/__init__.py")], "RUNS"),
        ([], "RUNS"),
    ],
)
def test_the_innermost_frame_that_speaks_decides(frames, activity):
    place = find_place([*(StackFrame(name, file, 3) for name, file in frames), STEP])
    assert (place.activity, place.call_site) == (Activity[activity], "train.py:88 in step")


def test_a_sample_that_is_read_belongs_to_the_loader():
    sample = StackFrame("__getitem__", "/home/u/samples.py", 9)
    fetch = StackFrame("fetch", f"{SITE}torch/utils/data/_utils/fetch.py", 54)
    place = find_place([sample, fetch, STEP])
    assert (place.activity, place.call_site) == (Activity.LOADS_DATA, "samples.py:9 in __getitem__")


def test_the_main_thread_is_no_thread_that_python_started():
    started = ThreadStack(
        "0x1", (StackFrame("feed", "/home/u/feed.py", 3), StackFrame("_bootstrap", "threading.py", 9))
    )
    main = ThreadStack("0x2", (STEP, StackFrame("<module>", "/home/u/train.py", 100)))
    assert find_main_thread(ProcessStacks("stacks.txt", (started, main))) is main
    assert find_main_thread(ProcessStacks("stacks.txt", ())) is None
