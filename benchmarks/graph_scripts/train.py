"""Trains a small model on CPUs, with one thing slow at a time, in its usual and its mended form.

The flags choose the form; benchmarks/graph.py runs both under `megatron-lite watch`.
"""

import argparse
import contextlib
import os
import time
from concurrent.futures import ThreadPoolExecutor, wait

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)


class Slow(Dataset):
    """Batches that take a while to read, as from a disk that is far away."""

    def __init__(self, batches: int, rows: int, columns: int, read_ms: float):
        self.batches = batches
        self.rows = rows
        self.columns = columns
        self.read_ms = read_ms

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.read_ms / 1e3)
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
    parser.add_argument("--step-file", help="is given the seconds of each step")
    return parser.parse_args()


def write_report(milliseconds: float) -> None:
    """Wait, as for a disk that is far away."""
    time.sleep(milliseconds / 1e3)


def main() -> None:
    """Train."""
    given = read_arguments()
    is_parallel = "RANK" in os.environ
    rank = int(os.environ.get("RANK", "0"))
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if is_parallel:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = []
    for _ in range(given.layers):
        layers += [nn.Linear(given.columns, given.columns), nn.ReLU()]
    model: nn.Module = nn.Sequential(*layers)
    if is_parallel:
        model = DistributedDataParallel(model, bucket_cap_mb=given.bucket_mb)
    fused = given.optimizer == "fused"
    foreach = given.optimizer == "foreach"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=foreach, fused=fused)
    data = Slow(given.steps * given.accumulate, given.rows, given.columns, given.read_ms)
    loader = DataLoader(data, batch_size=None, num_workers=given.workers)
    batches = iter(loader)
    pool = ThreadPoolExecutor(1)
    report = pool.submit(write_report, 0)
    seconds = []
    for _ in range(given.steps):
        began = time.perf_counter()
        optimizer.zero_grad()
        for number in range(given.accumulate):
            batch = next(batches)
            is_last = number == given.accumulate - 1
            without = given.no_sync and is_parallel and not is_last
            with model.no_sync() if without else contextlib.nullcontext():
                loss = model(batch).square().mean()
                if given.late_ms and rank == ranks - 1:
                    time.sleep(given.late_ms / 1e3 / given.accumulate)
                loss.backward()
        optimizer.step()
        if given.report_ms:
            with torch.profiler.record_function("write report"):
                if given.report_in_thread:
                    wait([report])
                    report = pool.submit(write_report, given.report_ms)
                else:
                    write_report(given.report_ms)
        seconds.append(time.perf_counter() - began)
    if given.step_file and rank == 0:
        with open(given.step_file, "w", encoding="utf-8") as file:
            file.write("\n".join(f"{one:.6f}" for one in seconds))
    if is_parallel:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
