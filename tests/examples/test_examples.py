"""The start scripts, run as a user runs them."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.example_runs import OURS, SLURM, TINY, read_tracker
from support.paths import REPO
from support.waiting import LIMIT_S
from support.wording import wording

from megatron_lite.formats.file_names import RUN_FILE, STEPS_FILE

SCRIPT = REPO / "examples" / "gpt3" / "train_gpt3_857m_distributed.sh"
QUICKSTART = REPO / "examples" / "gpt3" / "quickstart.sh"
SOURCED = [REPO / "examples" / "environment.sh", REPO / "examples" / "nsight.sh"]
SCRIPTS = [SCRIPT, QUICKSTART, SLURM, *SOURCED, REPO / "tests" / "run", REPO / ".ci" / "run"]
SHORT = ["--train-iters", "2", "--lr-decay-iters", "2", "--log-interval", "1", "--eval-iters", "1"]


def start(script: Path, *arguments, cwd: Path = REPO, **environment: str) -> subprocess.CompletedProcess:
    """The script under bash, without GPUs and with this interpreter."""
    kept = {name: value for name, value in os.environ.items() if name not in OURS}
    env = kept | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""} | environment
    captured = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": LIMIT_S}
    return subprocess.run(["bash", str(script), *map(str, arguments)], check=False, cwd=cwd, env=env, **captured)


def assert_refused(run: subprocess.CompletedProcess, said: str):
    assert run.returncode == 2
    assert run.stdout == "" and run.stderr.count("\n") == 1 and run.stderr.startswith("error: "), run.stderr
    assert said in run.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse_and_can_be_executed(script):
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert os.access(script, os.X_OK) or script in SOURCED
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "-x", str(script)], check=True, cwd=REPO)


REFUSED = [  # arguments that replace the last of CKPT TB VOCAB MERGES DATA, or follow them; variables
    ((2, "no such.json"), {}, "VOCAB no such.json: there is no such file"),
    ((3, "no such.txt"), {}, "MERGES no such.txt: there is no such file"),
    ((4, "no such data"), {}, "DATA no such data: there is no no such data.bin; make it with megatron-lite preprocess"),
    ((4, "x/data.bin"), {}, "DATA x/data.bin: give the prefix without its ending: x/data"),
    ((5, "--lr", "2"), {}, "--lr is not an option of this script; put the trainer's flags behind --"),
    ((5, "more"), {}, "'more' is one argument too many"),
    ((5,), {"GPUS_PER_NODE": "two"}, "GPUS_PER_NODE=two: needs a whole number, at least 1"),
    ((5,), {"GPUS_PER_NODE": "0"}, "GPUS_PER_NODE=0: needs a whole number, at least 1"),
    ((5,), {"TP": "two"}, "TP=two: needs a whole number, at least 1"),
    ((5,), {"NODE_RANK": "-1"}, "NODE_RANK=-1: needs a whole number, at least 0"),
    ((5,), {"MASTER_PORT": "http"}, "MASTER_PORT=http: needs a whole number"),
    ((5,), {"NUM_NODES": "2"}, "NUM_NODES=2 needs MASTER_ADDR"),
    ((5,), {"PYTHON": "/no/python"}, "/no/python: lacks packages of pyproject.toml"),
]


@pytest.mark.parametrize(("arguments", "environment", "said"), REFUSED)
def test_what_cannot_work_is_said_before_anything_is_made(arguments, environment, said, places):
    at, *words = arguments
    given = [*places[:at], *words, *places[at + len(words) :]]
    assert_refused(start(SCRIPT, *given, **environment), said)
    assert not places[0].exists() and not places[1].exists()


def test_each_missing_argument_and_a_taken_port_are_named_and_help_is_the_head_of_the_script(places):
    for number, name in enumerate(["TB", "VOCAB", "MERGES", "DATA"], start=1):
        missing = f"{name} is missing; give all of CKPT TB VOCAB MERGES DATA, or none"
        assert_refused(start(SCRIPT, *places[:number]), missing)
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        refusal = f"MASTER_PORT={port} is taken on this machine; set another"
        assert_refused(start(SCRIPT, *places, MASTER_PORT=port), refusal)
    run = start(SCRIPT, "--help")
    assert run.returncode == 0 and "355,919,872 parameters" in run.stdout and "#" not in run.stdout


@pytest.mark.slow
def test_a_tiny_run_from_another_folder_with_spaces(places, tmp_path, tmp_path_factory):
    """Paths are the caller's; flags behind -- win; the window's profile is torch.profiler's."""
    # other tests say that the folders of all of them were not made
    folder = tmp_path_factory.mktemp("a place of its own")
    checkpoints = folder / "check points"
    board = folder / "tensor board"
    given = [checkpoints, board, *places[2:]]
    inputs = [os.path.relpath(path, tmp_path) for path in given]
    window = ["--profile-step-start", "1", "--profile-step-end", "2"]
    run = start(SCRIPT, *inputs, "--", *TINY, *SHORT, *window, cwd=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "note: no GPU here" in run.stdout and "1 rank on CPU" in run.stdout
    assert re.search(r"iteration        2/       2 \|.* global batch size:    16 \|", run.stdout)
    assert read_tracker(checkpoints) == 2
    assert list(board.glob("*.pt.trace.json*")) and list(board.glob("events.out.tfevents.*"))
    plan = json.loads((board / RUN_FILE).read_text())["plan"]
    assert plan["precision"] == "fp16" and plan["args"]["training"]["micro_batch_size"] == 4
    assert not list(tmp_path.iterdir())


def test_bf16_behind_the_dashes_replaces_fp16(places, tmp_path):
    (tmp_path / "torchrun").write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"\nexit 7\n')
    (tmp_path / "torchrun").chmod(0o755)
    (tmp_path / "python").write_text(f'#!/usr/bin/env bash\nexec "{sys.executable}" "$@"\n')
    (tmp_path / "python").chmod(0o755)
    run = start(
        SCRIPT, *places, "--", "--bf16", "--lr", "1", PYTHON=f"{tmp_path}/python", GPUS_PER_NODE="4", TP="2", PP="2"
    )
    words = run.stdout.splitlines()
    assert run.returncode == 7  # what the launcher says is passed on
    assert "--fp16" not in words and words[-3:] == ["--bf16", "--lr", "1"]
    assert words[words.index("--tensor-model-parallel-size") + 1] == "2" and "--sequence-parallel" in words
    assert words[words.index("--pipeline-model-parallel-size") + 1] == "2"
    assert words[words.index("--nproc_per_node") + 1] == "4" and words[words.index("--data-path") + 1] == str(places[4])


def copy_repository(folder: Path) -> Path:
    """To be trained in."""
    ignored = shutil.ignore_patterns(".*", "quickstart", "runs", "build", "*.egg-info", "__pycache__")
    return Path(shutil.copytree(REPO, folder / "a copy", ignore=ignored))


@pytest.mark.slow
def test_without_arguments_it_trains_on_the_librarys_sources(tmp_path):
    copy = copy_repository(tmp_path)
    run = start(copy / "examples" / "gpt3" / SCRIPT.name, "--", *TINY, *SHORT, cwd=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    assert wording("examples/training-on-sources-of") in run.stdout
    assert read_tracker(copy / "quickstart" / "857m" / "checkpoints") == 2


@pytest.mark.slow
def test_the_quickstart_from_start_to_end(tmp_path):
    copy = copy_repository(tmp_path)
    folder = copy / "quickstart" / "run-2"
    (copy / "quickstart" / "run-1").mkdir(parents=True)  # of a start before
    run = start(copy / "examples" / "gpt3" / QUICKSTART.name, cwd=tmp_path, STEPS="3")
    assert run.returncode == 0, run.stdout + run.stderr
    assert json.loads((folder / RUN_FILE).read_text())["status"] == "finished"
    written = [json.loads(line) for line in (folder / STEPS_FILE).read_text().splitlines()]
    assert [line["iteration"] for line in written if "ranks" not in line] == [1, 2, 3]
    assert read_tracker(folder / "checkpoints") == 3 and list((folder / "tensorboard").iterdir())
    first, last = re.search(r"validation loss +([\d.]+) after 1 .* ([\d.]+) after 3", run.stdout).groups()
    assert float(last) < float(first) - 0.1
    assert (
        "\n    def read(self" in run.stdout
        and json.loads((folder / "hf" / "config.json").read_text())["model_type"] == "llama"
    )
    assert (folder / "console.log").read_text().count("validation loss at") == 5
    assert not list((copy / "quickstart" / "run-1").iterdir())


def test_the_quickstart_refuses_what_it_does_not_know():
    assert_refused(start(QUICKSTART, STEPS="none"), "STEPS=none: needs a whole number")
    assert_refused(start(QUICKSTART, "100"), "'100': the quickstart takes no arguments")


@pytest.mark.slow
def test_a_launch_script_of_megatron_lm_runs_as_it_is(places, tmp_path):
    """Flags, their order and the torchrun line as such scripts have them, sizes reduced, from the repository's root."""
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    script = tmp_path / "launch.sh"
    script.write_text(f"""#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
DISTRIBUTED_ARGS=(--nproc_per_node 2 --nnodes 1 --master_addr localhost --master_port {port})
GPT_MODEL_ARGS=(--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64
    --max-position-embeddings 64 --attention-backend auto)
TRAINING_ARGS=(--micro-batch-size 4 --global-batch-size 16 --train-iters 24 --weight-decay 0.1 --adam-beta1 0.9
    --adam-beta2 0.95 --init-method-std 0.006 --clip-grad 1.0 --fp16 --lr 6.0e-3 --lr-decay-style cosine
    --min-lr 6.0e-6 --lr-warmup-fraction .001 --lr-decay-iters 24)
MODEL_PARALLEL_ARGS=(--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1)
DATA_ARGS=(--data-path "$5" --vocab-file "$3" --merge-file "$4" --split 949,50,1)
EVAL_AND_LOGGING_ARGS=(--log-interval 6 --save-interval 12 --eval-interval 12 --save "$1" --load "$1" --eval-iters 1
    --tensorboard-dir "$2")
PROFILER_ARGS=(--profile --use-pytorch-profiler --profile-step-start 4 --profile-step-end 6 --profile-ranks 0)
exec torchrun ${{DISTRIBUTED_ARGS[@]}} pretrain_gpt.py ${{GPT_MODEL_ARGS[@]}} ${{TRAINING_ARGS[@]}} \\
    ${{MODEL_PARALLEL_ARGS[@]}} "${{DATA_ARGS[@]}}" "${{EVAL_AND_LOGGING_ARGS[@]}}" ${{PROFILER_ARGS[@]}}
""")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    outputs = [tmp_path / "checkpoints", tmp_path / "logs"]
    run = start(script, *outputs, *places[2:], PATH=path, OMP_NUM_THREADS="1")
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(r"iteration       24/      24 \|.* number of skipped iterations:   0 \|", run.stdout)
    assert "validation loss at iteration 12 | lm loss value:" in run.stdout
    assert read_tracker(outputs[0]) == 24 and list(outputs[1].glob("*.pt.trace.json*"))


def python_that(folder: Path, fails_at: str) -> str:
    """An interpreter like this one, except that code with these words in it fails, and that it lacks all packages."""
    tool = folder / "python"
    tool.write_text(f"""#!/usr/bin/env bash
case "$1 $2" in *packages.py* | *{fails_at}*) exit 1 ;; esac
exec "{sys.executable}" "$@"
""")
    tool.chmod(0o755)
    return str(tool)


@pytest.mark.parametrize(
    ("fails_at", "said"),
    [
        ("version_info\\ \\<", "no Python of 3.10 or newer here; install one, or name it: PYTHON=/path/to/python3"),
        ("ensurepip", f"on Debian and Ubuntu: apt-get install python3.{sys.version_info[1]}-venv"),
    ],
)
def test_a_python_that_cannot_make_an_environment_is_said(fails_at, said, tmp_path):
    shutil.copytree(REPO / "examples", tmp_path / "copy" / "examples")
    script = tmp_path / "copy" / "examples" / "gpt3" / QUICKSTART.name
    assert_refused(start(script, PYTHON=python_that(tmp_path, fails_at)), said)
    assert not (tmp_path / "copy" / ".venv").exists()


@pytest.mark.slow
def test_what_pip_said_is_shown_when_it_fails(tmp_path):
    copy = tmp_path / "a copy"
    shutil.copytree(REPO / "examples", copy / "examples")  # and no pyproject.toml
    run = start(copy / "examples" / "gpt3" / QUICKSTART.name, PYTHON=python_that(tmp_path, "nothing"))
    assert run.returncode == 2
    assert "neither 'setup.py' nor 'pyproject.toml' found" in run.stderr
    assert run.stderr.endswith(wording("examples/see-above-its-whole", copy))


def test_an_environment_needs_each_package_of_pyproject(tmp_path):
    lines = (REPO / "pyproject.toml").read_text().partition("\ndependencies = [\n")[2].partition("\n]")[0].splitlines()
    names = [re.match(r'\s*"([\w-]+)', line)[1] for line in lines]
    assert {"torch", "msgspec", "rich", "pyyaml"} <= set(names)

    def find_missing(case: str, versions: dict[str, str]) -> tuple[int, str]:
        """examples/packages.py in an environment that has these packages and no others."""
        for name, version in versions.items():
            folder = tmp_path / case / f"{name}-{version}.dist-info"
            folder.mkdir(parents=True)
            (folder / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
        code = (
            "import runpy, sys, importlib.metadata\n"
            f"sys.path[:] = [path for path in sys.path if '-packages' not in path] + [{str(tmp_path / case)!r}]\n"
            "sys.argv = ['packages.py', 'missing']\n"
            f"runpy.run_path({str(REPO / 'examples' / 'packages.py')!r}, run_name='__main__')"
        )
        run = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=False)
        return run.returncode, run.stdout.strip()

    newest = dict.fromkeys(names, "9999")
    assert find_missing("all", newest) == (0, "")
    for lacking in names:
        others = {name: version for name, version in newest.items() if name != lacking}
        assert find_missing(lacking, others) == (1, lacking)
    assert find_missing("old", newest | {"rich": "12.6"}) == (1, "rich>=13 (has 12.6)")


FAKE_PIP = """#!/usr/bin/env bash
# An interpreter whose pip installs nothing: it offers the builds in BUILDS, and its install goes on until its progress was shown.
echo "$*" >>"$SAID"
case "$*" in
    *"pip --version"*) ;;
    *"index versions torch"*) echo "Available versions: $BUILDS" ;;
    *packages.py*) exec "$REAL" -c 'import runpy, sys; sys.executable = sys.argv[1]; sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")' "$0" "$@" ;;
    *"pip install"*)
        echo "Downloading torch-9.whl (99 MB)"
        until [[ -e $SEEN ]]; do sleep 0.1; done
        ;;
esac
"""


@pytest.mark.parametrize(
    ("builds", "taken"),
    [
        ("2.99.0, 2.13.0+cu130, 2.13.0+cpu, 2.12.1+cpu, 2.99.0+cpu", "torch==2.13.0+cpu"),
        ("2.13.0, 2.10.0+cpu", None),
        ("", None),
    ],
)
def test_without_a_gpu_the_cpu_build_is_taken_or_its_size_said_first(builds, taken, tmp_path):
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    python = tmp_path / "venv" / "bin" / "python"
    python.write_text(FAKE_PIP)
    python.chmod(0o755)
    script = f"""set -euo pipefail; root={REPO}; source "$root/examples/environment.sh"
        has_driver() {{ return 1; }}; uname() {{ echo Linux x86_64; }}
        make_environment "{tmp_path}/venv" . """
    said, seen = tmp_path / "said", tmp_path / "seen"
    environment = {"BUILDS": builds, "SAID": str(said), "SEEN": str(seen), "REAL": sys.executable}
    run = subprocess.Popen(
        ["bash", "-c", script], env=os.environ | environment | {"SECONDS_BETWEEN_LINES": "0.2"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    shown = next(line for line in run.stderr if "Downloading" in line)
    seen.touch()  # the end of pip's work
    out, _ = run.communicate()
    assert run.returncode == 0 and re.fullmatch(r"  \d+ s, \d+ MB: Downloading torch-9.whl \(99 MB\)\n", shown)
    install = said.read_text().splitlines()[-1]
    assert install.endswith(f"--progress-bar off {taken} -e ." if taken else "--progress-bar off -e .")
    assert ("4.9 GB in all" in out) == (taken is None) and (f"taking {taken}" in out) == (taken is not None)
    assert sorted(path.name for path in (tmp_path / "venv").iterdir()) == ["bin", "install.log", "installed"]
