"""Runs that are killed at random moments while they save, and resumed. A script, so that its forks are cheap and clean.

    python tests/killed_saves.py FOLDER MOMENTS RANKS [FLAG ...]

MOMENTS: how many, drawn at random; "every" kills one run at its first use of the save folder, the next one at its second,
and so on through a whole run of one rank.

Prints a line for each moment and exits 1 unless every resumed run went on from the newest complete checkpoint and ended
exactly where the uninterrupted one did.
"""

import gc
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch._dynamo  # every optimizer imports it: once here, instead of in each fork
import torch.distributed as dist
import torch.distributed.checkpoint  # and so does every save
import xxhash
from support.launch import DROPOUT, checkpoint, flags, steps, train

from megatron_lite.config.world import World
from megatron_lite.errors import CheckpointError

LAST = 4
RUN = f"--num-layers 1 --micro-batch-size 2 --train-iters {LAST} --fp16 --initial-loss-scale 4096 --log-interval 1 --eval-iters 0 --save-interval 1"


USES = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"}


def start(folder: Path, name: str, ranks: int, words: list[str], dies_at: int | None = None) -> list[int]:
    """Fork the ranks of one run; returns their process ids. dies_at: the use of the save folder that kills it."""
    (folder / name).mkdir()
    return [_fork(folder, name, World(rank, ranks, rank, ranks), words, dies_at) for rank in range(ranks)]


def die_at(use: int, save: str):
    """Let this process kill itself before its `use`th change of something in `save`, or its opening for writing."""
    left = [use]

    def hook(event: str, arguments: tuple):
        if event not in USES or not isinstance(arguments[0], (str, os.PathLike)) or save not in os.fspath(arguments[0]):
            return
        if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR):
            return
        if event != "open" and os.path.lexists(arguments[0]) == (event == "os.mkdir"):
            return  # nothing to make, or to move or remove: the folder stays as it is
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def _fork(folder: Path, name: str, world: World, words: list[str], dies_at: int | None) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        if dies_at is not None:
            die_at(dies_at, words[words.index("--save") + 1])
        with open(folder / name / f"rank_{world.rank}.txt", "w", buffering=1) as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
            sys.stdout = sys.stderr = out
            store = dist.FileStore(str(folder / name / "store"), world.size)
            dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
            train(flags(RUN, *DROPOUT, *words), folder / name / f"run_{world.rank}", world)
            dist.barrier()
            dist.destroy_process_group()
            code = 0
    except CheckpointError as error:
        print(f"error: {error}", flush=True)
        code = 2
    finally:
        os._exit(code)


def wait(pids: list[int]) -> list[int]:
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def kill(pids: list[int]):
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def digest(save: Path, iteration: int) -> str:
    """Of every tensor and plain value of a checkpoint."""
    total = hashlib.sha256()
    for name, value in sorted(checkpoint(save, iteration).items()):
        is_tensor = isinstance(value, torch.Tensor)
        data = value.flatten().view(torch.uint8).numpy().tobytes() if is_tensor else value.to_json().encode()
        total.update(name.encode() + data)
    return total.hexdigest()


def complete(save: Path) -> list[int]:
    """Iterations whose folder holds all of its manifest, byte for byte: told by other code than the trainer's."""
    found = []
    for folder in save.glob("iter_*"):
        with suppress(OSError):
            files = json.loads((folder / "manifest.json").read_text())["files"]
            if all(
                xxhash.xxh3_128((folder / name).read_bytes()).hexdigest() == entry["xxh3_128"]
                for name, entry in files.items()
            ):
                found.append(int(folder.name[5:]))
    return sorted(found)


def left_over(save: Path) -> str:
    return " ".join(sorted(path.name for path in save.glob(".*"))) if save.exists() else ""


@dataclass
class Trials:
    """Runs in `folder`, compared with the uninterrupted one in `whole`."""

    folder: Path
    ranks: int
    words: list[str]
    whole: Path

    def at_random(self, number: int, seconds: float, draw: random.Random) -> bool:
        """Kill all ranks, as a machine does, or one, at some moment after the first save began."""
        pids, save = self._start(number)
        while not any(save.glob("*iter_*")):
            time.sleep(0.001)
        time.sleep(draw.uniform(0, seconds))
        kill(pids if draw.random() < 0.7 else [draw.choice(pids)])
        time.sleep(0.05)
        kill(pids)
        return self._judge(number, wait(pids))

    def at_use(self, number: int) -> bool | None:
        """Kill at the `number`th use of the save folder; None if there are not so many."""
        pids, _ = self._start(number, number)
        codes = wait(pids)
        return None if codes == [0] else self._judge(number, codes)

    def _start(self, number: int, dies_at: int | None = None) -> tuple[list[int], Path]:
        save = self.folder / f"save_{number}"
        words = [*self.words, "--save", str(save), "--load", str(save)]
        return start(self.folder, f"killed_{number}", self.ranks, words, dies_at), save

    def _judge(self, number: int, codes: list[int]) -> bool:
        save, well = self.folder / f"save_{number}", [0] * self.ranks
        newest, rubbish = max(complete(save), default=0), left_over(save)
        words = [*self.words, "--save", str(save), "--load", str(save)]
        second = wait(start(self.folder, f"resumed_{number}", self.ranks, words))
        run = self.folder / f"resumed_{number}" / f"run_{self.ranks - 1}"  # the last rank logs
        done = [record["iteration"] for record in steps(run)] if second == well and newest < LAST else []
        good = second == well and done == list(range(newest + 1, LAST + 1))
        good = good and digest(save, LAST) == digest(self.whole, LAST)
        good = good and not (done and left_over(save))  # a run that saved nothing cleared nothing away
        print(
            f"{number}: killed {codes}, newest complete {newest}, left {rubbish or '-'}; resumed {second} with "
            f"{done[0] if done else 'nothing to do'}: {'good' if good else 'BAD'}",
            flush=True,
        )
        if good:
            for path in (save, self.folder / f"killed_{number}", run.parent):
                shutil.rmtree(path)
        return good


def main(folder: Path, moments: str, ranks: int, words: list[str]) -> int:
    torch.set_num_threads(1)
    gc.freeze()  # what is imported is no garbage, and need not be walked in each fork
    folder.mkdir(parents=True, exist_ok=True)
    whole = folder / "save_whole"
    assert wait(start(folder, "whole", ranks, [*words, "--save", str(whole)])) == [0] * ranks
    trials = Trials(folder, ranks, words, whole)
    results = []
    if moments == "every":
        while (good := trials.at_use(len(results) + 1)) is not None:
            results.append(good)
    else:
        draw, seconds = random.Random(ranks), 1.3 * saving_seconds(whole)
        results = [trials.at_random(number, seconds, draw) for number in range(1, int(moments) + 1)]
    print(f"{sum(results)} of {len(results)} good")
    return 0 if results and all(results) else 1


def saving_seconds(whole: Path) -> float:
    """From the beginning of the first save to the end of the last one of a run."""
    times = [(path / "manifest.json").stat().st_mtime for path in sorted(whole.glob("iter_*"))]
    return (times[-1] - times[0]) * len(times) / (len(times) - 1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:]))
