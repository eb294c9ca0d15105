"""Trains a small model on CPUs, with one thing slow at a time, in its usual and its mended form.

The flags choose the form; benchmarks/graph_pairs.py runs both under `megatron-lite watch`. What is to compute draws random
numbers, so that it takes longer where a core is shared; what is to wait sleeps.
"""

import argparse
import contextlib
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, wait

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)


class Slow(Dataset):
    """Batches that take a while to read, as from a disk that is far away, or to compute."""

    def __init__(self, batches: int, given: argparse.Namespace):
        self.batches = batches
        self.rows = given.rows
        self.columns = given.columns
        self.read_ms = given.read_ms
        self.read_numbers = given.read_numbers

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.read_ms / 1e3)
        compute(self.read_numbers)
        generator = torch.Generator().manual_seed(index)
        return torch.randn(self.rows, self.columns, generator=generator)


def read_arguments() -> argparse.Namespace:
    """Read the form."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--columns", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--read-ms", type=float, default=0.0, help="that reading a batch takes")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--no-sync", action="store_true", help="gradients are summed over ranks once per step")
    parser.add_argument("--optimizer", choices=("for-loop", "foreach", "fused"), default="foreach")
    parser.add_argument("--late-ms", type=float, default=0.0, help="that the last rank sleeps in each step")
    parser.add_argument("--bucket-mb", type=float, default=25.0)
    parser.add_argument("--report-ms", type=float, default=0.0, help="that writing a report takes in each step")
    parser.add_argument("--report-in-thread", action="store_true", help="it is written beside the next step")
    parser.add_argument("--report-numbers", type=float, default=0.0, help="millions that writing a report computes")
    parser.add_argument("--read-numbers", type=float, default=0.0, help="millions that reading a batch computes")
    parser.add_argument("--late-numbers", type=float, default=0.0, help="millions that the last rank computes besides")
    parser.add_argument("--metrics", type=int, default=0, help="numbers that ranks average in each step, one by one")
    parser.add_argument("--metrics-at-once", action="store_true", help="they are averaged together")
    parser.add_argument("--sum-afterwards", action="store_true", help="gradients are summed by hand, without DDP")
    parser.add_argument("--gates", type=int, default=0, help="element-wise operators behind each layer")
    parser.add_argument("--compile", action="store_true", help="each layer with what is behind it is compiled")
    parser.add_argument("--save-every", type=int, default=0, help="steps between checkpoints")
    parser.add_argument("--save-file", help="the checkpoint")
    return parser.parse_args()


def compute(millions: float) -> None:
    """Draw so many random numbers."""
    for _ in range(round(millions * 10)):
        torch.randn(100_000)


def write_report(given: argparse.Namespace) -> None:
    """Wait, as for a disk that is far away, and compute."""
    time.sleep(given.report_ms / 1e3)
    compute(given.report_numbers)


class Gated(nn.Module):
    """A layer with element-wise operators behind it."""

    def __init__(self, columns: int, gates: int):
        super().__init__()
        self.layer = nn.Linear(columns, columns)
        self.gates = gates

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        values = self.layer(batch)
        for _ in range(self.gates):
            values = values + 0.1 * torch.sigmoid(values)
        return torch.relu(values)


def build_model(given: argparse.Namespace) -> nn.Module:
    """Build the layers."""
    layers = [Gated(given.columns, given.gates) for _ in range(given.layers)]
    if given.compile:
        for layer in layers:
            layer.compile()
    return nn.Sequential(*layers)


def sum_gradients(parameters: Iterable[nn.Parameter], ranks: int) -> None:
    """Average the gradients over ranks, one after the other."""
    for parameter in parameters:
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= ranks


def average_metrics(loss: torch.Tensor, given: argparse.Namespace) -> list[float]:
    """Average numbers over ranks, and read them."""
    metrics = torch.stack([loss.detach() * number for number in range(given.metrics)])
    with torch.profiler.record_function("metrics"):
        if given.metrics_at_once:
            dist.all_reduce(metrics)
            return metrics.tolist()
        read = []
        for metric in metrics.unbind():
            dist.all_reduce(metric)
            read.append(metric.item())
        return read


def main() -> None:
    """Train."""
    given = read_arguments()
    is_parallel = "RANK" in os.environ
    rank = int(os.environ.get("RANK", "0"))
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if is_parallel:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = build_model(given)
    if is_parallel and not given.sum_afterwards:
        model = DistributedDataParallel(model, bucket_cap_mb=given.bucket_mb)
    fused = given.optimizer == "fused"
    foreach = given.optimizer == "foreach"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=foreach, fused=fused)
    data = Slow(given.steps * given.accumulate, given)
    loader = DataLoader(data, batch_size=None, num_workers=given.workers)
    batches = iter(loader)
    has_report = given.report_ms or given.report_numbers
    pool = ThreadPoolExecutor(1)
    report = pool.submit(int)
    for step in range(1, given.steps + 1):
        optimizer.zero_grad()
        for number in range(given.accumulate):
            batch = next(batches)
            is_last = number == given.accumulate - 1
            without = given.no_sync and is_parallel and not is_last
            with model.no_sync() if without else contextlib.nullcontext():
                loss = model(batch).square().mean()
                if rank == ranks - 1:
                    time.sleep(given.late_ms / 1e3 / given.accumulate)
                    compute(given.late_numbers / given.accumulate)
                loss.backward()
        if given.sum_afterwards:
            with torch.profiler.record_function("sum gradients"):
                sum_gradients(model.parameters(), ranks)
        optimizer.step()
        if given.metrics:
            average_metrics(loss, given)
        if has_report:
            with torch.profiler.record_function("write report"):
                if given.report_in_thread:
                    wait([report])
                    report = pool.submit(write_report, given)
                else:
                    write_report(given)
        if given.save_every and step % given.save_every == 0 and rank == 0:
            with torch.profiler.record_function("save checkpoint"):
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, given.save_file)
    if is_parallel:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
