"""Steps of real runs, replayed in this process, and by the command with processes for its ranks."""

import contextlib
import io
import json
import re
import signal
import sys
from dataclasses import replace
from unittest import mock

import msgspec
import pytest
import torch
from support.launch import flags, plan_of, pretrain, steps
from support.paths import REPO

sys.path.insert(0, str(REPO))

from benchmarks.planted_steps import BaseRun, flip_in_attempt, list_planted, replay_here
from megatron_lite.cli import main
from megatron_lite.cli.rank_processes import EndedRank
from megatron_lite.cli.replay import read_answers
from megatron_lite.cli.replayed_run import find_other_bits, find_other_order, find_start, read_replayed_run
from megatron_lite.data.sample_pieces import find_pieces
from megatron_lite.errors import UserError
from megatron_lite.formats.replay_record import RankRecord
from megatron_lite.formats.replay_report import ReplayCause, ReplayReport
from megatron_lite.replay import rank_process
from megatron_lite.replay.examine_step import is_deterministic
from megatron_lite.replay.module_observer import add_bits


def copy(run, folder, change=lambda lines: lines, settings=lambda run: run):
    """A run's folder with other logged steps and settings; its checkpoints stay where they are."""
    folder.mkdir()
    lines = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
    text = "".join(json.dumps(line) + "\n" for line in change(lines))
    (folder / "steps.jsonl").write_text(text)
    record = settings(json.loads((run / "run.json").read_text()))
    (folder / "run.json").write_text(json.dumps(record))
    return folder


def test_a_replay_gives_the_bits_of_the_run_and_leaves_it_alone(short_run, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in short_run.rglob("*")}
    report = replay_here(copy(short_run, tmp_path / "run"), 7)
    assert {path: path.stat().st_mtime_ns for path in short_run.rglob("*")} == before
    assert (report.cause, report.confidence) == (ReplayCause.NOTHING, "high")
    logged, first, second = report.figures
    assert (logged.loss, logged.grad_norm) == (first.loss, first.grad_norm) == (second.loss, second.grad_norm)
    assert "iteration 4" in report.started_from and report.batch == 4
    # documents of 18 tokens with their end, in sequences of 16
    [document, *_] = report.sequences[0].documents
    assert "documents, tokens" in document.where and re.fullmatch(r"[\d ]+", document.text)


def test_from_an_earlier_checkpoint_and_from_the_start(short_run, tmp_path):
    run = copy(short_run, tmp_path / "run")
    reports = [replay_here(run, 6, "--from", str(at)) for at in (0, 4)]
    assert "checkpoint" not in reports[0].started_from
    losses = [report.figures[1].loss for report in reports]
    assert losses[0] == losses[1] == steps(short_run)[5]["loss"]


def test_a_flipped_bit_in_one_replay(short_run, tmp_path):
    run = copy(short_run, tmp_path / "run")
    with flip_in_attempt(2, 6, "decoder.layers.1.mlp.linear_fc1", bit=13):
        report = replay_here(run, 7)
    assert (report.cause, report.confidence) == (ReplayCause.HARDWARE, "high")
    assert "decoder.layers.1.mlp.linear_fc1" in report.sentence and "iteration 6" in report.sentence
    assert len(report.figures) == 4


def test_a_run_whose_step_went_wrong_only_there(short_run, tmp_path):
    def spoil(lines):
        [step] = [line for line in lines if line.get("iteration") == 8]
        step.update(loss=None, grad_norm=None, skipped=True)
        return lines

    report = replay_here(copy(short_run, tmp_path / "run", spoil), 8)
    assert (report.cause, report.confidence) == (ReplayCause.HARDWARE, "high")


def test_where_no_bits_are_to_be_expected(short_run, tmp_path):
    def other(run):
        run["versions"]["torch"] = "1.0"
        return run

    report = replay_here(copy(short_run, tmp_path / "run", settings=other), 6)
    assert any("1.0" in text for text in report.not_tested)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--step", "0"], "--step 0"),
        (["--step", "6", "--from", "5"], "4, 8, 12"),
        (["--step", "6", "--timeout", "0"], "--timeout 0"),
    ],
)
def test_what_cannot_be_replayed_is_refused(short_run, options, said, capsys):
    assert main.main(["replay", str(short_run), *options]) == 2
    assert said in capsys.readouterr().err


def test_folders_that_are_no_run_of_this_trainer(short_run, tmp_path, capsys):
    assert main.main(["replay", str(tmp_path), "--step", "3"]) == 2
    script = copy(short_run, tmp_path / "run", settings=lambda run: {**run, "plan": None, "command": ["x.py"]})
    assert main.main(["replay", str(script), "--step", "3"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and "run.json" in lines[0] and "run.json" in lines[1]


def test_gpus_that_are_not_here(short_run, tmp_path, capsys):
    def on_gpus(run):
        run["plan"]["device"] = "cuda"
        run["plan"]["world"]["size"] = 1000
        return run

    run = copy(short_run, tmp_path / "run", settings=on_gpus)
    assert main.main(["replay", str(run), "--step", "3"]) == 2
    assert "--force" in capsys.readouterr().err


def load_from(load, save, finetune=False):
    """Settings of a run that goes on from a folder of checkpoints and saves into another."""

    def change(run):
        run["plan"]["args"]["checkpoint"].update(load=str(load), save=str(save), finetune=finetune)
        return run

    return change


@pytest.mark.parametrize(
    ("finetune", "resumed_at", "step", "iteration"),
    [(False, 4, 11, 4), (False, 8, 11, 8), (True, 0, 11, 0)],
)
def test_of_another_runs_checkpoints_only_what_it_went_on_from(
    short_run, tmp_path, finetune, resumed_at, step, iteration
):
    """The folder that is loaded holds checkpoints of iterations 4, 8 and 12."""

    def resume(lines):
        for line in lines:
            if line["kind"] == "step":
                line["step"] = line["iteration"] - resumed_at
        return [line for line in lines if line.get("step", 1) > 0]

    run = copy(short_run, tmp_path / "run", resume, load_from(short_run, tmp_path / "none", finetune))
    start = find_start(read_replayed_run(run, step), step, None, tmp_path)
    assert start.iteration == iteration


def test_flags_of_a_later_start_are_not_those_of_the_step(short_run, tmp_path):
    """A step that was logged as NaN, and a start since then with another limit of gradients: no hardware."""

    def spoil(lines):
        [step] = [line for line in lines if line.get("iteration") == 8]
        step.update(loss=None, grad_norm=None, skipped=True)
        return [*lines, {**step, "iteration": 13, "step": 1}]

    report = replay_here(copy(short_run, tmp_path / "run", spoil), 8)
    assert (report.cause, report.confidence) == (ReplayCause.UNKNOWN, "low")


def test_documents_that_were_mended_since_the_run_are_no_hardware(short_run, tmp_path):
    def moved(run):
        run["started"] = run["ended"] = "2020-01-01T00:00:00+0000"
        return run

    known = read_replayed_run(copy(short_run, tmp_path / "run", settings=moved), 8)
    assert "documents.bin" in find_other_bits(known, 8)
    assert find_other_bits(read_replayed_run(short_run, 8), 8) == ""


@pytest.mark.parametrize(("data", "at", "is_same"), [(4, 8, False), (4, 0, True), (2, 8, True)])
def test_sums_of_many_ranks_have_the_order_of_the_run_only_from_its_start(short_run, tmp_path, data, at, is_same):
    def on_ranks(run):
        run["plan"]["layout"]["data"] = data
        return run

    known = read_replayed_run(copy(short_run, tmp_path / "run", settings=on_ranks), 11)
    start = find_start(known, 11, at, tmp_path)
    assert (find_other_order(known, start) == "") == is_same


def test_answers_of_an_earlier_replay_are_not_read_again(short_run, tmp_path):
    """The ranks fail before they answer, in a folder that holds an answer."""
    run = copy(short_run, tmp_path / "run")
    kept = tmp_path / "kept"
    replay_here(run, 6, "--keep", str(kept))
    assert (kept / "rank0.json").exists()
    with mock.patch.object(rank_process, "main", lambda words: 1), pytest.raises(UserError):
        replay_here(run, 6, "--keep", str(kept))


def test_a_ranks_reason_comes_before_those_that_were_stopped_for_it(tmp_path):
    record = RankRecord(rank=1, ranks=2, failure="its own reason")
    (tmp_path / "rank1.json").write_bytes(msgspec.json.encode(record))
    with pytest.raises(UserError, match="its own reason"):
        read_answers(tmp_path, [EndedRank(-signal.SIGTERM, ""), EndedRank(2, "")])
    with pytest.raises(UserError, match="rank 1 "):
        read_answers(tmp_path / "none", [EndedRank(-signal.SIGTERM, ""), EndedRank(-signal.SIGSEGV, "")])


def test_only_the_trainers_own_operations_on_a_cpu_are_known_to_give_the_same_bits():
    own = plan_of(flags())
    assert is_deterministic(own)
    model = replace(own.args.model, model="model.py:build")
    assert not is_deterministic(replace(own, args=replace(own.args, model=model)))


def test_damaged_lines_of_steps_are_passed_over(short_run, tmp_path):
    run = copy(short_run, tmp_path / "run")
    with open(run / "steps.jsonl", "ab") as file:
        file.write(b'{"kind":"step","iteration":"x"}\n{"kind":"step",\n\xff\n')
    assert replay_here(run, 6).cause is ReplayCause.NOTHING


def test_pieces_of_documents_are_the_sample(short_run):
    from megatron_lite.data.gpt_dataset import GPTDataset
    from megatron_lite.data.indexed import IndexedDataset

    indexed = IndexedDataset(str(short_run.parent / "documents"))
    dataset = GPTDataset(indexed, range(len(indexed)), 300, 16, seed=1)
    for sample in range(300):
        tokens = [
            token
            for piece in find_pieces(dataset, sample)
            for token in indexed.tokens(piece.sequence, piece.offset, piece.tokens).tolist()
        ]
        assert tokens == dataset[sample].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_checksum_sees_any_bit(dtype):
    numbers = torch.randn(40, dtype=dtype)
    bits = numbers.element_size() * 8
    for bit in range(bits):
        changed = numbers.clone()
        view = changed.view({2: torch.int16, 4: torch.int32}[numbers.element_size()])
        view[3] ^= (1 << bit) if bit < bits - 1 else -(1 << bit)
        assert add_bits(changed) != add_bits(numbers)
    assert add_bits(numbers.flip(0)) == add_bits(numbers)


# --- by the command


def command(*words):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = main.main(["replay", *map(str, words)])
    return code, out.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        "",
        "--tensor-model-parallel-size 2 --sequence-parallel",
        "--pipeline-model-parallel-size 2",
        "--context-parallel-size 2",
        "--use-distributed-optimizer --bf16",
        "--use-torch-fsdp2",
        "--num-experts 2 --expert-model-parallel-size 2 --disable-bias-linear --moe-grouped-gemm",
    ],
)
def test_two_ranks_give_the_bits_of_the_run(short_run, tmp_path, layout):
    words = "--train-iters 8 --save-interval 4 --split 100,0,0 --log-interval 1"
    argv = flags(words, layout, "--save", tmp_path / "run", data=short_run.parent / "documents")
    ended = pretrain(argv, ranks=2)
    assert ended.code == 0, ended.err
    code, _ = command(tmp_path / "run", "--step", "7", "--json", tmp_path / "report.json")
    report = msgspec.json.decode((tmp_path / "report.json").read_bytes(), type=ReplayReport)
    assert code == 0 and (report.cause, report.confidence) == (ReplayCause.NOTHING, "high"), report
    assert report.batch == 4 and all(one.loss is not None for one in report.sequences)


@pytest.mark.slow
def test_a_step_that_stopped_the_run(tmp_path):
    run = tmp_path / "run"
    words = "--lr 1e30 --lr-decay-style constant --clip-grad 0 --log-interval 1 --run-dir"
    ended = pretrain(flags(words, run))
    assert ended.code == 16
    [told] = re.findall(r"megatron-lite replay (\S+) --step (\d+)", ended.err)
    assert told == (str(run), "2")
    code, out = command(*told[:1], "--step", told[1])
    assert code == 1 and out.startswith(ReplayCause.RATE.value.upper()), out


@pytest.mark.slow
@pytest.mark.parametrize(
    "pattern", ["document: random ids$", "values of layer 1", "lr 0.05$", "replay 2$", "run itself$"]
)
def test_planted_steps(tmp_path_factory, tmp_path, pattern):
    [(precision, planted), *_] = [one for one in list_planted() if re.search(pattern, one[1].name)]
    folder = tmp_path_factory.getbasetemp() / f"base{'-'.join(precision)}"
    base = BaseRun(folder, precision)
    if not folder.exists():
        base.make()
    step = planted.plant(base, tmp_path / "run")
    with planted.in_replay():
        report = replay_here(tmp_path / "run", step)
    assert report.cause is planted.cause


def test_an_unknown_run_has_one_line(tmp_path):
    with pytest.raises(UserError, match="run.json"):
        replay_here(tmp_path, 3)
