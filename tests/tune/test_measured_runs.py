"""What a run's folder says of a variant, and how variants are run."""

import sys
from pathlib import Path

import msgspec
import pytest
from support.paths import REPO
from support.training_maker import ordinary_steps
from support.training_maker import run as write_run
from support.tuned_commands import flag

from megatron_lite.analysis.findings.base import Finding
from megatron_lite.analysis.findings.rules import RULES
from megatron_lite.analysis.report import Gains, OrderedChange
from megatron_lite.analysis.run.read import read_run
from megatron_lite.cli.main import main
from megatron_lite.cli.tune import read_tuned_command
from megatron_lite.cli.tuned_runs import VariantRunner
from megatron_lite.formats.tune_ledger import MeasuredRun
from megatron_lite.tune.knobs import NO_KNOBS, read_knobs
from megatron_lite.tune.read_measured import convert_finding, order_for_trials, read_measured, read_step_times

SCRIPTS = REPO / "benchmarks" / "tune_scripts"
RECORDED = MeasuredRun(purpose="record", number=0, wall_s=0.0)
TIMED = MeasuredRun(purpose="trial", number=1, wall_s=0.0)


def test_stalls_are_spread_over_the_steps(tmp_path):
    def save(at):
        return 20.0 if at % 4 == 0 else 0.0

    steps = ordinary_steps(21, phase_save=save, ms=lambda at: 10.0 + save(at))
    times_ms = read_step_times(read_run(write_run(tmp_path, steps)))
    # behind the first step and before the last one, 4 of 19 steps save
    assert len(times_ms) == 19 and times_ms == pytest.approx(10 + 20 * 4 / 19)


def test_what_is_measured_is_read(tmp_path):
    steps = ordinary_steps(12, core_wait_ms=0.5, loss=lambda at: None if at == 3 else 2.0)
    found = read_measured(write_run(tmp_path, steps), TIMED, 3.0)
    assert found.step_ms == (10.0,) * 10 and found.core_wait_ms == 0.5 and found.failure == "" and found.wall_s == 3.0
    assert found.losses == (2.0, 2.0, 2.0, None, *[2.0] * 8)


@pytest.mark.parametrize("number", [0, 8])
def test_a_run_of_few_steps_is_no_measurement(tmp_path, number):
    found = read_measured(write_run(tmp_path, ordinary_steps(number)), TIMED, 3.0)
    assert found.step_ms == () and "--steps" in found.failure


def test_a_folder_without_a_run_is_a_failure(tmp_path):
    assert str(tmp_path / "none") in read_measured(tmp_path / "none", TIMED, 3.0).failure


@pytest.mark.parametrize("interval", [100, 1000])
def test_what_is_logged_rarely_is_not_to_be_logged_more_rarely(tmp_path, interval):
    steps = ordinary_steps(phase_log=2.0)
    folder = write_run(tmp_path, steps, device="cpu", log_params_norm=True, log_interval=interval)
    from megatron_lite.analysis.analyze import analyze

    [found] = [convert_finding(one) for one in analyze([folder]).findings if one.code == "log-stalls"]
    assert all(setting.name != "--log-interval" for remedy in found.remedies for setting in remedy)
    assert (flag("--log-params-norm", None),) in found.remedies


def test_a_finding_keeps_what_it_sets(tmp_path):
    folder = write_run(tmp_path, ordinary_steps(phase_log=2.0), device="cpu", log_params_norm=True, log_interval=1)
    from megatron_lite.analysis.analyze import analyze

    [found] = [convert_finding(one) for one in analyze([folder]).findings if one.code == "log-stalls"]
    assert found.remedies == ((flag("--log-interval", "100"),), (flag("--log-params-norm", None),))
    assert found.cost_ms == pytest.approx(2.0) and found.gain_ms == pytest.approx(2.0)


def test_changes_are_tried_in_the_order_of_the_report():
    """Bounds stand before the first change that saves less; what saves nothing on top of the others is last."""
    gains = {"first": 8.0, "second": 3.0, "covered": 7.0, "bound": 5.0, "small": 1.0, "unknown": None}
    bounds = ("bound", "small", "unknown")
    findings = [Finding(code=code, gain_ms=ms, gain_is_bound=code in bounds) for code, ms in gains.items()]
    order = [OrderedChange(code, code, gains[code], gains[code], 1.0) for code in ("first", "second")]
    report = Gains(step_ms=12.0, order=tuple(order), confidence="high", doubts=())
    codes = [found.code for found in order_for_trials(findings, report)]
    assert codes == ["first", "bound", "second", "small", "unknown", "covered"]
    codes = [found.code for found in order_for_trials(findings, None)]
    assert codes == ["bound", "small", "unknown", "first", "second", "covered"]


@pytest.mark.parametrize(
    "words",
    [
        "--rounds 0 -- python train.py",
        "--steps 5 -- python train.py",
        "--trials -1 -- python train.py",
        "--time 0 -- python train.py",
        "--loss-tolerance nan -- python train.py",
        "--ledger /dev/null/ledger -- python train.py",
        "--knobs /no/such/file -- python train.py",
        "--rounds 1",
    ],
)
def test_a_wrong_option_is_one_line(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["tune", *words.split(" ")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_variants_of_a_script_run(tmp_path):
    """A script that ends by itself, one that is ended, and one that fails."""
    knobs, _ = read_knobs(str(SCRIPTS / "loop.yaml"), frozenset(RULES))
    words = [sys.executable, str(SCRIPTS / "loop.py"), "--read-ms", "40", "--layers", "2"]
    command = read_tuned_command(words, knobs)
    recorded = VariantRunner(command, ("--steps", "22"), 22, tmp_path).run(RECORDED)
    assert "starved-loader" in {finding.code for finding in recorded.findings}
    runner = VariantRunner(command, (), 22, tmp_path)
    timed = runner.run(msgspec.structs.replace(TIMED, settings=(flag("--workers", "1"),)))
    assert timed.findings == () and len(timed.step_ms) >= 15
    assert timed.losses[:15] == recorded.losses[:15] and None not in recorded.losses
    failed = runner.run(msgspec.structs.replace(TIMED, settings=(flag("--workers", "many"),)))
    assert "--workers" in failed.failure and "exit code 2" in failed.failure
    assert list(tmp_path.iterdir()) == []


def test_runs_of_scripts_are_in_no_list_of_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    script = tmp_path / "train.py"
    script.write_text("import os\nraise SystemExit(os.environ['WANDB_MODE'] + os.environ['MLFLOW_TRACKING_URI'])\n")
    runs = tmp_path / "runs"
    found = VariantRunner(read_tuned_command([sys.executable, str(script)], NO_KNOBS), (), 20, runs).run(TIMED)
    assert "disabled" in found.failure and runs.as_uri() in found.failure


@pytest.mark.slow
def test_a_run_of_the_trainer_leaves_the_users_folders_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    flags = (
        "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 "
        "--vocab-size 64 --tokenizer-type NullTokenizer --mock-data --lr 1e-4 --train-iters 1000 "
        f"--micro-batch-size 1 --global-batch-size 1 --save {tmp_path / 'saved'} --save-interval 5"
    )
    command = read_tuned_command([sys.executable, str(REPO / "pretrain_gpt.py"), *flags.split()], NO_KNOBS)
    found = VariantRunner(command, (), 20, tmp_path / "runs").run(RECORDED)
    assert found.failure == "" and len(found.losses) == 20 and len(found.step_ms) >= 8
    assert not Path(tmp_path / "saved").exists() and list((tmp_path / "runs").iterdir()) == []
