"""What the step timeline costs: steps with and without it, alternating in one process, and its parts by themselves.

    python benchmarks/step_timeline.py [--steps 600] [--micro-batches 4]

Prints the median difference of neighboring steps with and without it, and microseconds per phase, per step, and per
console line. On a GPU if there is one, else on the CPU.
"""

import argparse
import random
import statistics
import time

import torch
import torch.distributed as dist

from megatron_lite.config.command_line import read_command_line
from megatron_lite.config.plan import Plan, resolve
from megatron_lite.config.world import World
from megatron_lite.data.gpt_dataset import MockDataset
from megatron_lite.instruments.base import Instruments
from megatron_lite.instruments.timeline import Timeline
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.parallel.groups import make_groups
from megatron_lite.parallel.process_group import find_device
from megatron_lite.phases import Phase
from megatron_lite.train.build_replica import build_replica
from megatron_lite.train.loop import Progress
from megatron_lite.train.rank_stats import gather
from megatron_lite.train.real_backend import RealBackend
from megatron_lite.train.step import BatchMaker, TrainingStep
from megatron_lite.train.step_metrics import StepMetrics

FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 2 --train-iters 100000 --lr 1e-4 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 127"
)
WARM_UP = 10


class Trainer:
    """What a run repeats in every step."""

    def __init__(self, plan: Plan):
        device = find_device(plan.device, plan.world)
        replica = build_replica(plan, make_groups(plan, device), RealBackend(device))
        optimizer = Optimizer(plan, replica.parameters, device)
        self.plan, self.step = (
            plan,
            TrainingStep(plan, replica, optimizer, BatchMaker(plan.args.data, plan.layout, device, 127)),
        )
        self.meter, self.progress = StepMetrics(optimizer, device), Progress()
        data = MockDataset(10**7, plan.shape.seq_length, plan.vocab_size, 1)
        windows = (torch.from_numpy(data[i]) for i in range(2 * 10**6))
        self.batches = (torch.stack(pair) for pair in zip(windows, windows))

    def __call__(self, instruments: Instruments) -> float:
        """One step; returns its seconds."""
        started = time.perf_counter()
        with instruments.step(self.progress.step + 1):
            result = self.step(self.batches, self.progress.consumed, instruments.phase)
            self.progress.iteration += 1
            self.progress.consumed += result.samples
            with instruments.phase(Phase.LOG):
                self.meter.record(self.progress, result)
        if self.plan.device == "cuda":
            torch.cuda.synchronize()  # else a step would be charged with the one before
        return time.perf_counter() - started


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--micro-batches", type=int, default=4)
    options = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    words = [*FLAGS.split(), "--global-batch-size", str(2 * options.micro_batches)]
    plan = resolve(read_command_line(words).args, World(gpus=torch.cuda.device_count()), 128)
    kinds = {}
    for on in (True, False):
        timeline = Timeline()
        timeline.set_up(detailed=on, cuda=plan.device == "cuda")
        kinds[on] = Instruments([timeline], print), timeline
    _compare(Trainer(plan), kinds, options.steps)
    _parts(plan, *kinds[True])
    dist.destroy_process_group()


def _compare(trainer: Trainer, kinds: dict, steps: int):
    times = {on: [] for on in kinds}
    for number in range(WARM_UP + steps):
        for on in random.sample(sorted(kinds), 2):
            seconds = trainer(kinds[on][0])
            if number >= WARM_UP:
                times[on].append(seconds)
    for _, timeline in kinds.values():
        timeline.take()
    trainer.meter.take()
    medians = {on: 1000 * statistics.median(values) for on, values in times.items()}
    more = 1e6 * statistics.median(on - off for on, off in zip(times[True], times[False]))
    print(
        f"step: {medians[True]:.3f} ms with, {medians[False]:.3f} ms without; ratio of medians "
        f"{medians[True] / medians[False]:.4f}; {more:.0f} us more, the median of {steps} pairs: "
        f"{100 * more / 50_000:.2f}% of a step of 50 ms"
    )


def _parts(plan: Plan, instruments: Instruments, timeline: Timeline):
    number, rounds, medians = 20, 500, []
    for phases in (number, 0):
        seconds = []
        for step in range(1, rounds):
            started = time.perf_counter()
            with instruments.step(step):
                for _ in range(phases):
                    with instruments.phase(Phase.FORWARD):
                        pass
            seconds.append(time.perf_counter() - started)
        medians.append(statistics.median(seconds))
    with_phases, alone = medians
    print(f"a phase: {1e6 * (with_phases - alone) / number:.2f} us; a step without phases: {1e6 * alone:.1f} us")
    times, seconds = timeline.take(wait=True), []
    for _ in range(20):
        started = time.perf_counter()
        gather(times[:100], 0, find_device(plan.device, plan.world), 1).build_record()
        seconds.append(time.perf_counter() - started)
    print(f"a console line's figures of 100 steps: {1e6 * statistics.median(seconds):.0f} us, once per --log-interval")


if __name__ == "__main__":
    main()
