"""python tests/gpu: what it decides about time, results and files, without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.paths import REPO

sys.path[:0] = [str(REPO), str(REPO / "tests" / "gpu")]

from gpu_checks import main, outcome, pytest_side, speed
from gpu_checks.main import GPU_TESTS, PARTS, SPEED, Part
from gpu_checks.outcome import Outcome
from gpu_checks.pytest_side import DEVICE_VARIABLE, KEEP_VARIABLE, MAX_FILES, MAX_MESSAGE, OUTCOMES_VARIABLE
from support.waiting import LIMIT_S, wait_until

from benchmarks.training.contestants import Contestant, build_command, build_parser, choose_contestants, choose_work
from megatron_lite.cli.planned_run import planned_run
from megatron_lite.planner.find_processors import find_processor
from megatron_lite.planner.memory import predict_memory

A, B, C = (Part(name, name, share) for name, share in (("a", 1), ("b", 1), ("c", 2)))
TESTS = """
import pytest
def test_good(record_property): record_property("off", 0.5)
def test_bad(): assert 1 == 2, "x" * 1000
def test_other(): pytest.skip("needs nsys")
@pytest.fixture
def broken(): raise OSError("no disk")
def test_of_broken(broken): pass
"""
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
print("child", child.pid, flush=True)
time.sleep(600)
"""


# --- time


def test_each_part_gets_its_share_of_what_is_left():
    assert main.share_time(A, [B, C], 105) == 25
    assert main.share_time(B, [C], 105) == pytest.approx(100 / 3)  # a took nothing: b and c have its time
    assert main.share_time(C, [], 105) == 100 and main.share_time(C, [], 19) == 0
    left_s = 9 * 60 - 30
    for at, part in enumerate(PARTS):  # though all use up their time, nine minutes are enough to start every part
        limit_s = main.share_time(part, PARTS[at + 1 :], left_s)
        left_s -= limit_s
        assert limit_s
    assert limit_s > 180 and left_s == pytest.approx(main.LAST_S)


def test_when_time_is_up_all_that_was_started_is_ended(tmp_path, monkeypatch):
    words = [sys.executable, "-c", "print('hello'); raise SystemExit(4)"]
    code, seconds = main.run_limited(words, dict(os.environ), LIMIT_S, tmp_path / "log")
    assert code == 4 and seconds < LIMIT_S and (tmp_path / "log").read_text() == "hello\n"
    monkeypatch.setattr(main, "SECONDS_TO_END", 0.5)
    for limit_s in (1.5, 6, 24, 96):  # long enough for a busy machine to start the program
        words = [sys.executable, "-c", STUBBORN]
        code, _ = main.run_limited(words, dict(os.environ), limit_s, tmp_path / "log")
        said = (tmp_path / "log").read_text().split()
        if said[2:]:
            break
    assert code is None and said[0] == "child" and said[2:] == ["asked"]
    wait_until(lambda: not is_running(int(said[1])))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# --- results


def test_every_test_is_noted_as_soon_as_it_is_over(tmp_path):
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_skipped.py").write_text("import pytest; pytest.skip('needs a GPU', allow_module_level=True)")
    (tmp_path / "test_unreadable.py").write_text("import nothing_of_that_name")
    found = tmp_path / "tests.jsonl"
    own = {"PYTHONPATH": os.pathsep.join([str(REPO), str(GPU_TESTS)]), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    words = [sys.executable, *main.PYTEST, "--continue-on-collection-errors", "."]
    done = subprocess.run(
        words, check=False, cwd=tmp_path, env=os.environ | own | {OUTCOMES_VARIABLE: str(found)}, capture_output=True
    )
    assert done.returncode == 1, done.stdout
    tests = {test["test"]: test for test in map(json.loads, found.read_text().splitlines())}
    assert {name: (test["outcome"], test["message"]) for name, test in tests.items()} == {
        "test_some.py::test_good": ("passed", ""),
        "test_some.py::test_bad": ("failed", tests["test_some.py::test_bad"]["message"]),
        "test_some.py::test_other": ("skipped", "needs nsys"),
        "test_some.py::test_of_broken": ("failed", "OSError: no disk"),
        "test_skipped.py": ("skipped", "needs a GPU"),
        "test_unreadable.py": ("failed", "E   ModuleNotFoundError: No module named 'nothing_of_that_name'"),
    }
    assert len(tests["test_some.py::test_bad"]["message"]) == MAX_MESSAGE
    assert tests["test_some.py::test_good"]["figures"] == {"off": 0.5}


def noted(*outcomes: str) -> list[dict]:
    return [
        {"test": f"t{at}", "outcome": kind, "message": "why" if kind != "passed" else "", "figures": {}}
        for at, kind in enumerate(outcomes)
    ]


@pytest.mark.parametrize(
    ("kinds", "code", "result", "words"),
    [
        (("passed", "passed", "skipped"), 0, "passed", "2 passed, 1 skipped"),
        (("passed", "failed"), 1, "failed", "1 passed, 1 failed"),
        (("skipped", "skipped"), 0, "left out", "2 skipped"),
        (("skipped",), 5, "left out", "1 skipped"),  # a file that skips itself as a whole
        ((), 5, "failed", "no test ran, exit code 5"),
        ((), -11, "failed", "no test ran, exit code -11"),
        (("passed",), -6, "failed", "1 passed, exit code -6"),
        (("passed",), None, "out of time", "1 passed, ended after its 30 s"),
        ((), None, "out of time", "no test was over, ended after its 30 s"),
        (("failed",), None, "failed", "1 failed, ended after its 30 s"),
    ],
)
def test_what_a_part_comes_to(tmp_path, kinds, code, result, words):
    lines = "".join(json.dumps(test) + "\n" for test in noted(*kinds))
    (tmp_path / "tests").write_text(lines + '{"test": "cut off", "outc')
    found = outcome.judge_tests("memory", tmp_path / "tests", code, 12.0, 30.0)
    assert (found.result, found.words) == (result, words)
    assert found.is_good == (result in ("passed", "left out"))
    assert ("failed: t1: why" in found.remarks) == (kinds == ("passed", "failed"))


def test_what_cannot_run_here_at_all_and_no_test_of_a_gpu_is_forgotten():
    lacking = {"packages": "no_such_package", "program": "no-such-program"}
    found = [main.find_lack(Part("x", "x", 1, packages=(lacking["packages"],)), "cuda")]
    found.append(main.find_lack(Part("x", "x", 1, program=lacking["program"]), "cuda"))
    assert found == ["needs the package no_such_package", "needs no-such-program on the PATH"]
    assert main.find_lack(PARTS[1], "cpu") == "needs a GPU" and main.find_lack(PARTS[0], "cpu") is None
    named = [name for part in PARTS for name in part.files]
    assert sorted(named) == sorted(path.name for path in GPU_TESTS.glob("test_*.py"))


# --- speed


@pytest.mark.parametrize("on", ["cpu", "cuda"])
def test_the_benchmark_understands_its_command(tmp_path, on):
    flags = main.read_flags(["--device", on], "")
    words = main.build_command(SPEED, flags, 200, tmp_path / "speed.json")
    args = build_parser("").parse_args(words[words.index("benchmarks.train") + 1 :])
    work, warm_up = choose_work(args, args.device)
    assert args.minutes == 3 and args.out == tmp_path / "speed.json" and warm_up < work.steps
    assert choose_contestants(args, work, print)[0].name == "ours" and work.device == on
    assert work.precision == ("fp16" if on == "cuda" else "fp32")


def judge(folder: Path, peak: int, tokens_s=200_000.0, gpu="NVIDIA H200", code: int | None = 0, on="cuda") -> Outcome:
    """Of a benchmark's file with these figures."""
    failed = {"contestant": "hf", "round": 1, "failure": "exit code 1: Error"}
    line = {"name": "ours", "tokens_s": tokens_s, "first_step_s": 30.0, "tflops_full": 500.0, "tflops_causal": 450.0}
    ratios = {"nanogpt": 1.5, "nanogpt-compiled": 1.01}
    content = {
        "machine": {"gpus": [{"name": gpu}]},
        "work": {"precision": "fp16"},
        "summary": [line | {"peak_bytes": peak}],
        "ratios": [{"ours": "ours", "other": other, "median": ratio} for other, ratio in ratios.items()],
        "runs": [
            {"command": example_command(), "result": {"contestant": "ours", "round": 1, "failure": None}},
            {"command": [], "result": failed},
        ],
    }
    (folder / "speed.json").write_text(json.dumps(content))
    return speed.judge_speed("speed", folder / "speed.json", on, code, 100.0, 200.0)


def example_command() -> list[str]:
    work, _ = choose_work(build_parser("").parse_args(["--device", "cuda"]), "cuda")
    return build_command(Contestant("ours", 1, "ours"), work, Path("tokens"), Path("run"), None)[0]


def test_speed_is_held_against_the_bars_and_memory_against_the_plan(tmp_path):
    words = example_command()
    plan = planned_run(words[words.index("pretrain_gpt.py") + 1 :], 1).plan
    planned = predict_memory(plan, find_processor("H200")).peak.num_bytes
    found = judge(tmp_path, planned)
    assert found.result == "passed" and found.words == "2 runs measured, 1 failed"
    assert found.figures["planned_peak_bytes"] == planned > 2**30
    assert found.figures["mfu_full"] == pytest.approx(0.505, abs=0.001)
    assert {
        "MFU: 50.5% full, 45.5% causal; gate 45% reached, goal 52% MISSED, best hoped for 56% MISSED",
        "over nanogpt: 1.50 x; bar 1.4 reached",
        "over nanogpt-compiled: 1.01 x; bar 1.05 MISSED",
        "failed: hf, round 1: exit code 1: Error",
    } <= set(found.remarks)
    more = judge(tmp_path, planned + 1)
    assert more.result == "failed" and "failed: ours takes more memory than planned" in more.remarks
    # bars are those of one kind of GPU
    remarks = judge(tmp_path, 1, gpu="NVIDIA H100 80GB HBM3").remarks
    assert "over nanogpt: 1.50 x" in remarks and not any("bar" in remark for remark in remarks)
    unknown = judge(tmp_path, 1, gpu="Some GPU")
    assert unknown.figures["mfu_full"] is None and not any("MFU" in remark for remark in unknown.remarks)


def test_a_speed_table_that_was_not_finished(tmp_path):
    for code, tokens_s, result in ((1, 1.0, "out of time"), (1, None, "failed"), (None, 1.0, "out of time")):
        assert judge(tmp_path, 1, tokens_s, code=code).result == result
    assert judge(tmp_path, 1, on="cpu").figures["planned_peak_bytes"] is None
    gone = tmp_path / "gone.json"
    assert speed.judge_speed("speed", gone, "cuda", 2, 1.0, 9.0).words == "exit code 2, nothing was measured"
    assert speed.judge_speed("speed", gone, "cuda", None, 9.0, 9.0).result == "out of time"


# --- files


def test_few_and_small_files_are_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(outcome, "MAX_BYTES", 5000)
    out, scratch = tmp_path / "out", tmp_path / "scratch"
    out.mkdir()
    (scratch / "speed").mkdir(parents=True)
    (scratch / "speed" / "speed.json").write_text("{}")
    (scratch / "equal.log").write_text("some output")
    for at in range(MAX_FILES):
        (out / f"{at}.gz").write_bytes(bytes(2000 + at))
    (out / "large.gz").write_bytes(bytes(5001))
    said = outcome.write_files(out, scratch, {"torch": {}}, [Outcome("equal", "passed", "1 passed")])
    left = {path.name for path in out.iterdir()}
    assert len(left) == MAX_FILES and {"results.json", "log.txt", "speed.json"} <= left and "large.gz" not in left
    assert len(said) == 4 and all(line.endswith("at most 8 files of 0 MiB") for line in said)
    assert "===== equal\nsome output" in (out / "log.txt").read_text()
    assert json.loads((out / "results.json").read_text())["parts"][0]["words"] == "1 passed"


def test_what_is_worth_keeping_is_kept_if_it_is_small(tmp_path, monkeypatch):
    (tmp_path / "trace").write_bytes(os.urandom(1000))
    pytest_side.keep(tmp_path / "trace", "nowhere")
    monkeypatch.setenv(KEEP_VARIABLE, str(tmp_path / "out"))
    (tmp_path / "out").mkdir()
    pytest_side.keep(tmp_path / "trace", "trace")
    monkeypatch.setattr(pytest_side, "MAX_BYTES", 999)
    pytest_side.keep(tmp_path / "trace", "too-large")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["trace.gz"]


@pytest.mark.parametrize(
    ("gpu", "asked", "device_to_use"),
    [(True, "", "cuda"), (True, "cuda", "cuda"), (False, "cpu", "cpu"), (False, "", None), (False, "cuda", None)],
)
def test_where_tests_run(monkeypatch, gpu, asked, device_to_use):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setenv(DEVICE_VARIABLE, asked)
    assert pytest_side.checked_device() == device_to_use


# --- the command

NO_GPU = "finds no CUDA device here; run this on a machine with a GPU, or rehearse it with --device cpu"
FOUND = {"torch": "2.13.0", "device": "NVIDIA H200"}


@pytest.fixture
def command_with(monkeypatch, capsys):
    """Runs the command with a fake machine and fake parts: `does(name)` gives (tests' outcomes, exit code)."""

    def run(words: list[str], does, found=FOUND):
        def pretend(command, environment, limit_s, log):
            log.write_text(f"output of {log.stem}")
            kinds, code = does(log.stem)
            lines = "".join(json.dumps(test) + "\n" for test in noted(*kinds))
            Path(environment[OUTCOMES_VARIABLE]).write_text(lines)
            return code, 2.0

        monkeypatch.setattr(main, "look_at_torch", lambda: found)
        monkeypatch.setattr(
            main, "find_lack", lambda part, device: "needs nsys on the PATH" if part.name == "nsys" else None
        )
        monkeypatch.setattr(main, "run_limited", pretend)
        code = main.main(words, "")
        return code, capsys.readouterr()

    return run


def test_the_command_goes_on_after_a_failure(command_with, tmp_path):
    names = [part.name for part in PARTS if part is not SPEED]
    code, said = command_with(
        ["--out", str(tmp_path / "out" / "of"), "--parts", *names],
        lambda name: (("passed", "failed"), 1) if name == "syncs" else (("passed",), 0),
    )
    assert code == 1 and said.err == ""
    lines = said.out.splitlines()
    assert lines[0] == "NVIDIA H200, torch 2.13.0; at most 9 minutes"
    assert [line.split()[0] for line in lines[1 : 1 + len(names)]] == names  # as it went
    assert [line.split()[0] for line in lines[2 + len(names) : 2 + 2 * len(names)]] == names  # the table
    assert "  syncs: failed: t1: why" in lines and lines[-1].startswith("not good: syncs; ")
    kept = json.loads((tmp_path / "out" / "of" / "results.json").read_text())
    assert [part["result"] for part in kept["parts"]] == ["passed", "failed", *["passed"] * 5, "left out"]
    assert kept["torch"] == FOUND and kept["machine"]["versions"]["torch"]


def test_all_good_and_what_could_not_be_started(command_with, monkeypatch):
    code, said = command_with(["--parts", "equal", "nsys"], lambda name: (("passed",), 0))
    assert code == 0 and "left out     needs nsys on the PATH" in said.out
    assert said.out.splitlines()[-1].startswith("all that could run here passed; ")
    monkeypatch.setattr(main, "MIN_PART_S", 1000)
    code, said = command_with(["--parts", "equal", "memory"], lambda name: pytest.fail("was started"))
    assert code == 1 and said.out.count("not started") == 4 and "s of --minutes were left" in said.out


def test_what_was_found_before_an_interruption_is_shown(command_with, tmp_path):
    def does(name):
        if name == "syncs":
            raise KeyboardInterrupt
        return ("passed",), 0

    code, said = command_with(["--out", str(tmp_path / "out"), "--parts", "equal", "syncs", "memory"], does)
    rows = [line.split()[:2] for line in said.out.splitlines()[3:6]]
    assert code == 130 and rows == [["equal", "passed"], ["syncs", "not"], ["memory", "not"]]
    assert (tmp_path / "out" / "results.json").exists()


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"torch": "2.13.0+cpu", "device": None}, f"torch 2.13.0+cpu {NO_GPU}"),
        (
            {"torch": None, "why": "exit code -11"},
            "cannot import torch (exit code -11); start this with the Python that has it",
        ),
    ],
)
def test_where_nothing_can_be_checked_one_line_says_so(command_with, found, words):
    code, said = command_with([], lambda name: pytest.fail("was started"), found)
    assert code == 3 and said.out == "" and said.err.startswith("error: ") and said.err.endswith(words + "\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--minutes", "0.5"], "--minutes 0.5: must be at least 1"),
        (["--parts", "speeed"], "--parts speeed: no such part; there are equal, syncs,"),
        (["--out", str(REPO)], "is there already and not an empty folder; name another"),
    ],
)
def test_mistakes_in_the_flags(words, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main.main(words, "")
    assert caught.value.code == 2 and message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_real_command_ends_at_once_and_a_package_that_everything_needs_is_named():
    done = subprocess.run([sys.executable, GPU_TESTS], check=False, capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, done.stdout, done.stderr) == (3, "", f"error: torch {torch.__version__} {NO_GPU}\n")
    start = f"import runpy, sys; sys.modules['numpy'] = None; runpy.run_path({str(GPU_TESTS)!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", start], check=False, capture_output=True, text=True, timeout=LIMIT_S)
    said = f"error: {sys.executable} has no numpy, without which nothing can be trained; install it there\n"
    assert (done.returncode, done.stderr) == (3, said)


@pytest.mark.slow
def test_training_and_measuring_do_without_packages_that_only_some_flags_need():
    start = (
        "import sys; sys.modules |= dict.fromkeys(['tensorboard', 'tiktoken', 'regex', 'nvtx', 'yaml']); "
        "import megatron_lite.app, benchmarks.train"
    )
    subprocess.run([sys.executable, "-c", start], check=True, cwd=REPO, timeout=LIMIT_S)


@pytest.mark.slow
def test_a_rehearsal_on_the_cpu_runs_all_that_can_run_there(tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, GPU_TESTS, "--device", "cpu", "--out", out]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    results = {part["part"]: part for part in json.loads((out / "results.json").read_text())["parts"]}
    assert {name for name, part in results.items() if part["result"] == "passed"} == {
        "equal",
        "explain",
        "terms",
        "speed",
    }
    assert all(part["words"] == "needs a GPU" for part in results.values() if part["result"] == "left out")
    assert results["speed"]["figures"]["tokens_per_s"] > 0
    assert {"log.txt", "speed.json", "trace.json.gz", "snapshot.pickle.gz"} <= {path.name for path in out.iterdir()}
