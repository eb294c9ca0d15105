"""A plain loop on several ranks, with a flag for each thing that makes it slow; parallel.yaml declares them for tune."""

import argparse
import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

COLUMNS = 256


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--bucket-mb", type=float, default=25.0)
    parser.add_argument("--no-sync", action="store_true", help="gradients are summed over ranks once per step")
    given = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = []
    for _ in range(given.layers):
        layers += [nn.Linear(COLUMNS, COLUMNS), nn.ReLU()]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=given.bucket_mb)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for step in range(given.steps):
        optimizer.zero_grad()
        for number in range(given.accumulate):
            seed = 1000 * step + 10 * number + dist.get_rank()
            batch = torch.randn(16, COLUMNS, generator=torch.Generator().manual_seed(seed))
            is_last = number == given.accumulate - 1
            with model.no_sync() if given.no_sync and not is_last else contextlib.nullcontext():
                (model(batch) - batch).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
