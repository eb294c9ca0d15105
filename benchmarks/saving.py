"""How long a checkpoint keeps training waiting: torch.save with fsync, a synchronous save and --async-save, alternating.

    python benchmarks/saving.py FOLDER [--layers 12] [--hidden 768] [--rounds 7]

Prints the seconds for which each kind keeps the training loop, as medians, their ratio to torch.save of the same round, and the CPU seconds
of all of a save, also of what it does in the background. FOLDER should
be on the disk that checkpoints go to; it is filled with some copies of the state and emptied again.
"""

import argparse
import contextlib
import gc
import io
import os
import shutil
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_lite.config.command_line import read_command_line
from megatron_lite.config.plan import resolve
from megatron_lite.config.world import World
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.parallel.groups import make_groups
from megatron_lite.train.build_replica import build_replica
from megatron_lite.train.checkpoint import Checkpoints
from megatron_lite.train.loop import Progress
from megatron_lite.train.real_backend import RealBackend

FLAGS = (
    "--num-attention-heads 12 --seq-length 128 --max-position-embeddings 1024 --micro-batch-size 1 --train-iters 9 "
    "--lr 1e-4 --mock-data --tokenizer-type NullTokenizer --vocab-size 50256 --fp16"
)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with contextlib.redirect_stdout(io.StringIO()):
        kinds = _kinds(options)
    times, cpu_times = {name: [] for name in kinds}, {name: [] for name in kinds}
    gc.freeze()  # as in training
    for number in range(-1, options.rounds):
        for name, save in kinds.items():
            started, cpu_started = time.perf_counter(), time.process_time()
            wait = save(number + 2)
            seconds = time.perf_counter() - started
            wait()
            if number >= 0:  # the first one makes files and memory that the others find
                times[name].append(seconds)
                cpu_times[name].append(time.process_time() - cpu_started)
    for name, seconds in times.items():
        ratios = [own / other for own, other in zip(seconds, times["torch.save"])]
        print(
            f"{name:<18}{statistics.median(seconds):8.3f} s ({min(seconds):.3f} to {max(seconds):.3f}), "
            f"{statistics.median(ratios):.2f} of torch.save ({min(ratios):.2f} to {max(ratios):.2f}); "
            f"CPU {statistics.median(cpu_times[name]):.3f} s"
        )
    shutil.rmtree(options.folder)
    dist.destroy_process_group()


def _kinds(options) -> dict:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    words = [*FLAGS.split(), "--num-layers", str(options.layers), "--hidden-size", str(options.hidden)]
    ours = {}
    for name, extra in (("synchronous save", []), ("--async-save", ["--async-save"])):
        argv = [*words, "--save", str(options.folder / name), "--save-retain-interval", "1000", *extra]
        plan = resolve(read_command_line(argv).args, World(), 50257)
        replica = build_replica(plan, make_groups(plan, device), RealBackend(device))
        optimizer = Optimizer(plan, replica.parameters, device)
        ours[name] = (Checkpoints(plan, replica, optimizer, device), replica.model, optimizer)
    _, model, optimizer = ours["synchronous save"]

    def torch_save(number: int):
        state = {"masters": optimizer.weights.masters, "engine": optimizer.engine.state_dict()}
        with open(options.folder / "state.pt", "wb") as file:
            torch.save(state | {"model": model.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())
        return lambda: None

    def save_with(checkpoints: Checkpoints):
        def save(number: int):
            checkpoints.save(Progress(iteration=number))
            return checkpoints.finish

        return save

    options.folder.mkdir(parents=True, exist_ok=True)
    return {"torch.save": torch_save, **{name: save_with(checkpoints) for name, (checkpoints, _, _) in ours.items()}}


if __name__ == "__main__":
    main()
