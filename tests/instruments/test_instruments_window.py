"""The window's counts, what averages leave out, and windows that are asked for while a run goes on."""

import json
import os
import re
import resource
import signal
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import pytest
from support.launch import flags, losses, on_ranks, plan_of, quietly, steps, train, write_no_tables
from support.snapshots import steps_in_snapshot
from support.traces import events, steps_in, steps_of, trace_files
from support.wording import wording
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_lite.config.world import World
from megatron_lite.errors import UserError
from megatron_lite.instruments import on_demand
from megatron_lite.instruments.base import Instrument, Instruments, Window
from megatron_lite.instruments.build_instruments import Disturbance, build_instruments
from megatron_lite.instruments.nsys_range import NsysRange
from megatron_lite.instruments.on_demand import OnDemand
from megatron_lite.instruments.step_time import StepTime
from megatron_lite.instruments.timeline import Timeline
from megatron_lite.instruments.torch_profiler import TorchProfiler
from megatron_lite.run_folder import write_atomically
from megatron_lite.train.log import StepsFile
from megatron_lite.train.routing import RoutingRow

pytestmark = pytest.mark.usefixtures("process_group", "without_tables")

GPU, UNDER_NSYS, BOTH = World(gpus=1), World(under_nsys=True), World(gpus=1, under_nsys=True)
TORCH = "--profile --use-pytorch-profiler"
SECOND = World(rank=1, size=2, local_rank=1, local_size=2)


def test_a_window_is_half_open_and_counted_from_1():
    window, nothing = Window(range(10, 12)), Window()
    for ask, inside in (("opens", [10]), ("closes", [11]), ("disturbs", [10, 11])):
        assert [step for step in range(-2, 30) if getattr(window, ask)(step)] == inside
        assert not any(getattr(nothing, ask)(step) for step in range(-2, 3))
    window.margin = 1
    assert [step for step in range(30) if window.disturbs(step)] == [9, 10, 11, 12]
    assert window.words() == wording("instruments/steps-of-this-run", 10, 11) and window.words(10) == wording(
        "instruments/step-of-this-run-2", 10
    )
    window.started_at = 100
    assert window.words() == wording("instruments/steps-of-this-run-iterations", 10, 11, 110, 111)
    assert window.words(10) == wording("instruments/step-of-this-run-iteration", 10, 110)


class Slow(Instrument):
    """Makes some steps of the training long. Stands inside of the timeline."""

    def __init__(self, *steps: int):
        self.steps = steps

    def begin(self, step):
        if step in self.steps:
            time.sleep(0.5)


def elapsed(out: str) -> list[float]:
    return [float(ms) for ms in re.findall(r"elapsed time per iteration \(ms\): ([\d.]+)", out)]


def test_averages_leave_profiled_steps_out_and_say_so(tmp_path):
    board = f"--log-timers-to-tensorboard --log-throughput --tensorboard-dir {tmp_path}/tb"
    window = "--profile --use-pytorch-profiler --profile-step-start 6 --profile-step-end 8"
    _, out = quietly(flags("--train-iters 12 --log-interval 4", board, window), tmp_path, [Slow(6, 7)])
    assert re.findall(r"time and throughput .*", out) == [wording("instruments/time-and-throughput-leave", 2)]
    records = steps(tmp_path)
    assert [record["step"] for record in records if record.get("profiled")] == [6, 7]
    assert not any("beside_profile" in record for record in records)  # one rank on a CPU
    inside, others = ([r["ms"] for r in records if r.get("profiled", False) == way] for way in (True, False))
    assert min(inside) > 500
    assert len(elapsed(out)) == 4 and max(elapsed(out)) < 1.5 * max(others)  # the profiled steps' 500 ms are in none
    ratio = float(re.search(r"profiled steps took ([\d.]+) x", out)[1])
    assert ratio == pytest.approx(median(inside) / median(others[1:5]), abs=0.02)
    read = EventAccumulator(str(tmp_path / "tb"), size_guidance={"scalars": 0})
    read.Reload()
    for name, there in (("iteration-time", [*range(1, 6), *range(8, 13)]), ("lm loss", [*range(1, 13)])):
        assert [event.step for event in read.Scalars(name)] == there
    window = "--profile --use-pytorch-profiler --profile-step-start 3 --profile-step-end 4"
    _, out = quietly(flags("--train-iters 5 --log-interval 1", window), tmp_path / "only", [Slow(3)])
    *_, slow, fourth, fifth = elapsed(out)
    usual = max(record["ms"] for record in steps(tmp_path / "only") if record["step"] != 3)
    assert slow > 400 and max(fourth, fifth) < 1.5 * usual
    assert out.count(wording("instruments/time-and-throughput-are", 1)) == 1


FEW = "profiled steps cannot be compared with those before: 3 after the run's first are needed, {} could be timed."
TWICE = "profiled steps{} took 2.00 x as long as those before: median 200.0 ms of 2 against 100.0 ms of {}"
LINGERS = (
    "steps after the profile take 1.10 x as long as those before it: CUPTI may have stayed attached, which "
    "TEARDOWN_CUPTI=1 in the environment prevents."
)


@pytest.mark.parametrize(
    ("first", "words", "world", "after", "said"),
    [
        (1, "", World(), 0.1, [FEW.format(0)]),
        (3, "", SECOND, 0.1, [FEW.format(1)]),
        (5, "", World(), 0.1, [TWICE.format("", 3)]),
        (5, "", SECOND, 0.1, [TWICE.format(" on rank 1", 3)]),
        (10, TORCH, GPU, 0.110, [TWICE.format("", 8), LINGERS]),
        (10, TORCH, GPU, 0.104, [TWICE.format("", 8)]),
        (10, TORCH, World(), 0.110, [TWICE.format("", 8)]),
        (10, "", GPU, 0.110, [TWICE.format("", 8)]),  # CUPTI could have been used on demand, and was not
    ],
)
def test_profiled_steps_are_compared_with_three_before_and_with_those_after(first, words, world, after, said):
    timeline, told, profile = Timeline(), [], plan_of(flags(words), world).args.profile
    timeline.window = Window(range(first, first + 2), train_iters=99)
    watcher = Disturbance(timeline, profile, world, told.append)
    for step in range(1, 60):
        watcher.begin(step)
        timeline.current = StepTime(step, 0.1 if step < first else 0.2 if step < first + 2 else after)
        watcher.end(step)
    assert told == said


class Asks(Instrument):
    """Somebody who writes into the request's file before certain steps."""

    def __init__(self, folder: Path, **requests: str):
        self.folder, self.requests = folder, {int(step.removeprefix("at")): text for step, text in requests.items()}

    def begin(self, step):
        if step in self.requests:
            (self.folder / "profile.now").write_text(self.requests[step])


@pytest.fixture
def eager(monkeypatch):
    """Watchers that look before every step, so that tests may be short."""
    monkeypatch.setattr(on_demand, "SECONDS_BETWEEN_REQUEST_LOOKS", 0.0)


def captures(folder: Path, rank: int = 0) -> list[list[int]]:
    return [steps_in(events(path)) for path in trace_files(folder, rank)]


def test_a_live_run_is_profiled_on_demand(tmp_path, eager):
    asks = Asks(tmp_path, at2="", at9="3\n")
    _, out = quietly(flags("--train-iters 20 --log-interval 10"), tmp_path, [asks])
    assert captures(tmp_path) == [[5, 6], [12, 13, 14]]  # seen one step later, begun two steps after that
    assert wording("instruments/profile-now-taken-profiling", tmp_path, 5, 6) in out
    assert (
        wording("instruments/profiled-steps-of-this-run-rank", 12, 14, 0) in out
        and out.count(wording("instruments/profiled-steps-took")) == 2
    )
    assert [record["step"] for record in steps(tmp_path) if record.get("profiled")] == [5, 6, 12, 13, 14]
    assert not (tmp_path / "profile.now").exists() and not (tmp_path / "profile.next").exists()
    quietly(flags("--train-iters 20"), tmp_path / "plain")
    assert losses(tmp_path) == losses(tmp_path / "plain")


@pytest.mark.parametrize(
    ("requests", "words", "said", "left"),
    [
        ({"at2": "many"}, "", "holds no number of steps from 1 to 1000, so nothing is profiled; make it an", False),
        ({"at2": "0"}, "", "holds no number of steps", False),
        ({"at7": ""}, "", "the run ends before step 10, so nothing is profiled.", False),
        ({"at8": ""}, "", "came too late for this run and stays", True),
        ({"at2": ""}, "--no-profile-on-demand", "", True),
    ],
)
def test_a_request_that_cannot_be_met_is_answered(tmp_path, eager, requests, words, said, left):
    _, out = quietly(flags("--train-iters 8", words), tmp_path, [Asks(tmp_path, **requests)])
    assert len(re.findall(f"profile.now:? {said}", out)) == bool(said) and captures(tmp_path) == [], out
    assert (tmp_path / "profile.now").exists() == left


def put_secret(path: Path):
    (path.parent / "secret").write_text("swordfish")
    path.symlink_to(path.parent / "secret")


def put_huge(path: Path):
    path.touch()
    os.truncate(path, 2**40)


HOSTILE = {
    "pipe": os.mkfifo,
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "secret": put_secret,
    "huge": put_huge,
    "folder": os.mkdir,
    "dangling": lambda path: path.symlink_to("nowhere"),
}


@pytest.fixture
def watcher_of(tmp_path, eager):
    """A rank's watcher of requests, and what it says."""

    def make(world: World, *words: str) -> tuple[OnDemand, list[str]]:
        said = []
        plan = plan_of(flags("--train-iters 99", *words), world)
        members = build_instruments(plan, tmp_path, Timeline(), said.append)
        [watcher] = [member for member in members if isinstance(member, OnDemand)]
        return watcher, said

    # what blocks, or eats memory, is to end here
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, limits[1]))
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it waits"))
    signal.alarm(100)
    yield make
    signal.alarm(0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_request_that_is_a_trap_is_refused_once(tmp_path, watcher_of, kind):
    watcher, said = watcher_of(World())
    request, is_folder = tmp_path / "profile.now", kind == "folder"
    HOSTILE[kind](request)
    for step in (3, 4, 5):
        watcher.begin(step)
    watcher.close(None)
    wrong = r"holds no number of steps from 1 to 1000|cannot be read \((Not a regular file|Is a directory)\)"
    line = rf"\S+/profile.now: ({wrong}), so nothing is profiled; make it an empty file for 2 steps, or .*"
    assert len(said) == 1 and re.fullmatch(line, said[0])
    assert "swordfish" not in said[0] and not watcher.window.on_demand
    assert os.path.lexists(request) == is_folder
    if is_folder:
        request.rmdir()
        watcher.begin(6)
    request.touch()
    watcher.begin(7)
    assert len(said) == 2 and "taken: profiling" in said[1]


@pytest.mark.parametrize("kind", HOSTILE)
def test_other_traps_in_a_run_folder_do_no_harm(tmp_path, watcher_of, kind):
    """An answer, which ranks that follow read and the leading one replaces; the file beside one that is replaced; steps.jsonl."""
    watcher, said = watcher_of(SECOND)
    HOSTILE[kind](tmp_path / "profile.next")
    watcher.begin(3)
    assert said == [] and not watcher.window.on_demand
    if kind in ("pipe", "endless", "secret"):
        HOSTILE[kind](tmp_path / ".beside.partial")
        write_atomically(tmp_path / "beside", "7 9")
        assert (tmp_path / "beside").read_text() == "7 9"
        assert all(path.read_text() == "swordfish" for path in tmp_path.glob("secret"))
    if kind not in ("huge", "dangling"):
        HOSTILE[kind](tmp_path / "steps.jsonl")
        told = r"^\S+/steps.jsonl: cannot be written \((Not a regular file|Is a directory)\); move it away"
        with pytest.raises(UserError, match=told):
            StepsFile(tmp_path, RoutingRow(plan_of(flags())))


OF_WINDOWS = {"asks": OnDemand, "tells": Disturbance, "nsys": NsysRange, "torch": TorchProfiler, "time": Timeline}


@pytest.mark.parametrize(
    ("words", "world", "watchers"),
    [
        ("", World(), "asks tells torch time"),
        ("", BOTH, "asks tells time"),  # nothing could record, which is what OnDemand says when asked
        ("", UNDER_NSYS, "asks tells torch time"),
        ("--profile", BOTH, "asks tells nsys time"),
        ("--profile", UNDER_NSYS, "asks tells nsys torch time"),  # the last but one on demand only
        ("", World(rank=1, size=2, local_rank=1, local_size=2, gpus=2, under_nsys=True), "time"),
        ("--profile", GPU, "asks tells nsys torch time"),  # other tools wait for cudaProfilerStart too
        ("--profile", World(), "asks tells torch time"),  # no tool sees a CPU run that is not under nsys
        ("--nvtx-ranges", GPU, "asks tells nsys torch time"),
        ("--profile --profile-ranks 1", World(0, 2, 0, 2, gpus=2), "time"),
        ("--profile --profile-ranks 1", World(1, 2, 1, 2, gpus=2), "asks tells nsys torch time"),
        ("--profile --use-pytorch-profiler --no-profile-on-demand", GPU, "tells torch time"),
        ("--no-profile-on-demand", World(), "time"),
        ("", World(rank=1, size=3, local_rank=1, local_size=3), "time"),
        ("", World(rank=2, size=3, local_rank=2, local_size=3), "asks time"),  # it logs
    ],
)
def test_who_watches(tmp_path, words, world, watchers):
    made = build_instruments(plan_of(flags("--global-batch-size 6", words), world), tmp_path, Timeline(), print)
    kinds = [type(member) for member in made if isinstance(member, tuple(OF_WINDOWS.values()))]
    assert kinds == [OF_WINDOWS[name] for name in watchers.split()]


def test_on_demand_under_nsys_on_a_gpu_is_refused_or_of_memory_only(tmp_path, watcher_of):
    """Made for a GPU's plan, asked on the CPU: which line is said does not depend on what records."""
    refused = (
        "profile.now: nsys holds the GPU's counters in this run and collects the planned window only, so nothing is "
        "profiled; start the run without nsys to profile on demand."
    )
    taken = "taken: nsys holds the GPU's counters, so only memory is recorded in steps 5-6 of this run."
    record = f"--record-memory-history --memory-snapshot-path {tmp_path}/s.pickle"
    for words, line in (("", refused), (record, taken)):
        watcher, said = watcher_of(BOTH, "--profile --profile-step-start 20 --profile-step-end 22", words)
        (tmp_path / "profile.now").touch()
        watcher.begin(3)
        assert len(said) == 1 and said[0].endswith(line) and not (tmp_path / "profile.now").exists()


def test_on_demand_under_nsys_on_a_cpu_is_recorded_by_torch(tmp_path, eager, monkeypatch):
    """And nsys, which collects one window, is left to the planned one, though that comes later."""

    pushed = []
    nvtx = SimpleNamespace(push=pushed.append, pop=lambda: None, mark=lambda text: None)
    monkeypatch.setattr("megatron_lite.instruments.nsys_range.choose_nvtx", lambda on_gpu: nvtx)
    argv = flags("--train-iters 14 --profile --profile-step-start 11 --profile-step-end 13")
    said = []
    members = build_instruments(plan_of(argv, UNDER_NSYS), tmp_path, Timeline(), said.append)
    with Instruments([Asks(tmp_path, at2="2"), *members], said.append) as watching:
        for step in range(1, 15):
            with watching.step(step), watching.phase("forward"):
                pass
    assert captures(tmp_path) == [[4, 5]]
    assert [text for text in pushed if text != "forward"] == ["profile", "step 11", "step 12"]
    assert any("taken: profiling steps 4-5" in text for text in said)


def test_memory_on_demand_leaves_the_planned_file_its_name(tmp_path, eager):
    record = f"--record-memory-history --profile-step-start 8 --profile-step-end 10 --memory-snapshot-path {tmp_path}/s.pickle"
    _, out = quietly(flags("--train-iters 12", record), tmp_path / "run", [Asks(tmp_path / "run", at2="1")])
    found = {path.name: steps_in_snapshot(path) for path in tmp_path.glob("*.pickle")}
    assert found == {"s.pickle": [8, 9], "s_steps5-5.pickle": [5]}
    assert captures(tmp_path / "run") == [[5]]  # and a trace, which nobody planned
    assert out.count("memory snapshot: ") == 2
    quietly(flags("--train-iters 12"), tmp_path / "plain")
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")


def test_requests_leave_the_planned_window_where_it_was(tmp_path, eager):
    argv = flags("--train-iters 18 --profile --use-pytorch-profiler --profile-step-start 11 --profile-step-end 13")
    _, out = quietly(argv, tmp_path, [Asks(tmp_path, at2="3", at8="", at14="1")])
    assert "never reached" not in out
    assert out.count(wording("instruments/profile-now-steps-are", 11, 12)) == 1
    assert captures(tmp_path) == [[5, 6, 7], [11, 12], [17]]


def train_all_and_on_request(world, words):
    """The request comes before step 3; `profile.next` is what ranks agree by."""
    write_no_tables()
    *planned, live = json.loads(words)
    for number, argv in enumerate(planned):
        train(argv, Path(f"run{number}"), world)
    on_demand.SECONDS_BETWEEN_REQUEST_LOOKS = 0.0
    Path("live").mkdir(exist_ok=True)
    train(live, Path("live"), world, [Asks(Path("live"), at3="2")] if world.is_first else [])


def test_each_profiled_rank_has_its_own_trace_of_the_same_steps(tmp_path):
    window = "--train-iters 5 --profile --use-pytorch-profiler --profile-step-start 3 --profile-step-end 5"
    argvs = [flags(window, f"--profile-ranks {ranks}") for ranks in ("-1", "1")]
    argvs.append(flags("--train-iters 14 --profile-ranks -1 --log-interval 7"))
    on_ranks(train_all_and_on_request, tmp_path, json.dumps(argvs))
    assert steps_of(tmp_path / "run0", 0) == steps_of(tmp_path / "run0", 1) == [3, 4]
    assert len(list((tmp_path / "run1").glob("*.trace.json"))) == 1 and steps_of(tmp_path / "run1", 1) == [3, 4]
    [first], [second] = captures(tmp_path / "live", 0), captures(tmp_path / "live", 1)
    assert len(first) == 2 and first == second
    records = steps(tmp_path / "live")  # of the last rank
    assert [record["step"] for record in records if record.get("profiled")] == first
    assert [record["step"] for record in records if record.get("beside_profile")] == [first[0] - 1, first[1] + 1]


def test_a_rank_that_sees_a_request_late_joins_late(tmp_path, eager):
    window, words = Window(train_iters=99), []
    follower = OnDemand(window, plan_of(flags(""), SECOND), tmp_path, words.append)
    follower.begin(4)
    (tmp_path / "profile.next").write_text("7 10")
    follower.begin(8)
    assert (window.steps, window.on_demand) == (range(8, 10), True)
    follower.begin(10)
    follower.begin(11)  # the answer still lies there, but is over
    assert not window.steps and words == []
