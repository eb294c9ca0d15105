"""What samples of the hardware cost: one sample by itself, and steps with and without them, alternating in one process.

    python -m benchmarks.hardware_samples [--blocks 10] [--seconds 4] [--period 1]

Prints CPU and wall time of a sample, without and with counters; the ratio of the medians of steps with a sampling thread
against steps without, and of the process' CPU time per step, which a busy machine disturbs less; and what the samples add to a console line. On a GPU with nvidia-ml-py the
samples read it, else the host alone.
"""

import argparse
import statistics
import time

import torch
import torch.distributed as dist

from benchmarks.step_timeline import FLAGS, WARM_UP, Trainer
from megatron_lite.config.command_line import read_command_line
from megatron_lite.config.plan import Plan, resolve
from megatron_lite.config.world import World
from megatron_lite.formats.hardware_record import HardwareFigures
from megatron_lite.instruments.base import Instruments
from megatron_lite.instruments.hardware_sampler import SAMPLES_PER_COUNT, HardwareSampler, open_sensors
from megatron_lite.instruments.host_counters import HostCounters
from megatron_lite.instruments.timeline import Timeline
from megatron_lite.parallel.process_group import find_device
from megatron_lite.train.rank_stats import gather

SAMPLES = 500


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=10, help="of each kind")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a block")
    parser.add_argument("--period", type=float, default=1.0, help="seconds between samples")
    options = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    words = [*FLAGS.split(), "--global-batch-size", "8"]
    plan = resolve(read_command_line(words).args, World(gpus=torch.cuda.device_count()), 128)
    sensors = open_sensors(0 if plan.device == "cuda" else None)
    print(f"sensors of a GPU: {sensors if sensors is None or isinstance(sensors, str) else 'NVML'}")
    _time_samples(HardwareSampler(sensors, HostCounters()))
    _compare(plan, sensors, options)
    _time_lines(plan)
    dist.destroy_process_group()


def _time_samples(sampler: HardwareSampler):
    """CPU and wall time of one sample."""
    sampler.sample()
    for kind, with_counts in (("gauges alone", False), ("with counters", True)):
        cpu_s, wall_s = [], []
        for number in range(SAMPLES):
            sampler._sampled = 1 + number % (SAMPLES_PER_COUNT - 1)  # not their turn
            began = time.perf_counter()
            cpu_s.append(sampler.sample(with_counts))
            wall_s.append(time.perf_counter() - began)
        cpu_us, wall_us = 1e6 * statistics.median(cpu_s), 1e6 * statistics.median(wall_s)
        print(f"a sample, {kind}: {cpu_us:.0f} us of CPU time, {wall_us:.0f} us in all (medians of {SAMPLES})")


def _compare(plan: Plan, sensors, options):
    """Steps beside a sampling thread and without it, in blocks that alternate."""
    trainer = Trainer(plan)
    timeline = Timeline()
    timeline.set_up(detailed=True, cuda=plan.device == "cuda")
    instruments = Instruments([timeline], print)
    for _ in range(WARM_UP):
        trainer(instruments)
    times, cpu_ms, ratios, samples = {True: [], False: []}, {True: [], False: []}, [], 0
    for _ in range(options.blocks):
        for on in (True, False):
            sampler = HardwareSampler(sensors, HostCounters(), options.period)
            if on:
                sampler.resume(0)
            block, ends, used = [], time.perf_counter() + options.seconds, time.process_time()
            while time.perf_counter() < ends:
                block.append(trainer(instruments))
            cpu_ms[on].append(1000 * (time.process_time() - used) / len(block))
            if on:
                samples += sampler.take().samples
                sampler.finish()
            times[on] += block
            timeline.take()
            trainer.meter.take()
        ratios.append(cpu_ms[True][-1] / cpu_ms[False][-1])
    medians = {on: 1000 * statistics.median(values) for on, values in times.items()}
    print(
        f"steps beside {samples} samples, one per {options.period:g} s: median {medians[True]:.3f} ms of "
        f"{len(times[True])}, without {medians[False]:.3f} ms of {len(times[False])}; ratio of medians "
        f"{medians[True] / medians[False]:.4f}"
    )
    of_cpu = {on: statistics.median(values) for on, values in cpu_ms.items()}
    print(
        f"CPU time of the process per step: {of_cpu[True]:.3f} ms, without {of_cpu[False]:.3f} ms; ratio of medians of "
        f"{options.blocks} blocks {of_cpu[True] / of_cpu[False]:.4f}; by pairs of blocks {min(ratios):.3f} to "
        f"{max(ratios):.3f}"
    )


def _time_lines(plan: Plan):
    """What the figures add to a console line."""
    device = find_device(plan.device, plan.world)
    figures = HardwareFigures(**{name: 1.5 for name in HardwareFigures.__struct_fields__})
    medians = []
    for hardware in (None, figures):
        seconds = []
        for _ in range(200):
            began = time.perf_counter()
            gather([], 0, device, 1, hardware).build_record()
            seconds.append(time.perf_counter() - began)
        medians.append(1e6 * statistics.median(seconds))
    print(f"a console line: {medians[1] - medians[0]:.0f} us more with all {len(figures.__struct_fields__)} figures")


if __name__ == "__main__":
    main()
