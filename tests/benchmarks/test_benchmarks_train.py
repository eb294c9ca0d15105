"""benchmarks/train.py: that its figures are what was measured, and that its mistakes are said."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from support.paths import REPO
from support.waiting import LIMIT_S

sys.path.insert(0, str(REPO))

from support.wording import wording

from benchmarks.training import summary
from benchmarks.training.contestants import (
    Contestant,
    build_command,
    build_parser,
    choose_contestants,
    choose_work,
    parse_contestants,
)
from benchmarks.training.process import ceiling_tflops, environment_of, watch
from benchmarks.training.summary import (
    Limits,
    Result,
    collect_ratios,
    collect_result,
    compute_ratio,
    summarize_runs,
)
from benchmarks.training.work import write_tokens
from megatron_lite.errors import UserError

TINY = [
    "--layers", "1", "--hidden", "16", "--heads", "2", "--sequence", "16", "--micro-batch", "2", "--steps", "3",
    "--warm-up", "1",
]  # fmt: skip
COUNTING = """
import time
block = bytearray(64 * 2**20)
for step in (1, 2):
    time.sleep(0.3)
    print(f"step {step}/2: loss 1", flush=True)
"""


def read_flags(words: list[str], device: str = "cpu"):
    args = build_parser("").parse_args(words)
    work, _ = choose_work(args, device)
    return work, choose_contestants(args, work, print)


def test_known_answers_of_the_table():
    work, _ = read_flags(TINY)  # 4 sequences of 16 tokens per step
    fast = [
        Result("ours", 1, [9.0, 0.5, 0.5, 0.7], [5.0, 4.0, 3.0, 2.0], 10.0, 100, outside_s=0.6),
        Result("ours", 2, [9.0, 0.1, 0.2, 0.3], [5.0, 4.0, 3.0, 2.2], 12.0, 300),
    ]
    slow = [
        Result("plain", 1, [1.0, 1.0, 1.0, 1.0], [5.0, 4.0, 3.1, 2.1]),
        Result("plain", 2, [1.0, 9.0, 9.0, 9.0], failure="exit code 1"),
    ]
    line = summarize_runs("ours", 1, fast + slow, work, warm_up=1)
    times = [0.5, 0.5, 0.7, 0.1, 0.2, 0.3]
    assert line.tokens_s == pytest.approx(64 / 0.4)
    assert (line.fast_tokens_s, line.slow_tokens_s) == pytest.approx(tuple(64 / np.percentile(times, (10, 90))))
    assert (line.first_step_s, line.peak_bytes, line.step_s) == (11.0, 300, pytest.approx(0.4))
    assert line.unexplained == pytest.approx(1 - (1.7 / 3) / 0.6)
    multiply_adds = 4 * 16 * (12 * 16**2 + 2 * 16 * 16 + 16 * 256)  # linear maps, scores, logits
    assert line.tflops_full == pytest.approx(6 * multiply_adds / 0.4 / 1e12)
    assert summarize_runs("hf", 1, fast, work, 1).tokens_s is None
    ratio = compute_ratio("ours", ["plain"], fast + slow, warm_up=1)
    assert ratio.rounds == (2.0,) and ratio.median == 2.0  # of round 2 only one is known
    other = [Result("other", 1, [1.0, 2.0, 2.0, 2.0]), Result("other", 2, [1.0] * 4)]
    faster = compute_ratio("ours", ["plain", "other"], fast + slow + other, warm_up=1)
    assert faster.rounds == (2.0,)  # plain's was the faster
    losses = summary.loss_table(fast + slow)
    assert losses == {"ours": [5.0, 4.0, 3.0, pytest.approx(2.1)], "plain": [5.0, 4.0, 3.1, 2.1]}
    assert summary.loss_distance(losses) == pytest.approx(0.05 / 2.575)


def test_rates_are_shares_of_a_gpu_or_of_the_whole_processor():
    limits = Limits(peak=100.0, ceiling=80.0)
    assert limits.shares(40.0, ranks=2, device="cuda") == (0.2, 0.25)
    assert limits.shares(40.0, ranks=2, device="cpu")[1] == 0.5  # threads of both ranks share what was measured
    assert Limits().shares(40.0, 1, "cuda") == (None, None)
    work, _ = read_flags(TINY)
    line = summarize_runs("ours", 1, [Result("ours", 1, [1.0] * 4, [3.0] * 4)], work, 1, Limits(ceiling=1e-5))
    assert line.ceiling_full == pytest.approx(line.tflops_full / 1e-5) and line.mfu_full is None
    head, row = summary.describe_speeds([line], threads=2, device="cpu")
    assert "MFU" not in head and row.endswith(f"{line.ceiling_full:.1%}, {line.ceiling_causal:.1%}")
    assert "1,000 ms" in row
    assert "MFU full, causal" in summary.describe_speeds([replace(line, mfu_full=0.5, mfu_causal=0.4)], 2, "cuda")[0]
    assert (
        summary.describe_ceiling([None, None], "cpu") == []
        and "at 10 and 12 GFLOP/s" in summary.describe_ceiling([0.01, 0.012], "cpu")[0]
    )


def test_goals_are_over_the_fastest_nanogpt(tmp_path):
    (tmp_path / "train.py").touch()
    work, found = read_flags(["--nanogpt", str(tmp_path)])
    found = [one for one in found if one.kind != "hf"]  # which is left out where its packages are missing
    assert [one.name for one in found] == ["ours", "ours@2", "nanogpt", "nanogpt-compiled", "nanogpt-malloc"]
    speeds = {"ours": 1.0, "ours@2": 0.8, "nanogpt": 1.2, "nanogpt-compiled": 1.4, "nanogpt-malloc": 1.3}
    results = [Result(name, number, [number * seconds] * 3) for name, seconds in speeds.items() for number in (1, 2)]
    ratios = collect_ratios(found, results, work, warm_up=1)
    judged = [(one.ours, one.goal, pytest.approx(one.median)) for one in ratios if one.goal]
    assert judged == [("ours", 1.35, 1.2), ("ours@2", 1.35, 1.5)]
    said = summary.describe_ratios(ratios)
    assert "1.20 to 1.20" in said[1] and "1.35 missed" in said[1] and sum("reached" in line for line in said) == 1
    for other in (["--vocabulary", "512"], ["--layers", "2"]):
        unknown, _ = read_flags(other)
        ratios = collect_ratios(found, results, unknown, 1)
        assert {one.goal for one in ratios if one.other != "ours"} == {None}
    assert collect_ratios(found[:1], results, work, 1) == [] and summary.describe_ratios([]) == []


@pytest.mark.slow
def test_a_ceiling_is_measured():
    assert 1e-6 < ceiling_tflops(read_flags(TINY)[0], threads=1, seconds=0.1) < 1e4


def test_remarks_say_what_speaks_against_the_figures():
    work, _ = read_flags(TINY)
    results = [
        Result("ours", 1, [1.0] * 4, [3.0] * 4, outside_s=2.0),
        Result("plain", 1, [1.0] * 4, [4.0] * 4, outside_s=1.0),
    ]
    lines = [summarize_runs(name, 1, results, work, 1) for name in ("ours", "plain")]
    apart, outside, busy = summary.describe_doubts(lines, summary.loss_table(results), load_before=1.5, cores=2)
    assert (
        "29% apart" in apart
        and wording("benchmarks/ours-its-steps-add", 50) in outside
        and "not idle (load 1.5 on 2" in busy
    )
    assert summary.describe_doubts(lines[1:], {"ours": [3.0, 3.0], "plain": [3.0, 3.1]}, load_before=0.1, cores=2) == []


def test_a_run_is_watched_from_outside(tmp_path):
    run = watch([sys.executable, "-c", COUNTING], environment_of("cpu", 1), ranks=1, limit_s=LIMIT_S)
    assert run.exit_code == 0 and 0.3 < run.seen[1] < run.seen[2] < run.seconds
    assert run.peak_bytes is None or 64 * 2**20 < run.peak_bytes < 2**30
    one = Contestant("hf", 1, "hf")
    assert collect_result(one, 1, run, tmp_path, steps=2).failure == "wrote 0 of 2 steps"
    rows = [{"seconds": 0.3, "loss": 1.0}] * 2
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    good = collect_result(one, 1, run, tmp_path, steps=2)
    nanogpt = Contestant("nanogpt", 1, "nanogpt")
    run.output = ["step 0: train loss 5.1, val loss 5.2", "iter 0: loss 5.5, time 500.00ms, mfu -100.00%"]
    run.output += ["iter 1: loss 5.25, time 300.00ms, mfu -100.00%"]
    read = collect_result(nanogpt, 1, run, tmp_path, steps=2)
    assert (read.step_s, read.losses, read.failure) == ([0.5, 0.3], [5.5, 5.25], None)
    assert good.step_s == [0.3, 0.3] and good.failure is None and good.outside_s == run.seen[2] - run.seen[1]


@pytest.mark.parametrize(
    "code, limit_s, said",
    [
        ("import sys; print('error: --lr'); print('end'); sys.exit(2)", LIMIT_S, "exit code 2: error: --lr"),
        ("raise ValueError('no tokens')", LIMIT_S, "exit code 1: ValueError: no tokens"),
        ("import time; time.sleep(600)", 0.3, "ended: the time of --minutes was up"),
    ],
)
def test_a_failure_says_why(tmp_path, code, limit_s, said):
    run = watch([sys.executable, "-c", code], environment_of("cpu", 1), 1, limit_s)
    assert collect_result(Contestant("hf", 1, "hf"), 1, run, tmp_path, steps=2).failure == said


def test_token_files_are_ids_and_nothing_else(tmp_path):
    text = tmp_path / "text"
    text.write_text("to be or not to be " * 50)
    assert "950 tokens, bytes" in write_tokens(tmp_path / "bytes", 256, text, None, None)
    assert np.fromfile(tmp_path / "bytes.bin", "<u2").astype(np.uint8).tobytes() == text.read_bytes()
    said = write_tokens(tmp_path / "bpe", 50304, text, None, None)
    assert wording("benchmarks/tokens-pairs-of-bytes", 475, "50,304") in said
    ids = np.fromfile(tmp_path / "bpe.bin", "<u2")
    pairs = np.frombuffer(text.read_bytes(), "<u2")
    assert len(ids) == 475 and ids.max() < 50304 and len(np.unique(ids)) == len(np.unique(pairs))


def test_contestants_get_the_same_task(tmp_path):
    (tmp_path / "train.py").touch()
    kinds = [*TINY, "--nanogpt", str(tmp_path), "--contestants", "hf@2", "ours", "nanogpt-malloc"]
    args = build_parser("").parse_args([*kinds, "--ours", "mine@2: --torch-compile --seed 5"])
    work, _ = choose_work(args, "cpu")
    found = parse_contestants(args.contestants, args.ours)
    assert [one.name for one in found] == ["ours", "mine@2", "hf@2", "nanogpt-malloc"]
    commands = [build_command(one, work, tmp_path / "tokens", tmp_path, tmp_path) for one in found]
    (alone, _), (mine, _), (hugging_face, _), (nanogpt, cwd) = commands
    assert "torch.distributed.run" not in alone and "torch.distributed.run" in mine
    assert mine[-3:] == ["--torch-compile", "--seed", "5"]
    assert hugging_face[hugging_face.index("--accumulation") + 1] == "1"
    assert mine[mine.index("--global-batch-size") + 1] == "4"
    assert nanogpt[1:] == [str(tmp_path / "train.py"), "config.py"] and cwd == tmp_path
    config = (tmp_path / "config.py").read_text().splitlines()
    assert {"gradient_accumulation_steps = 2", "batch_size = 2", "max_iters = 2", "compile = False"} <= set(config)
    assert "autocast" in config[-1]  # bf16 by default: on CPUs train.py would not


MISTAKES = {
    "--vocabulary 100": "--vocabulary 100: must be a multiple of 128",
    "--hidden 10 --heads 3": "--hidden 10: is not divisible by --heads 3",
    "--contestants ours@3": "--accumulation 2: cannot be shared out to 3 ranks",
    "--contestants megatron": "--contestants megatron: no such contestant; there are ours, nanogpt",
    "--contestants ours@x": "--contestants ours@x: @x is no number of ranks",
    "--contestants nanogpt@2": "--contestants nanogpt@2: nanoGPT's train.py has ranks on GPUs only; take nanogpt",
    "--contestants nanogpt": "--contestants nanogpt needs --nanogpt FOLDER: git clone https://github.com/karpathy/nanoGPT",
    "--nanogpt missing": "--nanogpt missing: has no train.py",
    "--contestants": "--contestants: nobody is left to compete",
    "--ours=--torch-compile": "needs a name before the flags",
    "--ours ours:--seed": "two contestants are called ours",
    "--vocab-file v": "--vocab-file and --merge-file belong together",
    "--vocab-file v --merge-file m": "--vocab-file goes with --work bpe",
    "--steps 3 --warm-up 3": "--warm-up 3: must be at least 1 and below --steps 3",
    "--rounds 0": "--rounds 0: must be at least 1",
    "--out no/such/folder/x.json": "--out no/such/folder/x.json: there is no folder no/such/folder",
}


@pytest.mark.parametrize("words, said", MISTAKES.items())
def test_mistakes_are_one_line(words, said):
    with pytest.raises(UserError, match="^[^\n]+$") as error:
        read_flags([*TINY, *words.split()])
    assert said in str(error.value)


def test_missing_packages_and_texts(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("benchmarks.training.contestants.NEEDED", {"hf": ("no_such_package",)})
    assert "hf" not in [one.name for one in read_flags(TINY)[1]]
    assert "hf needs no_such_package: pip install no_such_package; left out" in capsys.readouterr().out
    with pytest.raises(UserError, match="^--contestants hf needs no_such_package"):
        read_flags([*TINY, "--contestants", "hf"])
    with pytest.raises(UserError, match="^--text .*missing: cannot be read"):
        write_tokens(tmp_path / "tokens", 256, tmp_path / "missing", None, None)
    assert parse_contestants(["ours"], []) == [Contestant("ours", 1, "ours")]


NANOGPT = """
import pickle, time
exec(open("configurator.py").read())
assert pickle.load(open(f"data/{dataset}/meta.pkl", "rb")) == {"vocab_size": 256} and not compile
for number in range(max_iters + 1):
    print(f"iter {number}: loss 5.5452, time 20.00ms, mfu -100.00%", flush=True)
    time.sleep(0.02)
"""


@pytest.mark.slow
def test_two_contestants_run(tmp_path):
    """A stand-in with nanoGPT's way in and out: the clone itself is not part of this repository."""
    (tmp_path / "train.py").write_text(NANOGPT)
    (tmp_path / "configurator.py").write_text("exec(open('config.py').read())")
    out, chart = tmp_path / "figures.json", tmp_path / "losses.html"
    words = f"--rounds 1 --contestants ours nanogpt --nanogpt {tmp_path} --device cpu --precision fp32 --threads 1"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.train", *TINY, *words.split(), "--out", str(out), "--chart", str(chart)],
        check=False, cwd=REPO, capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert [line["name"] for line in found["summary"]] == ["ours", "nanogpt"]
    assert all(len(run["result"]["step_s"]) == 3 and run["result"]["first_step_s"] > 0 for run in found["runs"])
    firsts = [run["result"]["losses"][0] for run in found["runs"]]
    assert firsts == pytest.approx([np.log(256)] * 2, abs=0.1)  # of a model that knows nothing yet
    assert all(line["ceiling_full"] > line["ceiling_causal"] > 0 and line["step_s"] > 0 for line in found["summary"])
    assert found["ratios"][0]["median"] > 0 and "tokens/s of" in done.stdout and "nanogpt" in chart.read_text()
