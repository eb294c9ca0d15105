"""--nsys of the start script, with stand-ins for nsys, torchrun and Python; tests of the real nsys stand elsewhere."""

import os
import re
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from support.paths import REPO
from support.waiting import LIMIT_S
from support.wording import wording

SCRIPT = Path("examples", "gpt3", "train_gpt3_857m_distributed.sh")
NSYS_2022 = [
    "-c, --capture-range=", "--capture-range-end=", "--kill=", "--cuda-graph-trace=", "--cpuctxsw=",
    "-p, --nvtx-capture=",
]  # fmt: skip
NSYS_2023 = [*NSYS_2022, "--cudabacktrace=", "--python-backtrace="]

COPIES = 'cp "$REPORT" "$report.nsys-rep"'
SECRET = re.compile("(?i).*(token|key|secret|passw|credential)")
UNIX = "bash cat cp date dirname env getconf grep head mkdir mktemp nproc readlink rm sed tail tr"
OF_THE_MACHINE = "NUM_NODES NODE_RANK MASTER_ADDR MASTER_PORT NSYS NSYS_PROFILING_SESSION_ID SLURM_JOB_ID"

NSYS = """#!/usr/bin/env bash
case "$1 $2" in
    "profile --help") printf '\\t%s\\n\\n' {help}; exit 0 ;;
    "--version "*) echo "NVIDIA Nsight Systems version 2022.4"; exit 0 ;;
    "export --type") cp -- "$6" "$5"; exit 0 ;;
esac
shift
while [[ $1 == -* ]]; do
    echo "nsys got $1" >&2
    case $1 in
        -o) report=${{2//%%/%}}; shift 2 ;;
        -t | -s) shift 2 ;;
        *) shift ;;
    esac
done
[[ ! -e ${{STUMBLE:-}} ]] || {{ rm -- "$STUMBLE"; exit 1; }}
[[ -z ${{BROKEN:-}} ]] || exit 4
"$@"
status=$?
{writes}
exit ${{EXIT:-$status}}
"""


class Desk:
    """A copy of the script's repository in a folder with odd characters, with its inputs and tools."""

    def __init__(self, folder: Path):
        self.folder = folder / "a $copy of 100%h"
        self.tools, self.reports = folder / "tools", self.folder / "nsight_profile"
        shutil.copytree(REPO / "examples", self.folder / "examples")
        shutil.copy(REPO / "pyproject.toml", self.folder)
        self.unix = folder / "unix"  # and no nsys that this machine may have
        self.unix.mkdir()
        for name in UNIX.split():
            (self.unix / name).symlink_to(shutil.which(name))
        (self.folder / "pretrain_gpt.py").touch()
        self.inputs = [self.folder / name for name in ("check $points", "board", "vocab.json", "merges.txt", "data")]
        for name in ("vocab.json", "merges.txt", "data.bin", "data.idx"):
            (self.folder / name).touch()
        # torchrun shows its words and a variable or two; this Python has the package nvtx unless it is told otherwise
        self.tool("python", f'case "$2" in *nvtx*) exit ${{LACKS_NVTX:-0}} ;; esac\nexec "{sys.executable}" "$@"')
        shows = 'printf "%s\\n" "$@"; env | grep -E "MY_|HF_|TOKENIZERS|REGISTER|_PKEY"'
        self.tool("torchrun", f"{shows}; exit ${{TRAINER:-0}}")
        self.tool("sleep", "exit 0")

    def tool(self, name: str, text: str) -> Path:
        path = self.tools / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text if text.startswith("#!") else f"#!/usr/bin/env bash\n{text}\n")
        path.chmod(0o755)
        return path

    def nsys(self, known=NSYS_2022, writes: str = ":"):
        """An nsys that knows these options, and writes the report by a line of bash."""
        text = NSYS.format(help=" ".join(f"'{option}'" for option in known), writes=writes)
        self.tool("target/nsys", text)
        (self.tools / "nsys").unlink(missing_ok=True)
        (self.tools / "nsys").symlink_to(self.tools / "target" / "nsys")

    def start(self, *arguments: str, gpu: bool = False, **environment: str) -> subprocess.CompletedProcess:
        if gpu:
            self.tool("nvidia-smi", "exit 0")
        left_out = OF_THE_MACHINE.split()
        kept = {name: value for name, value in os.environ.items() if name not in left_out and not SECRET.match(name)}
        own = {
            "PYTHON": str(self.tools / "python"), "PATH": f"{self.tools}:{self.unix}", "GPUS_PER_NODE": "2",
            "CUDA_VISIBLE_DEVICES": "", "SLURM_JOB_ID": "17",
        }  # fmt: skip
        command = ["bash", str(self.folder / SCRIPT), *map(str, self.inputs), "--nsys", *arguments]
        return subprocess.run(
            command, env=kept | own | environment, check=False, capture_output=True, text=True, timeout=LIMIT_S,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def report(self, *texts: str) -> Path:
        """What nsys would export of a report with these ranges."""
        path = self.tools / "exported.sqlite"
        path.unlink(missing_ok=True)
        write_report(path, *texts)
        return path


def write_report(path: Path, *texts: str, kernels: int = 0):
    """Texts stand in the row, as raw strings do, or beside it, as registered ones do, by turns."""
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
        database.execute("CREATE TABLE NVTX_EVENTS (start INTEGER, text TEXT, textId INTEGER)")
        for number, text in enumerate(texts):
            database.execute("INSERT INTO StringIds VALUES (?, ?)", (number, text))
            row = (number, text, None) if number % 2 else (number, None, number)
            database.execute("INSERT INTO NVTX_EVENTS VALUES (?, ?, ?)", row)
        if kernels:
            database.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER)")
            database.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?)", [(n,) for n in range(kernels)])


@pytest.fixture
def desk(tmp_path) -> Desk:
    return Desk(tmp_path)


def assert_refused(run: subprocess.CompletedProcess, said: str):
    assert run.returncode == 2 and run.stdout == "" and run.stderr.count("\n") == 1 and said in run.stderr


# --- before training


@pytest.mark.skipif(any(Path(at).exists() for at in ("/usr/local/cuda/bin/nsys", "/opt/nvidia")), reason="has an nsys")
def test_without_nsys_it_says_how_to_get_it_and_does_nothing(desk):
    absent = "error: --nsys: there is no nsys on the PATH; get Nsight Systems from https://developer.nvidia.com"
    assert_refused(desk.start(), absent)
    assert_refused(desk.start(NSYS="/no/such/nsys"), "NSYS=/no/such/nsys: cannot be run; get Nsight Systems")
    assert not desk.reports.exists()


@pytest.mark.parametrize(
    ("known", "environment", "said"),
    [
        (["--capture-range-end="], {}, "nsys has no --capture-range, without which the whole run would be recorded"),
        (NSYS_2022, {"NSYS_PROFILING_SESSION_ID": "1"}, "--nsys: this shell runs under nsys already"),
        (NSYS_2022, {"LACKS_NVTX": "1"}, "python lacks the package nvtx, and without a GPU there is nothing else to"),
    ],
)
def test_what_could_record_nothing_is_refused(desk, known, environment, said):
    desk.nsys(known)
    assert_refused(desk.start(**environment), said)
    assert not desk.reports.exists()


def test_reports_that_could_not_be_written_are_refused(desk):
    desk.nsys()
    desk.reports.touch()
    assert_refused(desk.start(), "nsight_profile: Nsight Systems' report could not be written there; make")


# --- what nsys is asked


def got(run: subprocess.CompletedProcess) -> list[str]:
    return re.findall(r"^nsys got (\S+)", run.stderr, re.MULTILINE)


def test_options_that_this_nsys_lacks_are_left_out_with_a_word(desk):
    desk.nsys(["-c, --capture-range=", "--kill=", "--nvtx-capture-not="])
    run = desk.start()
    assert (
        wording("examples/note-nvidia-nsight-systems", 2022.4, "--capture-range-end", "--nvtx-capture", "--cpuctxsw")
    ) in run.stdout
    assert got(run) == ["-t", "--capture-range=nvtx", "-s", "--kill=none", "-o"]


def test_on_gpus_cudas_own_range_is_waited_for(desk):
    desk.nsys(NSYS_2023)
    assert got(desk.start(gpu=True, LACKS_NVTX="1")) == [
        "-t", "--capture-range=cudaProfilerApi", "-s", "--capture-range-end=stop", "--kill=none",
        "--cuda-graph-trace=node", "--cpuctxsw=none", "-o",
    ]  # fmt: skip
    assert got(desk.start(gpu=True, NSYS_BACKTRACES="1"))[6:8] == ["--cudabacktrace=all", "--python-backtrace=cuda"]
    desk.nsys(NSYS_2022)
    run = desk.start(gpu=True, NSYS_BACKTRACES="1")
    assert wording("examples/does-not-know-all", "--cudabacktrace", "--python-backtrace") in run.stdout
    assert not any("backtrace" in option for option in got(run))


def test_torch_profiler_gives_way_and_other_words_stay_as_they_are(desk):
    desk.nsys()
    odd, torchs = "two words $HOME 100%", "--use-pytorch-profiler"
    run = desk.start("--", torchs, "--run-dir", odd, "--bf16", torchs)
    assert run.stdout.count(wording("examples/note-left-out-with", torchs, "--nsys")) == 2
    words = run.stdout.splitlines()
    assert torchs not in words and words[words.index("--run-dir") :][1:3] == [odd, "--bf16"]
    assert words[words.index("--save") + 1] == str(desk.inputs[0]) and "--profile" in words


def test_secrets_stay_out_of_the_environment_that_reports_hold(desk):
    desk.nsys()
    secret = {"HF_TOKEN": "hunter2", "my_api_key": "hunter2", "MY_PASSWORD": "hunter2\nMY_NAME=x"}
    harmless = {"MY_NAME": "Jo", "TOKENIZERS_PARALLELISM": "false", "NCCL_IB_PKEY": "1"}
    run = desk.start(**secret, **harmless)
    assert "hunter2" not in run.stdout + run.stderr
    note = r"note: (.*): kept from the run, since Nsight Systems' reports hold the environment\n"
    noted = set(re.search(note, run.stdout)[1].split())
    assert secret.keys() <= noted and not harmless.keys() & noted
    seen = {*(f"{name}={value}" for name, value in harmless.items()), "NSYS_NVTX_PROFILER_REGISTER_ONLY=0"}
    assert seen <= set(run.stdout.splitlines())


def test_nodes_without_a_profiled_rank_train_without_nsys(desk):
    desk.nsys(writes=COPIES)
    nodes = {"NUM_NODES": "2", "MASTER_ADDR": "there", "REPORT": str(desk.report("step 110"))}
    for ranks, profiled in (([], "0"), (["-1"], "01"), (["2"], "1")):
        for node in "01":
            run = desk.start("--", *(["--profile-ranks", *ranks] if ranks else []), **nodes, NODE_RANK=node)
            assert run.returncode == 0 and (got(run) != []) == (node in profiled)
            note = f"no rank of node {node} is among --profile-ranks: it trains without nsys"
            assert (note in run.stdout) == (node not in profiled)


# --- what comes out


def test_each_node_and_job_has_a_report_of_its_own(desk):
    desk.nsys(writes=COPIES)
    report = str(desk.report("rank 0 of 2, window: steps 4-5 of this run", "step 4", "forward", "step 5"))
    for environment, name in (
        ({}, "job17_node0"),
        ({}, "job17_node0-2"),
        ({"SLURM_JOB_ID": "18"}, "job18_node0"),
        ({"NUM_NODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "there"}, "job17_node1"),
    ):
        run = desk.start("--", "--profile-ranks", "-1", REPORT=report, **environment)
        assert run.returncode == 0, run.stderr
        assert (wording("examples/nsight-systems-report-gpt", desk.reports, name, 4, 5, 3, 0, 2, 4, 5)) in run.stdout
    assert len(list(desk.reports.iterdir())) == 4
    run = desk.start(REPORT=report, SLURM_JOB_ID="")
    assert re.search(r"gpt3_857m_\d{8}-\d{6}_node0\.nsys-rep \(", run.stdout)


def test_a_report_that_was_not_imported_is(desk):
    desk.nsys(writes='cp "$REPORT" "$report.qdstrm"')
    report = str(desk.report("step 7"))
    run = desk.start(REPORT=report)
    assert run.returncode == 3
    assert wording("examples/node-qdstrm-not-imported") in run.stderr
    desk.tool("host-linux-x64/QdstrmImporter", 'echo "cannot read it"; exit 1')
    run = desk.start(REPORT=report)
    assert run.returncode == 3 and wording("examples/qdstrmimporter-could-not-import") in run.stderr
    desk.tool("host-linux-x64/QdstrmImporter", '[[ $1 == -i ]] && cp "$2" "${2%.qdstrm}.nsys-rep"')
    run = desk.start(REPORT=report)
    assert run.returncode == 0, run.stderr
    assert wording("examples/gpt-m-job-node", desk.reports, 7, 1) in run.stdout
    assert not list(desk.reports.glob("*node0-3.qdstrm"))


@pytest.mark.parametrize(
    ("writes", "environment", "code", "said"),
    [
        (":", {}, 3, "no Nsight Systems report, though nsys ended with exit code 0: was --profile-step-start reached"),
        (":", {"TRAINER": "7"}, 7, "no Nsight Systems report: the run failed (exit code 7), see above"),
        (":", {"EXIT": "1"}, 1, "no Nsight Systems report: the run failed (exit code 1), see above"),
        (COPIES, {}, 3, "node0.nsys-rep, but no step of ours is in it: was the window reached"),
        (COPIES, {"TRAINER": "7"}, 7, "node0.nsys-rep, but no step of ours is in it"),
        (': >"$report.nsys-rep"', {}, 3, "node0.nsys-rep, but nsys export could not read it"),
        ('echo nonsense >"$report.nsys-rep"', {}, 3, "node0.nsys-rep, but sqlite3.DatabaseError: file is not"),
    ],
)
def test_a_lost_or_empty_report_is_found(desk, writes, environment, code, said):
    desk.nsys(writes=writes)
    run = desk.start(REPORT=str(desk.report("another range")), **environment)
    assert run.returncode == code and said in run.stderr
    assert "Nsight Systems report" not in run.stdout


def test_an_nsys_that_stumbles_at_its_start_is_started_again(desk):
    desk.nsys(writes=COPIES)
    (desk.tools / "stumble").touch()
    run = desk.start(REPORT=str(desk.report("step 3")), STUMBLE=str(desk.tools / "stumble"))
    assert run.returncode == 0 and run.stdout.splitlines().count("--profile") == 1  # training began once
    assert run.stderr.count(wording("examples/note-nsys-failed-before", 1, 1, 3)) == 1
    run = desk.start(BROKEN="1")
    assert run.returncode == 4 and "--profile" not in run.stdout.splitlines()
    assert "(exit code 4, attempt 3 of 3)" in run.stderr and wording("examples/no-nsight-systems-report") in run.stderr
    assert not desk.start(TRAINER="7").stderr.count("attempt")  # a training that fails is not started again


def test_secrets_that_are_in_a_report_all_the_same_are_named(desk):
    desk.nsys(writes=COPIES)
    environment = "HOME=/root\0SOME_API_KEY=hunter2\0UCX_IB_PKEY=0x1\0TOKENIZERS_PARALLELISM=false\0EMPTY_TOKEN=\0my_password=hunter2"
    run = desk.start(REPORT=str(desk.report("step 3", environment, "TOKEN=in a range")))
    assert run.returncode == 0 and "hunter2" not in run.stdout
    assert wording("examples/it-holds-some-api") in run.stdout


def test_what_a_report_holds_is_counted(tmp_path):
    window = "window: steps 9-12 of this run = iterations 109-112"
    texts = [f"rank 10 of 11, {window}", f"rank 9 of 11, {window}", "step 9", "step 9", "step 12", "steps", "step 11"]
    write_report(tmp_path / "x?y%20.sqlite", *texts, kernels=3)
    command = [sys.executable, REPO / "examples" / "nsight_contents.py", tmp_path / "x?y%20.sqlite"]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    assert run.stdout == f"steps 9, 11-12, 5 ranges, 3 kernels; rank 9 of 11, {window}; rank 10 of 11, {window}\n"
