"""What Nsight Systems is shown of a run: the window, its steps and phases, whatever becomes of the run."""

import contextlib
import importlib
import re
import sys
import threading
import time
import types

import pytest
import torch
import torch.distributed as dist
from support.launch import DROPOUT, Interrupts, flags, losses, plan_of, quietly
from support.waiting import LIMIT_S
from support.wording import wording

from megatron_lite.config.world import World, read_world
from megatron_lite.instruments import nsys_range
from megatron_lite.instruments.base import Instruments, Window
from megatron_lite.instruments.build_instruments import build_instruments
from megatron_lite.instruments.nsys_range import CAPTURE, NsysRange, PackageNvtx, TorchNvtx, choose_nvtx
from megatron_lite.instruments.timeline import Timeline
from megatron_lite.phases import NOT_TRAINING, Phase

pytestmark = pytest.mark.usefixtures("process_group")

PHASES = {phase.value for phase in Phase if phase not in (*NOT_TRAINING, Phase.PIPELINE_WAIT)}
WINDOW = "--profile --profile-step-start 3 --profile-step-end 5"
UNDER_NSYS, GPU = World(under_nsys=True), World(gpus=1, under_nsys=True)


class Notes:
    """An NVTX that writes down what it is told, and knows which ranges are open."""

    def __init__(self):
        self.said, self.stack = [], []

    def push(self, text):
        self.stack.append(text)
        self.said.append("/".join(self.stack))

    def pop(self):
        self.said.append(f"end of {self.stack.pop()}")

    def mark(self, text):
        self.said.append(f"mark {text}")

    def step_names(self) -> list[str]:
        return re.findall(r"^profile/(step \d+)$", "\n".join(self.said), re.MULTILINE)


@pytest.fixture
def notes(monkeypatch) -> Notes:
    notes = Notes()
    monkeypatch.setattr(nsys_range, "choose_nvtx", lambda on_gpu: notes)
    return notes


def build(words: str, world: World, folder, tell=print) -> NsysRange:
    """What the plan asks for."""
    members = build_instruments(plan_of(flags("--global-batch-size 12", words), world), folder, Timeline(), tell)
    return next(member for member in members if isinstance(member, NsysRange))


def profiled(argv, run_dir, *watchers) -> list[str]:
    """Train on the CPU as if under nsys, with the instrument that the plan asks for; returns what it said."""
    said, plan = [], plan_of(argv, UNDER_NSYS)
    window = Window(plan.profile_window if plan.args.profile.profile else range(0))
    quietly(argv, run_dir, [NsysRange(window, plan.args.profile, plan.world, said.append), *watchers])
    return said


def run_steps(nsys: NsysRange, last: int) -> list[str]:
    """Without a training; returns what is said of failures."""
    words = []
    with Instruments([nsys], words.append) as watching:
        for step in range(1, last + 1):
            with watching.step(step), watching.phase(Phase.FORWARD):
                pass
    return words


# --- the window


def test_the_window_holds_its_steps_and_their_phases_and_changes_nothing(notes, tmp_path):
    argv = flags("--train-iters 7", *DROPOUT)
    said = profiled([*argv, *WINDOW.split()], tmp_path / "on")
    assert notes.step_names() == ["step 3", "step 4"] and notes.stack == []
    assert notes.said[:2] == [CAPTURE, wording("instruments/mark-rank-of-window", 0, 1, 3, 4)]
    assert notes.said[-1] == f"end of {CAPTURE}"
    for step in ("step 3", "step 4"):
        assert {said.split("/")[2] for said in notes.said if said.startswith(f"profile/{step}/")} == PHASES
    assert said == [wording("examples/marked-for-nsight-systems", 3, 4, 0)]
    quietly(argv, tmp_path / "off")
    assert losses(tmp_path / "on") == losses(tmp_path / "off")


def test_runs_that_resume_or_end_or_fail_inside_the_window_leave_no_range_open(notes, tmp_path):
    said, window, profile = [], Window(range(3, 5)), plan_of(flags(WINDOW)).args.profile
    window.started_at = 4
    run_steps(NsysRange(window, profile, UNDER_NSYS, said.append), 5)
    assert notes.said[1] == wording("instruments/mark-rank-of-window-steps", 0, 1, 3, 4, 7, 8)
    assert said == [wording("instruments/marked-for-nsight-systems", 3, 4, 7, 8, 0)]
    for last, steps, told in ((3, ["step 3"], ["step 3 of this run, rank 0"]), (2, [], [])):
        notes.said.clear()
        said = profiled(flags(f"--train-iters {last}", WINDOW), tmp_path / f"short{last}")
        assert notes.step_names() == steps and notes.stack == [] and bool(notes.said) == bool(told)
        assert said == [f"marked for Nsight Systems: {line}" for line in told]
    with pytest.raises(KeyboardInterrupt):
        profiled(flags("--train-iters 9", WINDOW), tmp_path / "failed", Interrupts(4))
    assert notes.step_names() == ["step 3", "step 4"]
    assert notes.stack == [] and notes.said[-1] == f"end of {CAPTURE}"


def test_nvtx_ranges_are_for_all_steps(notes, tmp_path):
    profiled(flags("--train-iters 5", WINDOW, "--nvtx-ranges"), tmp_path / "run")
    found = [said for said in notes.said if re.fullmatch(r"(.*/)?step \d+", said)]
    assert found == ["step 1", "step 2", "profile/step 3", "profile/step 4", "step 5"]
    assert "step 1/forward" in notes.said and notes.stack == []
    for words, world in (("--nvtx-ranges", UNDER_NSYS), (f"{WINDOW} --nvtx-ranges", World(1, 2, under_nsys=True))):
        notes.said.clear()  # neither without a window nor on a rank that is not profiled a collection starts
        run_steps(build(words, world, tmp_path), 3)
        assert notes.said[-4:] == [
            "step 3",
            "step 3/forward",
            wording("instruments/end-of-forward"),
            wording("instruments/end-of-step", 3),
        ]
        assert CAPTURE not in notes.said


# --- several ranks on a node: the first to leave its range ends the collection for all


@pytest.mark.parametrize("come", [True, False])
def test_ranks_of_a_node_leave_the_range_together_or_wait_in_vain(notes, monkeypatch, tmp_path, come):
    limit, left = LIMIT_S if come else 0.1, f"left the nsys range after step {10 + come}/"
    monkeypatch.setattr(nsys_range, "SECONDS_FOR_NEIGHBORS", limit)
    window = f"--profile --profile-ranks -1 --profile-step-start {10 + come} --profile-step-end {11 + come}"
    nsys = build(window, World(4, 6, 1, 3, under_nsys=True), tmp_path)
    nsys.open()
    nsys.begin(10 + come)
    store, waited, started = dist.distributed_c10d._get_default_store(), [], time.monotonic()

    def others():
        time.sleep(0.1)
        store.set(f"{left}3", "")
        time.sleep(0.1)
        waited.append(CAPTURE in notes.stack)
        store.set(f"{left}5", "")

    thread = threading.Thread(target=others) if come else threading.Thread()
    thread.start()
    nsys.end(10 + come)
    thread.join()
    assert waited == [True] * come and notes.stack == [] and store.check([f"{left}4"])
    assert time.monotonic() - started >= 0.1


# --- on a GPU, as far as calls go; what they do is seen in tests/gpu


@pytest.fixture
def cuda(notes, monkeypatch) -> list[str]:
    """Calls of CUDA's profiler beside those of NVTX, in their order."""

    @contextlib.contextmanager
    def emit_nvtx(record_shapes):
        notes.said.append(f"operators, shapes {record_shapes}")
        yield
        notes.said.append("no operators")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: notes.said.append("synchronize"))
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: notes.said.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: notes.said.append("stop"))
    monkeypatch.setattr(torch.autograd.profiler, "emit_nvtx", emit_nvtx)
    return notes.said


SECOND_STEP = "--profile --profile-step-start 2 --profile-step-end 3 --record-shapes"


def test_on_a_gpu_everything_lies_between_start_and_stop(cuda, tmp_path):
    run_steps(build(SECOND_STEP, GPU, tmp_path, cuda.append), 3)
    assert cuda == [
        "synchronize",
        "start",
        CAPTURE,
        wording("instruments/mark-rank-of-window-step", 0, 1, 2),
        "operators, shapes True",
        "profile/step 2",
        "profile/step 2/forward",
        wording("instruments/end-of-forward"),
        wording("instruments/end-of-step", 2),
        "no operators",
        "synchronize",
        f"end of {CAPTURE}",
        "stop",
        wording("instruments/marked-for-nsight-systems-step", 2, 0),
    ]


@pytest.mark.parametrize("fails", ["start", "emit_nvtx", "stop"])
def test_a_profiler_that_fails_is_said_and_training_goes_on(cuda, notes, monkeypatch, tmp_path, fails):
    def out_of_order(**options):
        raise RuntimeError("profiler is out of order")

    owner = torch.autograd.profiler if fails == "emit_nvtx" else torch.cuda.profiler
    monkeypatch.setattr(owner, fails, out_of_order)
    [word] = run_steps(build(SECOND_STEP, GPU, tmp_path), 3)
    assert word.endswith(wording("instruments/failed-and-was-switched"))
    assert notes.stack == [] and ("stop" in cuda) == (fails == "emit_nvtx")  # what had been started is not left on


@pytest.mark.parametrize(
    ("world", "told"),
    [
        (World(gpus=1), "rank 0; this run is not under nsys, which would have recorded them"),
        (UNDER_NSYS, "note: --record-shapes: torch names operators for Nsight Systems on GPUs only"),
    ],
)
def test_what_is_left_out_is_said(cuda, tmp_path, world, told):
    said = []
    run_steps(build(SECOND_STEP, world, tmp_path, said.append), 3)
    assert told in said[0] and f"end of {CAPTURE}" in cuda and ("operators, shapes True" in cuda) == bool(world.gpus)


# --- the package


def test_a_missing_package_is_said(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "nvtx", None)
    words = run_steps(build(WINDOW, UNDER_NSYS, tmp_path), 1)
    if hasattr(torch._C, "_nvtx"):
        assert isinstance(choose_nvtx(on_gpu=False), TorchNvtx)
    else:
        [line] = words
        start = "NsysRange.open failed and was switched off; training goes on: the package nvtx is missing"
        assert line.startswith(start) and line.endswith(wording("instruments/pip-install-nvtx"))


def test_a_package_that_takes_an_older_nsys_for_none_is_woken(monkeypatch):
    """As nvtx >= 0.2.12 does under nsys 2022 and 2023; a version that finds its tool is used as it is."""
    pushed = []

    class Domain:
        def __new__(cls, name=None):
            return DummyDomain()

        def __init__(self, name=None):
            self.name = name

        def get_event_attributes(self, message):
            return (self.handle, message)

        def push_range(self, attributes):
            pushed.append(attributes)

        mark = push_range

        def pop_range(self):
            pushed.append("pop")

    class DummyDomain:
        pass

    package, inner = types.ModuleType("nvtx"), types.ModuleType("nvtx._lib.lib")
    inner.DomainHandle = lambda name: f"handle of {name}"
    package.Domain, package.get_domain = Domain, lambda name: Domain(name)
    package.push_range, package.mark, package.pop_range = pushed.append, pushed.append, lambda: pushed.append("pop")
    for name, module in (("nvtx", package), ("nvtx._lib", types.ModuleType("nvtx._lib")), ("nvtx._lib.lib", inner)):
        monkeypatch.setitem(sys.modules, name, module)
    for expected in ([("handle of None", "a"), ("handle of None", "b"), "pop"], ["a", "b", "pop"]):
        push_mark_and_pop()
        assert pushed == expected
        pushed.clear()
        package.get_domain = lambda name: object()


def push_mark_and_pop():
    nvtx = PackageNvtx()
    nvtx.push("a")
    nvtx.mark("b")
    nvtx.pop()


def test_the_real_package_can_do_what_we_ask():
    pytest.importorskip("nvtx")
    importlib.import_module("nvtx")
    push_mark_and_pop()


# --- who is under nsys

TOOL = "/opt/nvidia/nsight-systems/2025.1/target-linux-x64/libToolsInjection64.so"


@pytest.mark.parametrize(
    ("environment", "under"),
    [
        ({}, False),
        ({"NSYS_PROFILING_SESSION_ID": "12"}, True),
        ({"CUDA_INJECTION64_PATH": TOOL}, True),
        ({"NVTX_INJECTION64_PATH": TOOL}, True),
        ({"LD_PRELOAD": "/usr/lib/x/libToolsInjectionProxy64.so:/lib/other.so"}, True),
        ({"LD_PRELOAD": "/lib/libjemalloc.so", "CUDA_INJECTION64_PATH": "/opt/other/libtool.so"}, False),
        ({"PATH": "/opt/nvidia/nsight-systems/bin"}, False),
    ],
)
def test_nsys_is_known_by_what_it_puts_into_the_environment(environment, under):
    assert read_world(0, 1, environment).under_nsys == under
