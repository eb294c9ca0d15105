"""The window's counts, what averages leave out, and windows that are asked for while a run goes on."""

import json
import os
import re
import resource
import signal
import time
from pathlib import Path
from statistics import median

import pytest
from launch import alone, flags, losses, on_ranks, plan_of, quietly, steps, train
from snapshots import steps_in_snapshot
from traces import events, steps_in, steps_of, trace_files

from megatron_lite.config.world import World
from megatron_lite.errors import UserError
from megatron_lite.instruments import on_demand
from megatron_lite.instruments.base import Instrument, Instruments, Window
from megatron_lite.instruments.build_instruments import Disturbance, build_instruments
from megatron_lite.instruments.nsys_range import NsysRange
from megatron_lite.instruments.on_demand import OnDemand
from megatron_lite.instruments.timeline import Timeline
from megatron_lite.instruments.torch_profiler import TorchProfiler
from megatron_lite.phases import StepTime
from megatron_lite.run_folder import write_atomically
from megatron_lite.train.steps_file import StepsFile

ALL = "megatron_lite.instruments.on_demand."


@pytest.fixture(scope="module", autouse=True)
def group():
    with alone():
        yield


# --- counts


def test_a_window_is_half_open_and_counted_from_1():
    window = Window(range(10, 12))
    assert [step for step in range(30) if step in window] == [10, 11] and len(window) == 2
    assert [step for step in range(30) if window.opens(step)] == [10]
    assert [step for step in range(30) if window.closes(step)] == [11]
    assert [step for step in range(30) if window.disturbs(step)] == [10, 11]
    window.margin = 1
    assert [step for step in range(30) if window.disturbs(step)] == [9, 10, 11, 12]
    assert window.words() == "steps 10-11 of this run" and window.words(10) == "step 10 of this run"
    window.started_at = 100
    assert window.words() == "steps 10-11 of this run = iterations 110-111"
    assert window.words(10) == "step 10 of this run = iteration 110"


def test_an_empty_window_does_nothing():
    window = Window(range(0))
    assert not window and len(window) == 0
    assert not any(
        question(step)
        for step in range(-2, 3)
        for question in (window.opens, window.closes, window.disturbs, window.__contains__)
    )


# --- averages


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
    argv = flags(
        "--train-iters 12 --log-interval 4 --log-timers-to-tensorboard --log-throughput --tensorboard-dir",
        tmp_path / "tb",
        "--profile --use-pytorch-profiler --profile-step-start 6 --profile-step-end 8",
    )
    _, out = quietly(argv, tmp_path, [Slow(6, 7)])
    assert re.findall(r"time and throughput .*", out) == ["time and throughput leave out 2 profiled steps"]
    records = steps(tmp_path)
    assert [record["step"] for record in records if record.get("profiled")] == [6, 7]
    assert not any("beside_profile" in record for record in records)  # one rank on a CPU
    inside, others = (
        [record["ms"] for record in records if record.get("profiled", False) == way] for way in (True, False)
    )
    assert min(inside) > 500
    assert len(elapsed(out)) == 4 and max(elapsed(out)) < 1.5 * max(others)  # the profiled steps' 500 ms are in none
    ratio = float(re.search(r"profiled steps took ([\d.]+) x", out)[1])
    assert ratio == pytest.approx(median(inside) / median(others[1:5]), abs=0.02)
    assert scalar(tmp_path / "tb", "iteration-time") == [*range(1, 6), *range(8, 13)]
    assert scalar(tmp_path / "tb", "lm loss") == [*range(1, 13)]


def scalar(folder: Path, name: str) -> list[int]:
    """Iterations for which TensorBoard has it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    read.Reload()
    return [event.step for event in read.Scalars(name)]


def test_an_interval_of_profiled_steps_only_is_not_passed_off_as_others(tmp_path):
    _, out = quietly(
        flags(
            "--train-iters 5 --log-interval 1 --profile --use-pytorch-profiler",
            "--profile-step-start 3 --profile-step-end 4",
        ),
        tmp_path,
        [Slow(3)],
    )
    *_, slow, fourth, fifth = elapsed(out)
    assert slow > 400 and max(fourth, fifth) < 1.5 * max(
        record["ms"] for record in steps(tmp_path) if record["step"] != 3
    )
    assert out.count("time and throughput are of 1 profiled step: there was no other since the last line") == 1


@pytest.mark.parametrize(
    ("first", "rank", "said"),
    [
        (
            1,
            None,
            "profiled steps cannot be compared with those before: 3 after the run's first are needed, 0 could be timed.",
        ),
        (
            3,
            1,
            "profiled steps cannot be compared with those before: 3 after the run's first are needed, 1 could be timed.",
        ),
        (5, None, "profiled steps took 2.00 x as long as those before: median 200.0 ms of 2 against 100.0 ms of 3"),
        (
            5,
            1,
            "profiled steps on rank 1 took 2.00 x as long as those before: median 200.0 ms of 2 against 100.0 ms of 3",
        ),
    ],
)
def test_a_ratio_takes_three_steps_before_and_names_its_rank(first, rank, said):
    timeline, words = Timeline(), []
    watcher = Disturbance(Window(range(first, first + 2)), timeline, lambda: 99, words.append, rank=rank)
    for step in range(1, first + 3):
        watcher.begin(step)
        timeline.current = StepTime(step, 0.2 if step in watcher.window else 0.1)
        watcher.end(step)
    assert words == [said]


@pytest.mark.parametrize(
    ("after", "cupti", "said"),
    [
        (0.110, {"cupti_planned": True}, True),
        (0.104, {"cupti_planned": True}, False),
        (0.110, {}, False),
        (0.110, {"cupti_on_demand": True}, False),  # it could have been used, and was not
    ],
)
def test_a_profiler_that_slows_later_steps_down_is_said_once(after, cupti, said):
    timeline, words = Timeline(), []
    watcher = Disturbance(Window(range(10, 12)), timeline, lambda: 99, words.append, **cupti)
    for step in range(1, 60):
        watcher.begin(step)
        timeline.current = StepTime(step, 0.1 if step < 10 else 0.2 if step < 12 else after)
        watcher.end(step)
    line = (
        "steps after the profile take 1.10 x as long as those before it: CUPTI may have stayed attached, which "
        "TEARDOWN_CUPTI=1 in the environment prevents."
    )
    assert words[1:] == [line] * said and words[0].startswith("profiled steps took 2.00 x")


# --- on demand


class Asks(Instrument):
    """Somebody who writes into the request's file before certain steps."""

    def __init__(self, folder: Path, **requests: str):
        self.requests = {int(step.removeprefix("at")): (folder, text) for step, text in requests.items()}

    def begin(self, step):
        if step in self.requests:
            folder, text = self.requests[step]
            (folder / "profile.now").write_text(text)


@pytest.fixture
def eager(monkeypatch):
    """Watchers that look before every step, so that tests may be short."""
    monkeypatch.setattr(ALL + "SECONDS_BETWEEN_LOOKS", 0.0)


def captures(folder: Path, rank: int = 0) -> list[list[int]]:
    return [steps_in(events(path)) for path in trace_files(folder, rank)]


def test_a_live_run_is_profiled_on_demand(tmp_path, eager):
    asks = Asks(tmp_path, at2="", at9="3\n")
    _, out = quietly(flags("--train-iters 20 --log-interval 10"), tmp_path, [asks])
    assert captures(tmp_path) == [[5, 6], [12, 13, 14]]  # seen one step later, begun two steps after that
    assert f"{tmp_path}/profile.now taken: profiling steps 5-6 of this run." in out
    assert "profiled steps 12-14 of this run, rank 0" in out and out.count("profiled steps took") == 2
    assert [record["step"] for record in steps(tmp_path) if record.get("profiled")] == [5, 6, 12, 13, 14]
    assert not (tmp_path / "profile.now").exists() and not (tmp_path / "profile.next").exists()
    quietly(flags("--train-iters 20"), tmp_path / "plain")
    assert losses(tmp_path) == losses(tmp_path / "plain")


@pytest.mark.parametrize(
    ("requests", "said", "left"),
    [
        (
            {"at2": "many"},
            "profile.now: holds no number of steps from 1 to 1000, so nothing is profiled; make it an empty",
            False,
        ),
        ({"at2": "0"}, "profile.now: holds no number of steps", False),
        ({"at7": ""}, "profile.now: the run ends before step 10, so nothing is profiled.", False),
        ({"at8": ""}, "profile.now came too late for this run and stays", True),
    ],
)
def test_a_request_that_cannot_be_met_is_answered(tmp_path, eager, requests, said, left):
    _, out = quietly(flags("--train-iters 8"), tmp_path, [Asks(tmp_path, **requests)])
    assert out.count(said) == 1 and captures(tmp_path) == [], out
    assert (tmp_path / "profile.now").exists() == left


def put_pipe(path: Path):
    os.mkfifo(path)


def put_endless(path: Path):
    path.symlink_to("/dev/zero")


def put_secret(path: Path):
    (path.parent / "secret").write_text("swordfish")
    path.symlink_to(path.parent / "secret")


def put_huge(path: Path):
    path.touch()
    os.truncate(path, 2**40)


HOSTILE = [put_pipe, put_endless, put_secret, put_huge, os.mkdir, lambda path: path.symlink_to("nowhere")]


@pytest.fixture
def watcher_of(tmp_path, eager):
    """A rank's watcher of requests, and what it says."""

    def make(world: World) -> tuple[OnDemand, list[str]]:
        said = []
        members = build_instruments(plan_of(flags("--train-iters 99"), world), tmp_path, Timeline(), said.append)
        [watcher] = [member for member in members if isinstance(member, OnDemand)]
        return watcher, said

    # what blocks, or eats memory, is to end here
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, limits[1]))
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it waits"))
    signal.alarm(100)
    yield make
    signal.alarm(0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.parametrize("put", HOSTILE)
def test_a_request_that_is_a_trap_is_refused_once(tmp_path, watcher_of, put):
    watcher, said = watcher_of(World())
    put(tmp_path / "profile.now")
    for step in (3, 4, 5):
        watcher.begin(step)
    watcher.close(None)
    [line] = said
    wrong = r"holds no number of steps from 1 to 1000|cannot be read \((Not a regular file|Is a directory)\)"
    assert re.fullmatch(
        rf"\S+/profile.now: ({wrong}), so nothing is profiled; make it an empty file for 2 steps, or .*", line
    )
    assert "swordfish" not in line and not watcher.window.on_demand
    assert os.path.lexists(tmp_path / "profile.now") == (put is os.mkdir)
    if put is os.mkdir:
        (tmp_path / "profile.now").rmdir()
        watcher.begin(6)
    (tmp_path / "profile.now").touch()
    watcher.begin(7)
    assert len(said) == 2 and "taken: profiling" in said[1]


@pytest.mark.parametrize("put", HOSTILE)
def test_an_answer_that_is_a_trap_is_not_heeded(tmp_path, watcher_of, put):
    """Ranks that follow read it; the leading one replaces it."""
    watcher, said = watcher_of(World(rank=1, size=2, local_rank=1, local_size=2))
    put(tmp_path / "profile.next")
    watcher.begin(3)
    assert said == [] and not watcher.window.on_demand


@pytest.mark.parametrize("put", HOSTILE[:3])
def test_a_trap_beside_a_file_that_is_replaced_is_removed(tmp_path, watcher_of, put):
    put(tmp_path / ".profile.next.partial")
    write_atomically(tmp_path / "profile.next", "7 9")
    assert (tmp_path / "profile.next").read_text() == "7 9" and "7" not in "".join(
        path.read_text() for path in tmp_path.glob("secret")
    )


@pytest.mark.parametrize("put", [*HOSTILE[:3], os.mkdir])
def test_a_steps_file_that_is_a_trap_ends_the_run_in_one_line(tmp_path, watcher_of, put):
    put(tmp_path / "steps.jsonl")
    with pytest.raises(
        UserError, match=r"^\S+/steps.jsonl: cannot be written \((Not a regular file|Is a directory)\); move it away"
    ):
        StepsFile(tmp_path)


GPU, UNDER_NSYS, BOTH = World(gpus=1), World(under_nsys=True), World(gpus=1, under_nsys=True)


@pytest.mark.parametrize(
    ("words", "world", "watchers"),
    [
        ("", World(), [OnDemand, Disturbance, TorchProfiler, Timeline]),
        ("", BOTH, [OnDemand, Disturbance, Timeline]),  # nothing could record, which is what OnDemand says when asked
        ("", UNDER_NSYS, [OnDemand, Disturbance, TorchProfiler, Timeline]),
        ("--profile", BOTH, [OnDemand, Disturbance, NsysRange, Timeline]),
        (
            "--profile",
            UNDER_NSYS,
            [OnDemand, Disturbance, NsysRange, TorchProfiler, Timeline],
        ),  # the last on demand only
        ("", World(rank=1, size=2, local_rank=1, local_size=2, gpus=2, under_nsys=True), [Timeline]),
        ("--profile", GPU, [OnDemand, Disturbance, NsysRange, TorchProfiler, Timeline]),  # the last one on demand only
        ("--profile --use-pytorch-profiler --no-profile-on-demand", GPU, [Disturbance, TorchProfiler, Timeline]),
        ("--no-profile-on-demand", World(), [Timeline]),
        ("", World(rank=1, size=3, local_rank=1, local_size=3), [Timeline]),
        ("", World(rank=2, size=3, local_rank=2, local_size=3), [OnDemand, Timeline]),  # it logs
    ],
)
def test_who_watches(tmp_path, words, world, watchers):
    made = build_instruments(plan_of(flags("--global-batch-size 6", words), world), tmp_path, Timeline(), print)
    of_windows = (OnDemand, Disturbance, NsysRange, TorchProfiler, Timeline)
    assert [type(member) for member in made if isinstance(member, of_windows)] == watchers


def test_on_demand_under_nsys_on_a_gpu_is_refused_or_of_memory_only(tmp_path, eager):
    """Made for a GPU's plan, asked on the CPU: which line is said does not depend on what records."""
    refused = (
        "profile.now: nsys holds the GPU's counters in this run and collects the planned window only, so nothing is "
        "profiled; start the run without nsys to profile on demand."
    )
    taken = "taken: nsys holds the GPU's counters, so only memory is recorded in steps 5-6 of this run."
    record = f"--record-memory-history --memory-snapshot-path {tmp_path}/s.pickle"
    for words, line in (("", refused), (record, taken)):
        said = []
        made = build_instruments(
            plan_of(flags("--profile --profile-step-start 20 --profile-step-end 22 --train-iters 99", words), BOTH),
            tmp_path,
            Timeline(),
            said.append,
        )
        [watcher] = [member for member in made if isinstance(member, OnDemand)]
        (tmp_path / "profile.now").touch()
        watcher.begin(3)
        assert len(said) == 1 and said[0].endswith(line) and not (tmp_path / "profile.now").exists()


def test_on_demand_under_nsys_on_a_cpu_is_recorded_by_torch(tmp_path, eager, monkeypatch):
    """And nsys, which collects one window, is left to the planned one, though that comes later."""
    pushed = []
    monkeypatch.setattr("megatron_lite.instruments.nsys_range.nvtx_for", lambda device: Nvtx(pushed))
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


class Nvtx:
    def __init__(self, pushed: list[str]):
        self.push, self.pop, self.mark = pushed.append, lambda: None, lambda text: None


def test_memory_on_demand_leaves_the_planned_file_its_name(tmp_path, eager):
    argv = flags(
        "--train-iters 12 --record-memory-history --profile-step-start 8 --profile-step-end 10 --memory-snapshot-path",
        tmp_path / "s.pickle",
    )
    _, out = quietly(argv, tmp_path / "run", [Asks(tmp_path / "run", at2="1")])
    assert {path.name: steps_in_snapshot(path) for path in tmp_path.glob("*.pickle")} == {
        "s.pickle": [8, 9],
        "s_steps5-5.pickle": [5],
    }
    assert captures(tmp_path / "run") == [[5]]  # and a trace, which nobody planned
    assert out.count("memory snapshot: ") == 2
    quietly(flags("--train-iters 12"), tmp_path / "plain")
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")


def test_nobody_looks_when_told_not_to(tmp_path, eager):
    _, out = quietly(flags("--train-iters 9 --no-profile-on-demand"), tmp_path, [Asks(tmp_path, at2="")])
    assert captures(tmp_path) == [] and (tmp_path / "profile.now").exists() and "profile.now" not in out


def test_a_request_leaves_the_planned_window_where_it_was(tmp_path, eager):
    argv = flags("--train-iters 18 --profile --use-pytorch-profiler --profile-step-start 11 --profile-step-end 13")
    _, out = quietly(argv, tmp_path / "before", [Asks(tmp_path / "before", at2="3")])
    assert captures(tmp_path / "before") == [[5, 6, 7], [11, 12]] and "never reached" not in out
    _, out = quietly(argv, tmp_path / "after", [Asks(tmp_path / "after", at14="1")])
    assert captures(tmp_path / "after") == [[11, 12], [17]]
    _, out = quietly(argv, tmp_path / "same", [Asks(tmp_path / "same", at8="")])
    assert captures(tmp_path / "same") == [[11, 12]]
    assert out.count("profile.now: steps 11-12 are about to be profiled anyway; ask again after them.") == 1


def train_all_and_on_request(world, words):
    """The request comes before step 3; `profile.next` is what ranks agree by."""
    *planned, live = json.loads(words)
    for number, argv in enumerate(planned):
        train(argv, Path(f"run{number}"), world)
    on_demand.SECONDS_BETWEEN_LOOKS = 0.0
    Path("live").mkdir(exist_ok=True)
    train(live, Path("live"), world, [Asks(Path("live"), at3="2")] if world.is_first else [])


def test_each_profiled_rank_has_its_own_trace_of_the_same_steps(tmp_path):
    argvs = [
        flags(
            "--train-iters 5 --profile --use-pytorch-profiler --profile-step-start 3 --profile-step-end 5",
            f"--profile-ranks {ranks}",
        )
        for ranks in ("-1", "1", "0")
    ]
    argvs.append(flags("--train-iters 14 --profile-ranks -1 --log-interval 7"))
    on_ranks("test_instruments_window:train_all_and_on_request", tmp_path, json.dumps(argvs))
    assert steps_of(tmp_path / "run0", 0) == steps_of(tmp_path / "run0", 1) == [3, 4]
    for run, rank in (("run1", 1), ("run2", 0)):
        assert len(list((tmp_path / run).glob("*.trace.json"))) == 1 and steps_of(tmp_path / run, rank) == [3, 4]
    [first], [second] = captures(tmp_path / "live", 0), captures(tmp_path / "live", 1)
    assert len(first) == 2 and first == second
    records = steps(tmp_path / "live")  # of the last rank
    assert [record["step"] for record in records if record.get("profiled")] == first
    assert [record["step"] for record in records if record.get("beside_profile")] == [first[0] - 1, first[1] + 1]


def test_a_rank_that_sees_a_request_late_joins_late(tmp_path, eager):
    words = []
    window = Window()
    follower = OnDemand(window, tmp_path, 2, leads=False, alone=False, last_step=lambda: 99, tell=words.append)
    follower.begin(4)
    (tmp_path / "profile.next").write_text("7 10")
    follower.begin(8)
    assert (window.first, window.last, window.on_demand) == (8, 9, True)
    follower.begin(10)
    follower.begin(11)  # the answer still lies there, but is over
    assert not window and words == []


@pytest.mark.slow
@pytest.mark.timed
def test_looking_costs_little(tmp_path, eager):
    watcher = OnDemand(Window(), tmp_path, 2, leads=True, alone=True, last_step=lambda: 1 << 30, tell=print)
    times = []
    for attempt in range(5):
        started = time.process_time()
        for step in range(10_000):
            watcher.begin(step)
            watcher.end(step)
        times.append((time.process_time() - started) / 10_000)
    assert min(times) < 5e-6
    print(f"{1e6 * min(times):.2f} us per step")
