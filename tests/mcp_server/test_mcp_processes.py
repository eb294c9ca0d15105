"""Commands in processes of their own: confined to the named folders, ended in time, and over standard input and output."""

import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import anyio
import pytest
from support.paths import REPO
from support.trace_maker import gpu_run
from support.waiting import LIMIT_S

pytest.importorskip("mcp_types", reason="pip install -e '.[mcp]'")

from mcp import Client, StdioServerParameters, stdio_client
from support.mcp_cases import ask_process, count_characters, make_options, read_text

from megatron_lite.errors import UserError
from megatron_lite.mcp_server.landlock import find_version
from megatron_lite.mcp_server.run_command import (
    ANSWER_FILE,
    COMMAND_FILE,
    MARK,
    PRINTED_FILE,
    Command,
    end_processes,
    read_result,
)
from megatron_lite.mcp_server.socket_filter import SYSTEM_CALLS

SECRET = "known-to-nobody"
FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --lr 1e-3 --train-iters 2"
)
NOSY_SCRIPT = """
a=$(<{outside}/secret)
b=$(cat {outside}/secret)
read c < {outside}/secret
d=$(</proc/{process}/environ)
e=$(cat /proc/{process}/environ)
f=$(<{shared})
source {outside}/secret
echo x > {inside}/written
echo x > {outside}/written
torchrun --nproc-per-node 2 pretrain_gpt.py {flags} --tensorboard-dir "inside-$a-$b-$c-$d-$e-$f" --vocab-file {vocab}
"""
needs_rules = pytest.mark.skipif(find_version() == 0, reason="this kernel has no Landlock")


@pytest.fixture(scope="module")
def process():
    """A process of the same user, whose environment holds what nobody is to know."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={"SECRET": SECRET}) as started:
        yield started.pid


@pytest.fixture(scope="module")
def shared():
    """A file in shared memory, as loaders of another job have them."""
    with tempfile.NamedTemporaryFile("w", dir="/dev/shm") as file:
        file.write(SECRET)
        file.flush()
        yield file.name


@pytest.fixture
def folder(tmp_path, process, shared):
    """A folder with a trace, links that lead out of it, and a script that looks elsewhere; beside it what it looks for."""
    inside = tmp_path / "inside"
    outside = tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    (outside / "secret").write_text(SECRET)
    (outside / "vocab.json").write_text("{}")
    gpu_run(steps=5).write(inside / "run")
    trace = gpu_run(steps=5).write(outside / "traces")
    (inside / "linked").mkdir()
    (inside / "linked" / trace.name).symlink_to(trace)
    # taken for modules by a Python that looks into its current folder
    for name in ("numpy.py", "msgspec.py", "megatron_lite.py"):
        (inside / name).write_text(f"open({str(inside / 'ran')!r}, 'w')")
    names = {"inside": inside, "outside": outside, "process": process, "shared": shared}
    script = NOSY_SCRIPT.format(**names, flags=FLAGS, vocab="none.json")
    (inside / "train.sh").write_text(script)
    (inside / "vocab.sh").write_text(script.replace("none.json", str(outside / "vocab.json")))
    return inside


@needs_rules
def test_a_report_may_use_pools_of_processes_and_neither_starts_programs_nor_opens_sockets(tmp_path):
    code = (
        "import socket, subprocess\nfrom concurrent.futures import ProcessPoolExecutor\nfrom pathlib import Path\n"
        "from megatron_lite.machine import read_machine\n"
        "from megatron_lite.mcp_server.confine import Confinement\n"
        "from megatron_lite.mcp_server.confined_command import limit_own_memory\n"
        "most = read_machine().memory_bytes\nlimit_own_memory()\n"
        f"Confinement((), Path({str(tmp_path)!r}), starts_programs=False).apply()\n"
        "with ProcessPoolExecutor(1) as pool:\n    print(pool.submit(len, 'abc').result())\n"
        "try:\n    subprocess.run(['/bin/true'])\nexcept PermissionError:\n    print('refused')\n"
        "for kind in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX):\n"
        "    try:\n        socket.socket(kind, socket.SOCK_DGRAM)\n    except PermissionError:\n        print('closed')\n"
        "try:\n    bytearray(most * 3 // 4)\nexcept MemoryError:\n    print('limited')\n"
    )
    expected = ["closed"] * 3 if platform.machine() in SYSTEM_CALLS else []
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=False, timeout=LIMIT_S
    )
    assert (done.stdout.split(), done.stderr) == (["3", "refused", *expected, "limited"], "")


def test_all_that_a_call_has_started_ends_with_it(tmp_path):
    """Also in a session of its own, as the shell is that goes through a launch script, and where nobody waits for it."""

    def start(mark: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["/bin/sleep", "600"], start_new_session=True, env={MARK: mark})

    with start(str(tmp_path)) as leader, start(str(tmp_path)) as other, start(f"{tmp_path}2") as of_another_call:
        end_processes(leader.pid, tmp_path)
        try:
            assert (leader.wait(LIMIT_S), other.wait(LIMIT_S)) == (-signal.SIGKILL, -signal.SIGKILL)
            assert of_another_call.poll() is None
        finally:
            of_another_call.kill()


def test_a_command_that_was_killed_while_it_wrote_its_answer_is_one_line(tmp_path):
    command = Command("report", (), (), tmp_path)
    (tmp_path / PRINTED_FILE).write_text("")
    (tmp_path / ANSWER_FILE).write_text('{"verdict": ')
    with pytest.raises(UserError, match="exit code -9"):
        read_result(command, -9, "", tmp_path)


def list_tree(folder: Path) -> list[tuple[str, int]]:
    """All that lies in a folder, with the time of its last change."""
    return sorted((str(path), path.lstat().st_mtime_ns) for path in folder.rglob("*"))


@needs_rules
def test_a_launch_script_reads_and_writes_nothing_outside(folder):
    before = list_tree(folder.parent)
    result = ask_process(make_options(folder), "plan", command=["train.sh"])
    assert not result.is_error, read_text(result)
    whole = json.dumps(result.structured_content)
    assert "inside------" in whole and SECRET not in whole + read_text(result)
    assert list_tree(folder.parent) == before


def test_a_report_reads_no_link_that_leads_out_and_writes_nothing(folder):
    before = list_tree(folder.parent)
    found = ask_process(make_options(folder), "report", paths=["run", "linked"])
    assert not found.is_error, read_text(found)
    assert found.structured_content["content"]["ranks_seen"]
    [gap] = [gap for gap in found.structured_content["content"]["gaps"] if "outside" in gap]
    assert "linked" in gap or ".pt.trace.json" in gap
    assert list_tree(folder.parent) == before


@pytest.mark.slow
@needs_rules
def test_files_that_a_script_names_are_held_to_the_folders(folder):
    result = ask_process(make_options(folder), "plan", command=["vocab.sh"])
    assert result.is_error and "--vocab-file" in read_text(result) and "outside" in read_text(result)


RUN_WITHOUT_RULES = """
import sys
from pathlib import Path
from megatron_lite.mcp_server import confine
confine.find_version = lambda: 0
from megatron_lite.mcp_server.confined_command import run_request
sys.exit(run_request(Path(sys.argv[1])))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["report", "linked", "--no-html"], "outside"),
        (["report", "run", "--html", "run/page.html"], "writes nothing"),
        (["plan", "train.sh"], "Landlock"),
        (["plan", *FLAGS.split(), "--vocab-file", "../outside/vocab.json"], "outside"),
    ],
)
def test_without_rules_of_the_kernel_the_hook_holds(folder, tmp_path, argv, named):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    request = {"argv": argv, "readable": [str(folder)], "writable": str(scratch), "folder": str(folder)}
    request |= {"confined": True, "starts_programs": True}
    (scratch / COMMAND_FILE).write_text(json.dumps(request))
    (scratch / "start.py").write_text(RUN_WITHOUT_RULES)
    before = list_tree(folder.parent / "outside"), list_tree(folder)
    done = subprocess.run(
        [sys.executable, scratch / "start.py", scratch / COMMAND_FILE],
        cwd=scratch, capture_output=True, text=True, check=False, timeout=LIMIT_S,
        env={**os.environ, "TMPDIR": str(scratch), "PYTHONPATH": str(REPO), "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert named in done.stderr and "Traceback" not in done.stderr
    assert (list_tree(folder.parent / "outside"), list_tree(folder)) == before


@pytest.mark.slow
def test_a_call_ends_when_its_time_is_up_and_its_processes_with_it(folder):
    (folder / "wait.py").write_text("import os, time\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(600)")
    options = make_options(folder, limit_s=6, allow_running_scripts=True)
    result = ask_process(options, "fit", script="wait.py", cpu=True)
    assert result.is_error and "--time-limit" in read_text(result)
    process = Path("/proc") / (folder / "pid").read_text()
    deadline = time.monotonic() + LIMIT_S
    while process.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not process.exists()


SCRIPT = """
import torch
print("a line of the script")
layer = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(layer.parameters())
for _ in range(3):
    layer(torch.randn(8, 64, device="cuda")).sum().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_each_tool_answers_over_standard_input_and_output(folder, tmp_path):
    """The server is the command that users start; what is no message of the protocol would end the client's session."""
    (folder / "scripts").mkdir()
    (folder / "scripts" / "train.py").write_text(SCRIPT)
    (folder / "broken.pt.trace.json").write_text("{")
    calls = [
        ("report", {"paths": ["broken.pt.trace.json"]}),
        ("report", {"paths": ["run"]}),
        ("compare", {"a": "run", "b": "run"}),
        ("postmortem", {"paths": ["run"]}),
        ("explain", {}),
        ("plan", {"command": FLAGS.split()}),
        ("fit", {"script": "scripts/train.py", "quick": True}),
        ("report", {"paths": ["../outside"]}),
    ]
    words = ["-m", "megatron_lite.cli.main", "mcp", str(folder), "--allow-running-scripts"]
    server = StdioServerParameters(command=sys.executable, args=words, env={"PYTHONPATH": str(REPO)})
    reported = []

    async def note(progress, total, message):
        reported.append(progress)

    async def exchange(log):
        async with Client(stdio_client(server, log)) as client:
            tools = (await client.list_tools()).tools
            return tools, [await client.call_tool(name, given, progress_callback=note) for name, given in calls]

    with (tmp_path / "log").open("w+") as log:
        tools, answers = anyio.run(exchange, log)
    assert len(tools) == 6
    assert [answer.is_error for answer in answers] == [True, False, False, True, False, False, False, True]
    assert all(count_characters(answer) <= 24_000 for answer in answers)
    assert answers[6].structured_content["content"]["record"]["reserved_peak_bytes"] > 0
    # a command that ends soon reports nothing
    assert all(seconds > 0 for seconds in reported)
