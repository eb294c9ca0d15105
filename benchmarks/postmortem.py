"""Lets `megatron-lite postmortem` judge jobs with planted failures, and healthy ones.

python -m benchmarks.postmortem [--row PATTERN] [--recorded-by PATTERN] [--keep FOLDER] [--again]

The failures stand in postmortem_scripts/PLANTED.tsv, with the kind and the ranks that are right. Most are processes that
fail here, on gloo; how a job is recorded stands in the table, too:

watch     by `megatron-lite watch`; what its run folder holds is all there is
torchrun  by torchrun with the log of each rank and error files; where the job hangs, py-spy's stacks of its ranks and
          PyTorch's flight recorder are dumped, as a job on NCCL does
debug     by torchrun's console and torch.distributed.debug, which dumps every 2 s (needs aiohttp, Jinja2 and tabulate)
console   by what torchrun prints, and nothing else
own       this package's trainer, with its run folder and its console
made      nothing runs: dumps and logs are made in the form that jobs on GPUs leave them
"""

import argparse
import contextlib
import csv
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.postmortem_scripts.made_jobs import MADE
from megatron_lite.postmortem.postmortem_results import FailureKind, Postmortem

HERE = Path(__file__).parent / "postmortem_scripts"
TABLE = HERE / "PLANTED.tsv"
BIN = Path(sys.executable).parent
MAX_SECONDS = 90
MAX_POSTMORTEM_SECONDS = 60
# from the fault until the job is looked at while it hangs; less than the time-out of collectives
HANGS_SECONDS = 3.5
# in which several slow steps end
SLOW_SECONDS = 12
LATE_STEP = re.compile(r"(?:step|iter|iteration) +[6-9]\b")
WHILE_IT_RUNS = "while"
TERMINATED = "term"
CHECKED = "detail"
NO_RANK = "-"
ANY_RANK = "*"
ERRED = "no answer"

# lines of a batch system that come before the signal to all processes
ANNOUNCED = {
    "slurm-time-limit": "slurmstepd: error: *** JOB 9113 ON node07 CANCELLED AT {time} DUE TO TIME LIMIT ***",
    "slurm-preempted": "slurmstepd: error: *** JOB 9113 ON node07 CANCELLED AT {time} DUE TO PREEMPTION ***",
    "slurm-canceled": "slurmstepd: error: *** STEP 9113.0 ON node07 CANCELLED AT {time} ***",
    TERMINATED: "",
}
# lines that tell afterwards why a process was killed
EXPLAINED = {
    "slurm-oom": (
        "slurmstepd: error: Detected 1 oom_kill event in StepId=9113.0. Some of the step tasks have been OOM Killed.\n"
        "srun: error: node07: task 0: Out Of Memory\n"
    ),
    "kernel-oom": (
        "[71234.501211] python invoked oom-killer: gfp_mask=0x140cca(GFP_HIGHUSER_MOVABLE|__GFP_COMP), order=0, "
        "oom_score_adj=0\n"
        "[71234.502990] oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,"
        "task_memcg=/user.slice,task=python,pid={pid},uid=1000\n"
        "[71234.503102] Out of memory: Killed process {pid} (python) total-vm:71303168kB, anon-rss:62914560kB, "
        "file-rss:2048kB, shmem-rss:1024kB, UID:1000 pgtables:131072kB oom_score_adj:0\n"
    ),
}


@dataclass(frozen=True)
class Planted:
    """A row of the table.

    Attributes:
        name: Of the row.
        script: The file; "made": none.
        ranks: On which it runs.
        words: Arguments of the script, or what is made.
        recording: How it is recorded.
        end: "while": it is looked at while it goes on; "detail": torch checks its collectives; or a key of ANNOUNCED or EXPLAINED; "": it ends by itself.
        kinds: Any of which is right.
        culprits: Sets of ranks of which one is right; None: any is.
        is_held: Nobody looked at its answers while the rules were written.
    """

    name: str
    script: str
    ranks: int
    words: tuple[str, ...]
    recording: str
    end: str
    kinds: tuple[str, ...]
    culprits: tuple[tuple[int, ...], ...] | None
    is_held: bool


@dataclass(frozen=True)
class Judged:
    """How right an answer is."""

    is_kind: bool
    is_rank: bool
    is_certain: bool

    @property
    def is_certainly_wrong(self) -> bool:
        return self.is_certain and not (self.is_kind and self.is_rank)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", default="", metavar="PATTERN", help="of rows' names")
    parser.add_argument("--recorded-by", default="", metavar="PATTERN", help="of the ways to record")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="for what the jobs leave, and the answers")
    parser.add_argument("--again", action="store_true", help="run no job: judge what --keep has of earlier ones")
    options = parser.parse_args()
    if options.again and options.keep is None:
        parser.error("--again: needs --keep FOLDER, the one of the earlier jobs")
    chosen = [
        planted
        for planted in read_table()
        if re.search(options.row, planted.name) and re.search(options.recorded_by, planted.recording)
    ]
    judged = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.keep or Path(scratch)).resolve()
        print("| row | ranks | recorded by | right | said | ranks said | confidence | first line |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- |")
        for planted in chosen:
            if not options.again:
                record(planted, folder / planted.name)
            # what goes on is asked for as long as it does
            answer = read_answer(folder / planted.name) if planted.end == WHILE_IT_RUNS else ask(folder / planted.name)
            judged[planted] = judge(planted, answer)
            print_row(planted, answer, judged[planted])
    print()
    for line in count(judged):
        print(line)


def read_table() -> list[Planted]:
    """Read the table of jobs and what is right about them."""
    with TABLE.open(newline="") as file:
        rows = [row for row in csv.reader(file, delimiter="\t") if not row[0].startswith("#")]
    return [
        Planted(
            name,
            script,
            int(ranks),
            tuple(shlex.split(words)),
            recording,
            end,
            tuple(kinds.split(",")),
            read_culprits(culprits),
            held == "HELD",
        )
        for name, script, ranks, words, recording, end, kinds, culprits, held in rows
    ]


def read_culprits(text: str) -> tuple[tuple[int, ...], ...] | None:
    if text == ANY_RANK:
        return None
    return tuple(() if some == NO_RANK else tuple(int(rank) for rank in some.split(",")) for some in text.split("/"))


# --- running a job


def record(planted: Planted, folder: Path) -> None:
    """Run a job, and put what it leaves into `folder`."""
    shutil.rmtree(folder, ignore_errors=True)
    if planted.recording == "made":
        MADE[planted.words[0]](folder)
        return
    with tempfile.TemporaryDirectory() as scratch:
        job = RunningJob(planted, Path(scratch))
        try:
            job.run()
            shutil.copytree(job.left, folder)
            if planted.end == WHILE_IT_RUNS:
                ask(folder)
        finally:
            job.kill()


class RunningJob:
    """The processes of one job."""

    def __init__(self, planted: Planted, scratch: Path):
        self.left = scratch / "left"
        self.left.mkdir()
        self._planted = planted
        self._marker = scratch / "struck"
        self._request = scratch / "dump"
        # what `watch` prints is no part of its run folder
        is_watched = planted.recording == "watch"
        self._console = (scratch if is_watched else self.left) / "console.log"
        self._began = time.monotonic()
        self._output = self._console.open("ab")
        # torch's store, and nothing of the surrounding program's
        variables = {**os.environ, "PLANTED_MARKER": str(self._marker), "OMP_NUM_THREADS": "1"}
        if planted.end == CHECKED:
            variables["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
        if planted.recording == "debug":
            variables["DEBUG_DUMPS"] = str(self.left / "debug")
            variables["DEBUG_PORT"] = str(find_port())
        if planted.recording == "torchrun":
            (self.left / "dumps").mkdir()
            variables["FR_DUMP_REQUEST"] = str(self._request)
            variables["TORCH_FR_DUMP_TEMP_FILE"] = str(self.left / "dumps" / "nccl_trace_rank_")
        self._process = subprocess.Popen(
            self._command(),
            cwd=HERE,
            env=variables,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _command(self) -> list[str]:
        planted = self._planted
        torchrun = [str(BIN / "torchrun"), "--nproc-per-node", str(planted.ranks), "--master-port", str(find_port())]
        if planted.recording == "torchrun":
            torchrun += ["--log-dir", str(self.left / "logs"), "--redirects", "3", "--tee", "3"]
        words = [*torchrun, planted.script, *planted.words]
        if planted.recording == "own":
            return [*words, "--run-dir", str(self.left / "run")]
        if planted.recording == "watch":
            lite = [sys.executable, "-m", "megatron_lite", "watch", "--run-dir", str(self.left), "--"]
            return [*lite, *words]
        return words

    def run(self) -> None:
        """Wait until the job has ended, or is to be looked at while it goes on."""
        planted = self._planted
        if planted.end == WHILE_IT_RUNS:
            self._wait(lambda: self._is_struck() or (not self._has_plant() and self._is_late()))
            time.sleep(SLOW_SECONDS if FailureKind.SLOW.value in planted.kinds else HANGS_SECONDS)
            self._dump()
            return
        if planted.end in ANNOUNCED:
            self._wait(self._is_late)
            self._announce(ANNOUNCED[planted.end])
            os.killpg(self._process.pid, signal.SIGTERM)
        elif self._has_plant() and planted.recording == "torchrun":
            self._wait(self._is_struck)
            self._wait(lambda: False, HANGS_SECONDS)
            self._dump()
        self._wait(lambda: False)
        if planted.end in EXPLAINED:
            pid = self._marker.read_text().split()[1]
            name = "kern.log" if planted.end == "kernel-oom" else "slurm-9113.out"
            (self.left / name).write_text(EXPLAINED[planted.end].format(pid=pid))

    def _has_plant(self) -> bool:
        return "--plant" in self._planted.words

    def _is_struck(self) -> bool:
        return self._marker.exists()

    def _is_late(self) -> bool:
        return bool(LATE_STEP.search(self._console.read_text(errors="replace")))

    def _wait(self, is_reached, seconds: float = MAX_SECONDS) -> None:
        """Wait until something is reached, the job has ended, or time is over."""
        until = min(time.monotonic() + seconds, self._began + MAX_SECONDS)
        while time.monotonic() < until and self._process.poll() is None and not is_reached():
            time.sleep(0.1)

    def _announce(self, text: str) -> None:
        if not text:
            return
        line = text.format(time=time.strftime("%Y-%m-%dT%H:%M:%S")) + "\n"
        file = self.left / "slurm-9113.out" if self._planted.recording == "watch" else self._console
        with file.open("a") as opened:
            opened.write(line)

    def _dump(self) -> None:
        """Dump the flight recorders and stacks of ranks that are there."""
        if self._planted.recording != "torchrun" or self._process.poll() is not None:
            return
        self._request.touch()
        stacks = self.left / "stacks"
        stacks.mkdir()
        for rank, pid in find_ranks(self._process.pid).items():
            words = [str(BIN / "py-spy"), "dump", "--nonblocking", "--pid", str(pid)]
            with contextlib.suppress(subprocess.TimeoutExpired):
                done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=10)
                if done.stdout:
                    (stacks / f"rank{rank}.txt").write_text(done.stdout)
        time.sleep(0.5)

    def kill(self) -> None:
        for pid in find_ranks(self._process.pid).values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._output.close()


def find_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def find_ranks(launcher: int) -> dict[int, int]:
    """Find the processes that a launcher has started, by rank; not those that they started themselves."""
    found: dict[int, int] = {}
    waiting = [launcher]
    while waiting:
        for pid in find_children(waiting.pop()):
            rank = read_rank(pid)
            if rank is None:
                waiting.append(pid)
            else:
                found[rank] = pid
    return found


def find_children(pid: int) -> list[int]:
    found = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


def read_rank(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            name, _, value = variable.partition(b"=")
            if name == b"RANK":
                return int(value)
    return None


# --- judging the answer


def ask(folder: Path) -> Postmortem | None:
    """Let `megatron-lite postmortem` conclude on a folder; None: it did not answer."""
    answer = folder.parent / f"{folder.name}.json"
    answer.unlink(missing_ok=True)
    words = [sys.executable, "-m", "megatron_lite", "postmortem", str(folder), "--json", str(answer)]
    try:
        done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=MAX_POSTMORTEM_SECONDS)
    except subprocess.TimeoutExpired:
        return None
    answer.with_suffix(".txt").write_text(done.stdout + done.stderr)
    return read_answer(folder)


def read_answer(folder: Path) -> Postmortem | None:
    """Read what was concluded on a folder; None: nothing was."""
    answer = folder.parent / f"{folder.name}.json"
    if not answer.exists():
        return None
    return msgspec.json.decode(answer.read_bytes(), type=Postmortem)


def judge(planted: Planted, answer: Postmortem | None) -> Judged:
    if answer is None:
        return Judged(False, False, False)
    is_kind = answer.kind.value in planted.kinds
    is_rank = planted.culprits is None or answer.ranks in planted.culprits
    return Judged(is_kind, is_rank, answer.confidence == "high")


def print_row(planted: Planted, answer: Postmortem | None, judged: Judged) -> None:
    mark = "" if judged.is_kind and judged.is_rank else "**wrong** "
    said = [f"{mark}{ERRED}", "", "", ""]
    if answer is not None:
        ranks = ", ".join(map(str, answer.ranks))
        said = [mark + answer.kind.value, ranks, answer.confidence, answer.verdict]
    held = " (held)" if planted.is_held else ""
    cells = [planted.name + held, str(planted.ranks), planted.recording, " or ".join(planted.kinds), *said]
    print("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |", flush=True)


def count(judged: dict[Planted, Judged]) -> list[str]:
    """Count right answers: of all failures, of those that nobody looked at, and of healthy jobs."""
    healthy = {planted for planted in judged if FailureKind.NONE.value in planted.kinds}
    failed = [planted for planted in judged if planted not in healthy]
    lines = []
    for title, rows in {
        "Failures": failed,
        "Held failures": [planted for planted in failed if planted.is_held],
        "Healthy jobs": list(healthy),
    }.items():
        sums = Counter[str]()
        for planted in rows:
            one = judged[planted]
            sums["kinds"] += int(one.is_kind)
            sums["ranks"] += int(one.is_rank)
            sums["wrong"] += int(one.is_certainly_wrong)
        lines.append(
            f"{title}: {len(rows)}; kind right {sums['kinds']}, ranks right {sums['ranks']}, "
            f"wrong with high confidence {sums['wrong']}."
        )
    return lines


if __name__ == "__main__":
    main()
