"""A plain training loop, with a flag for each thing that makes it slow; loop.yaml declares them for tune."""

import argparse
import gc
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

COLUMNS = 64


class Rows(Dataset):
    """Batches that take a while to read, as from a disk that is far away."""

    def __init__(self, batches: int, read_ms: float):
        self.batches = batches
        self.read_ms = read_ms
        self.rows = torch.randn(32, COLUMNS, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.read_ms / 1e3)
        return self.rows * (1 + index % 7)


def read_arguments() -> argparse.Namespace:
    """Read the form of the loop."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--read-ms", type=float, default=0.0)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--optimizer", choices=("for-loop", "foreach", "fused"), default="fused")
    parser.add_argument("--detect-anomaly", action="store_true")
    parser.add_argument("--collect-garbage", action="store_true", help="in every step")
    parser.add_argument("--metric", action="store_true", help="computed by a second pass in every step")
    return parser.parse_args()


def main() -> None:
    """Train."""
    given = read_arguments()
    torch.manual_seed(0)
    torch.autograd.set_detect_anomaly(given.detect_anomaly)
    layers = []
    for _ in range(given.layers):
        layers += [nn.Linear(COLUMNS, COLUMNS), nn.ReLU()]
    model = nn.Sequential(*layers)
    is_fused = given.optimizer == "fused"
    is_foreach = given.optimizer == "foreach"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=is_fused, foreach=is_foreach)
    data = Rows(given.steps, given.read_ms)
    kept = [[number] for number in range(60_000)] if given.collect_garbage else []
    correct = 0.0
    for batch in DataLoader(data, batch_size=None, num_workers=given.workers):
        optimizer.zero_grad()
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        if given.metric:
            with torch.no_grad():
                for _ in range(4):
                    correct += float((model(batch) > 0).float().mean())
        if given.collect_garbage:
            gc.collect()
    print(f"metric {correct}, {len(kept)} objects")


if __name__ == "__main__":
    main()
