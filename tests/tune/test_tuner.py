"""Tuning keeps what is faster at equal losses, goes on where it was interrupted, and never ends slower than it began."""

import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from support.tuned_commands import LOSSES, MadeRuns, finding, flag, script, trainer, variable
from support.waiting import wait_until
from support.wording import wording

from megatron_lite.cli import tuned_runs
from megatron_lite.cli.tune import ending_runs, read_tuned_command
from megatron_lite.errors import UserError
from megatron_lite.formats.tune_ledger import MeasuredRun, TrialResult, TuneOutcome, TuneRequest, TuneTrial, decode_line
from megatron_lite.report.text import Style
from megatron_lite.report.tune_terminal import describe_progress, tune_lines
from megatron_lite.tune.command_files import stamp_files
from megatron_lite.tune.knobs import NO_KNOBS, DeclaredKnob, LossEffect, list_variables
from megatron_lite.tune.ledger import Ledger
from megatron_lite.tune.tuner import Bounds, Tuner
from megatron_lite.tune.variant import TunedCommand

WORKERS = finding("starved-loader", (flag("--num-workers", "2"),))
LOGGING = finding("log-stalls", (flag("--log-interval", "100"),))
MICRO_BATCH = finding("micro-batches", (flag("--micro-batch-size"),))
BOUNDS = Bounds(trials=20, seconds=None, rounds=3, tolerance=1e-3)


def tune(
    path,
    runs: MadeRuns,
    command: TunedCommand | None = None,
    declared=(),
    bounds: Bounds = BOUNDS,
    tell=lambda told: None,
) -> tuple[list[TuneTrial], TuneOutcome]:
    command = command or trainer()
    request = TuneRequest(command=command.words, steps=20, rounds=bounds.rounds, tolerance=bounds.tolerance)
    tuner = Tuner(command, declared, bounds, Ledger(path, request), runs.run, tell)
    return tuner.tune()


def costs(**factors: float):
    """A step of 100 ms, times the factor of each flag that is set."""

    def measure(given):
        cost_ms = 100.0
        for name, factor in factors.items():
            if f"--{name.replace('_', '-')}" in given:
                cost_ms *= factor
        return cost_ms

    return measure


def test_changes_that_help_are_kept_and_the_others_are_written_down(tmp_path):
    runs = MadeRuns([WORKERS, LOGGING, MICRO_BATCH], costs(num_workers=0.5, log_interval=1.0, micro_batch_size=1.3))
    trials, outcome = tune(tmp_path / "ledger", runs)
    assert [trial.result for trial in trials] == [TrialResult.KEPT, TrialResult.WITHIN_NOISE, TrialResult.SLOWER]
    assert [trial.code for trial in trials] == ["starved-loader", "log-stalls", "micro-batches"]
    assert outcome.command == "python pretrain_gpt.py --num-workers 2 --micro-batch-size 1 --log-interval 1"
    assert outcome.original_ms == pytest.approx(100, rel=0.02) and outcome.best_ms == pytest.approx(50, rel=0.02)
    assert trials[2].change == (flag("--micro-batch-size", "2"),)
    assert runs.asked[:4] == ["record 0.1", "trial 1.1", "trial 1.1 --num-workers 2", "trial 1.2"]
    assert runs.asked[-6:] == [f"check 1.{at}{with_it}" for at in (1, 2, 3) for with_it in ("", " --num-workers 2")]


def test_gains_of_several_changes_are_kept_together(tmp_path):
    findings = [WORKERS, finding("too-many-threads", (variable("OMP_NUM_THREADS", "1"),))]
    runs = MadeRuns(findings, lambda given: 100.0 - 20 * len(given))
    trials, outcome = tune(tmp_path / "ledger", runs, trainer(OMP_NUM_THREADS="8"))
    assert [trial.result for trial in trials] == [TrialResult.KEPT] * 2
    assert outcome.command.startswith("OMP_NUM_THREADS=1 python pretrain_gpt.py --num-workers 2")
    assert outcome.best_ms == pytest.approx(60, rel=0.02)


@pytest.mark.parametrize(
    ("losses", "apart", "result"),
    [
        (LossEffect.BIT_EQUAL, 0.0, TrialResult.KEPT),
        (LossEffect.BIT_EQUAL, 1e-7, TrialResult.OTHER_LOSSES),
        (LossEffect.ROUNDING, 1e-4, TrialResult.KEPT),
        (LossEffect.ROUNDING, 1e-2, TrialResult.OTHER_LOSSES),
        (LossEffect.CHANGED, 1.0, TrialResult.KEPT),
        (LossEffect.ROUNDING, None, TrialResult.OTHER_LOSSES),
        (LossEffect.CHANGED, None, TrialResult.KEPT),
    ],
)
def test_a_change_that_trains_something_else_is_rejected(tmp_path, losses, apart, result):
    def make_losses(given):
        if apart is None:
            return (None,) * len(LOSSES)
        return tuple(loss * (1 + apart) for loss in LOSSES) if given else LOSSES

    runs = MadeRuns([WORKERS], costs(workers=0.5), make_losses)
    knob = DeclaredKnob(name="--workers", values=(4,), answers=("starved-loader",), losses=losses)
    [trial], outcome = tune(tmp_path / "ledger", runs, script(), [knob])
    assert trial.result is result and bool(outcome.settings) is (result is TrialResult.KEPT)


def test_losses_that_differ_from_start_to_start_are_no_reason_against_a_change(tmp_path):
    numbers = iter(range(100))
    runs = MadeRuns([WORKERS], costs(num_workers=0.5), lambda given: (3.0 + 1e-6 * (next(numbers) // 2 % 2),) * 20)
    [trial], _ = tune(tmp_path / "ledger", runs)
    assert trial.result is TrialResult.KEPT


def test_batches_that_come_in_pairs_are_not_taken_for_short_steps(tmp_path):
    runs = MadeRuns([WORKERS], costs())
    even = runs.run

    def run_in_pairs(wanted):
        run = even(wanted)
        pairs = tuple(4.0 if at % 2 else 1.98 * ms - 4 for at, ms in enumerate(run.step_ms))
        return msgspec.structs.replace(run, step_ms=pairs) if wanted.settings else run

    runs.run = run_in_pairs
    [trial], outcome = tune(tmp_path / "ledger", runs)
    assert trial.after_ms == pytest.approx(99, rel=0.02) and outcome.settings == ()


@pytest.mark.parametrize("remedy", ["--lr", "--bf16", "--global-batch-size", "--grad-reduce-in-bf16", "TORCH_LOGS"])
def test_what_changes_the_training_is_never_tried(tmp_path, remedy):
    setting = flag(remedy, "1") if remedy.startswith("-") else variable(remedy, "1")
    runs = MadeRuns([finding("learning", (setting,))], lambda given: 50.0 if given else 100.0)
    trials, outcome = tune(tmp_path / "ledger", runs)
    assert trials == [] and outcome.settings == () and runs.asked == ["record 0.1"]


def test_only_variables_are_tried_of_scripts_without_knobs(tmp_path):
    runs = MadeRuns([WORKERS, finding("t", (variable("OMP_NUM_THREADS", "2"),))], costs())
    trials, _ = tune(tmp_path / "ledger", runs, script())
    assert [trial.change for trial in trials] == [(variable("OMP_NUM_THREADS", "2"),)]


def test_declared_values_are_tried_in_their_order(tmp_path):
    knobs = [
        DeclaredKnob(name="--workers", values=(1, 2), answers=("starved-loader",)),
        DeclaredKnob(name="--fast", values=(True,), answers=("log-stalls",)),
        DeclaredKnob(name="x.y", kind="argument", values=("z",), answers=("log-stalls",)),
        DeclaredKnob(name="--never", values=(1,), answers=("gc-pauses",)),
    ]
    runs = MadeRuns([WORKERS, LOGGING], costs(fast=0.8))
    trials, outcome = tune(tmp_path / "ledger", runs, script("--workers", "1"), knobs)
    assert [trial.change for trial in trials][:2] == [(flag("--workers", "2"),), (flag("--fast"),)]
    assert outcome.command == "python train.py --workers 1 --fast" and len(trials) == 3


def test_a_change_that_does_not_run_is_written_down(tmp_path):
    runs = MadeRuns([WORKERS, LOGGING], costs(log_interval=0.5), failing="--num-workers")
    trials, outcome = tune(tmp_path / "ledger", runs)
    assert [trial.result for trial in trials] == [TrialResult.FAILED, TrialResult.KEPT]
    assert "--num-workers" in trials[0].reason and outcome.settings == (flag("--log-interval", "100"),)
    assert runs.asked[1:4] == ["trial 1.1", "trial 1.1 --num-workers 2", "trial 2.1"]


def test_a_command_that_fails_is_refused(tmp_path):
    def fail(wanted):
        return msgspec.structs.replace(wanted, failure="exit code 2: error: --lr")

    runs = MadeRuns([], costs())
    runs.run = fail
    with pytest.raises(UserError, match="--lr"):
        tune(tmp_path / "ledger", runs)


def test_what_is_not_faster_at_the_end_is_not_used(tmp_path):
    runs = MadeRuns([WORKERS], costs(num_workers=0.5))
    faster = runs.run

    def slower_at_the_end(wanted):
        run = faster(wanted)
        return msgspec.structs.replace(run, step_ms=LOSSES) if wanted.purpose == "check" else run

    runs.run = slower_at_the_end
    trials, outcome = tune(tmp_path / "ledger", runs)
    assert [trial.result for trial in trials] == [TrialResult.KEPT]
    assert outcome.settings == () and outcome.command == trainer().write(())
    assert outcome.original_ms == outcome.best_ms


@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    factors=some.dictionaries(
        some.sampled_from(["num_workers", "log_interval", "micro_batch_size"]), some.floats(0.3, 2.0)
    ),
    worse=some.floats(0.5, 2.0),
)
def test_it_never_ends_slower_than_it_began(tmp_path_factory, factors, worse):
    """Also where two changes that help alone are slower together."""
    alone = costs(**factors)

    def cost_ms(given):
        return alone(given) * (worse if len(given) > 1 else 1)

    runs = MadeRuns([WORKERS, LOGGING, MICRO_BATCH], cost_ms)
    bounds = Bounds(trials=20, seconds=None, rounds=2, tolerance=1e-3)
    _, outcome = tune(tmp_path_factory.mktemp("tune") / "ledger", runs, bounds=bounds)
    assert cost_ms({setting.name: setting.value for setting in outcome.settings}) <= 100


@pytest.mark.parametrize(
    ("bounds", "tried"),
    [
        (Bounds(0, None, 3, 0.0), 0),
        (Bounds(1, None, 3, 0.0), 1),
        (Bounds(20, 100.0, 2, 0.0), 1),
        (Bounds(20, 20.0, 2, 0.0), 0),
    ],
)
def test_bounds_hold(tmp_path, bounds, tried):
    runs = MadeRuns([LOGGING, WORKERS], costs(num_workers=0.5))
    trials, outcome = tune(tmp_path / "ledger", runs, bounds=bounds)
    assert len(trials) == tried and outcome.reason.startswith("--")
    assert outcome.wall_s <= (bounds.seconds or 1000)


@pytest.mark.parametrize("stop_after", [0, 1, 2, 5, 9, 12])
def test_an_interrupted_tuning_goes_on(tmp_path, stop_after):
    def make(stop: int | None = None) -> MadeRuns:
        return MadeRuns([WORKERS, LOGGING], costs(num_workers=0.5), stop_after=stop)

    whole = make()
    expected = tune(tmp_path / "whole", whole)
    with pytest.raises(KeyboardInterrupt):
        tune(tmp_path / "ledger", make(stop_after))
    with (tmp_path / "ledger").open("ab") as file:
        # a line that a kill cut off
        file.write(b'{"kind":"run","purpose":"tri')
    rest = make()
    assert tune(tmp_path / "ledger", rest) == expected
    assert rest.asked == whole.asked[stop_after:]
    assert (tmp_path / "ledger").read_bytes() == (tmp_path / "whole").read_bytes()
    again = make()
    assert tune(tmp_path / "ledger", again) == expected and again.asked == []


def test_further_trials_go_on_from_the_ledger(tmp_path):
    runs = MadeRuns([LOGGING, WORKERS], costs(num_workers=0.5))
    tune(tmp_path / "ledger", runs, bounds=Bounds(1, None, 3, 1e-3))
    before = len(runs.asked)
    trials, outcome = tune(tmp_path / "ledger", runs)
    assert [trial.result for trial in trials] == [TrialResult.WITHIN_NOISE, TrialResult.KEPT] and outcome.settings
    assert runs.asked[before] == "trial 2.1"


def test_a_ledger_of_another_command_is_refused(tmp_path):
    path = tmp_path / "ledger"
    tune(path, MadeRuns([], costs()))
    with pytest.raises(UserError) as caught:
        tune(path, MadeRuns([], costs()), script())
    assert caught.value.lines == [wording("tune/another-command", path)]
    with pytest.raises(UserError) as caught:
        tune(path, MadeRuns([], costs()), bounds=Bounds(20, None, 2, 1e-3))
    assert "--rounds 3" in str(caught.value)
    path.write_bytes(b"{}\n")
    with pytest.raises(UserError):
        tune(path, MadeRuns([], costs()))


def test_the_ledger_is_read_by_its_types(tmp_path):
    trials, outcome = tune(tmp_path / "ledger", MadeRuns([WORKERS], costs(num_workers=0.5)))
    lines = [decode_line(line) for line in (tmp_path / "ledger").read_bytes().splitlines()]
    assert isinstance(lines[0], TuneRequest) and lines[-1] == outcome
    assert [line for line in lines if isinstance(line, TuneTrial)] == trials


def test_the_table_has_everything_that_was_tried(tmp_path):
    runs = MadeRuns([WORKERS, LOGGING], costs(num_workers=0.5), failing="--log-interval")
    trials, outcome = tune(tmp_path / "ledger", runs)
    lines = tune_lines(trials, outcome, Style())
    text = "\n".join(lines)
    assert lines[-1] == outcome.command and "--log-interval 100" in text and "starved-loader" in text
    assert lines[0].startswith("50%") and trials[1].reason in text
    unchanged = TuneOutcome(command="x", reason="nothing", wall_s=1.0)
    assert tune_lines([], unchanged, Style())[0] == wording("tune/stays", "nothing")


def test_progress_has_the_figures_of_short_steps(tmp_path):
    told = []
    runs = MadeRuns([LOGGING, WORKERS], lambda given: 0.08 if given else 0.1, failing="--num-workers")
    trials, _ = tune(tmp_path / "ledger", runs, tell=told.append)
    assert told == trials
    assert " -> 0.08" in describe_progress(told[0])
    assert describe_progress(told[1]).endswith(trials[1].reason)
    failed = MeasuredRun(purpose="record", number=1, wall_s=1.0, failure="exit code 2")
    assert failed.failure in describe_progress(failed)


def test_a_ledger_of_a_script_that_changed_is_refused_or_begun_anew(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ("python", "train.py", "--data-path=tokens")
    for name in ("train.py", "tokens.bin", "tokens.idx"):
        Path(name).write_text("before")

    def open_ledger(anew: bool = False) -> Ledger:
        request = TuneRequest(command=words, files=stamp_files(words), steps=20, rounds=3, tolerance=1e-3)
        return Ledger(tmp_path / "ledger", request, anew)

    open_ledger()
    # nothing was run yet: the script may have been mended
    Path("train.py").write_text("mended")
    run = MeasuredRun(purpose="record", number=0, wall_s=1.0)
    open_ledger().add_run(run)
    assert open_ledger().take_run(run) == run
    for name in ("train.py", "tokens.bin"):
        Path(name).write_text("changed since")
        with pytest.raises(UserError, match=rf"{name}.*--restart") as caught:
            open_ledger()
        assert len(caught.value.lines) == 1
        open_ledger(anew=True).add_run(run)
        assert (tmp_path / "ledger.old").read_bytes() != (tmp_path / "ledger").read_bytes()


def test_only_a_ledger_is_begun_anew(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("first\nlast")
    with pytest.raises(UserError):
        Ledger(path, TuneRequest(command=("a",), steps=20, rounds=3, tolerance=1e-3), anew=True)
    assert path.read_text() == "first\nlast"


@pytest.mark.parametrize("content", ["first\nlast", "only", "\n", '{"kind": "request"}'])
def test_a_file_that_is_no_ledger_is_left_as_it_is(tmp_path, content):
    path = tmp_path / "notes.txt"
    path.write_text(content)
    with pytest.raises(UserError, match=r"--ledger .*notes\.txt"):
        Ledger(path, TuneRequest(command=("a",), steps=20, rounds=3, tolerance=1e-3))
    assert path.read_text() == content


def test_a_ledger_of_another_command_keeps_a_line_that_was_cut_off(tmp_path):
    path = tmp_path / "ledger"
    Ledger(path, TuneRequest(command=("a",), steps=20, rounds=3, tolerance=1e-3))
    content = path.read_bytes() + b'{"kind": "run"'
    path.write_bytes(content)
    with pytest.raises(UserError, match="another command"):
        Ledger(path, TuneRequest(command=("b",), steps=20, rounds=3, tolerance=1e-3))
    assert path.read_bytes() == content


def test_a_ledger_whose_first_line_was_cut_off_is_begun_anew(tmp_path):
    path = tmp_path / "ledger"
    request = TuneRequest(command=("a",), steps=20, rounds=3, tolerance=1e-3)
    Ledger(path, request)
    whole = path.read_bytes()
    for length in (1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        Ledger(path, request)
        assert path.read_bytes() == whole


def test_a_command_that_could_not_be_measured_is_run_again(tmp_path):
    """What was wrong may be mended without another command: a missing file, a full disk."""
    broken = MadeRuns([WORKERS], costs())
    broken.run = lambda wanted: msgspec.structs.replace(wanted, failure="no such file")
    with pytest.raises(UserError, match="no such file"):
        tune(tmp_path / "ledger", broken)
    trials, _ = tune(tmp_path / "ledger", MadeRuns([WORKERS], costs(num_workers=0.5)))
    assert [trial.result for trial in trials] == [TrialResult.KEPT]


@pytest.mark.parametrize(
    ("losses", "result"), [("bit-equal", "other losses"), ("rounding", "other losses"), ("changed", "kept")]
)
def test_losses_of_a_script_without_a_seed_say_nothing(tmp_path, losses, result):
    seeds = iter(range(100))
    runs = MadeRuns([WORKERS], costs(workers=0.5), lambda given: (3.0 + 0.1 * (next(seeds) // 2 % 2),) * 20)
    knob = DeclaredKnob(name="--workers", values=(4,), answers=("starved-loader",), losses=LossEffect(losses))
    [trial], _ = tune(tmp_path / "ledger", runs, script(), [knob])
    assert trial.result.value == result


SEVERAL_NODES = (
    "torchrun --nnodes=2 --nproc-per-node 2 train.py",
    "python -m torch.distributed.run --nnodes 1:4 train.py",
)


@pytest.mark.parametrize("words", SEVERAL_NODES)
def test_one_of_several_nodes_is_refused_before_it_waits_for_the_others(words):
    with pytest.raises(UserError, match="nodes"):
        read_tuned_command(words.split(), NO_KNOBS)


@pytest.mark.parametrize(
    "words", ["torchrun --nnodes 1 train.py", "srun -N 2 torchrun --nnodes 2 train.py", "train.sh"]
)
def test_what_starts_all_its_nodes_is_tuned(words):
    assert read_tuned_command(words.split(), NO_KNOBS).words == tuple(words.split())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_run_ends_with_tune_and_with_its_terminal(number):
    # under nohup the tests themselves ignore SIGHUP
    of_tests = signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(KeyboardInterrupt), ending_runs():
            signal.raise_signal(number)
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, of_tests)


def test_nohup_stays_in_force():
    kept = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ending_runs():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, kept)


def test_a_ledger_of_other_variables_is_refused(tmp_path):
    """Its runs are those of a command with another number of threads."""
    request = TuneRequest(command=("a",), steps=20, rounds=3, tolerance=1e-3, variables={"OMP_NUM_THREADS": "8"})
    Ledger(tmp_path / "ledger", request)
    Ledger(tmp_path / "ledger", request)
    with pytest.raises(UserError, match="OMP_NUM_THREADS"):
        Ledger(tmp_path / "ledger", msgspec.structs.replace(request, variables={}))
    assert {"OMP_NUM_THREADS", "THREADS"} <= {
        *list_variables([DeclaredKnob(name="THREADS", kind="variable", values=(1,), answers=())])
    }


def test_a_run_that_hangs_takes_no_more_than_the_time_that_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(tuned_runs, "LEAST_LIMIT_S", 0.3)
    command = read_tuned_command(["sleep", "60"], NO_KNOBS)
    runner = tuned_runs.VariantRunner(command, (), 20, tmp_path, seconds=0.1)
    run = runner.run(MeasuredRun(purpose="record", number=0, wall_s=0.0))
    assert "0 s" in run.failure and run.wall_s < 30


KILLED_TUNE = """
import sys
from pathlib import Path
from megatron_lite.cli.tune import read_tuned_command
from megatron_lite.cli.tuned_runs import VariantRunner
from megatron_lite.formats.tune_ledger import MeasuredRun
from megatron_lite.tune.command_files import stamp_files
from megatron_lite.tune.knobs import NO_KNOBS
folder = Path(sys.argv[1])
command = read_tuned_command(["sh", "-c", f"echo $$ > {folder}/pid.new; mv {folder}/pid.new {folder}/pid; exec sleep 60"], NO_KNOBS)
VariantRunner(command, (), 20, folder).run(MeasuredRun(purpose="record", number=0, wall_s=0.0))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's rule is Linux'")
def test_a_run_does_not_outlive_a_killed_tune(tmp_path):
    tuning = subprocess.Popen([sys.executable, "-c", KILLED_TUNE, str(tmp_path)])
    wait_until(lambda: (tmp_path / "pid").is_file())
    tuning.kill()
    tuning.wait()
    stat = Path("/proc", (tmp_path / "pid").read_text().strip(), "stat")
    wait_until(lambda: not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z")
