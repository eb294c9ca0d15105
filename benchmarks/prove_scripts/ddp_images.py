"""Trains a small CNN on images with DistributedDataParallel, DistributedSampler and a DataLoader.

torchrun --nproc-per-node 2 ddp_images.py [--plant NAME]
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_functional
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--plant", default=os.environ.get("PLANT", ""))
plant = parser.parse_args().plant

dist.init_process_group("gloo")
rank = dist.get_rank()
world_size = dist.get_world_size()
torch.manual_seed(0)


class SharedBatchNorm(nn.Module):
    """BatchNorm over the batches of all ranks, as SyncBatchNorm, which needs a GPU."""

    def __init__(self, channels):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, images):
        moments = torch.stack([images.mean((0, 2, 3)), images.square().mean((0, 2, 3))])
        mean, square = dist_functional.all_reduce(moments) / dist.get_world_size()
        scale = self.weight * (square - mean.square() + 1e-5).rsqrt()
        return (images - mean[:, None, None]) * scale[:, None, None] + self.bias[:, None, None]


def norm(channels):
    if plant == "local-statistics":
        return nn.BatchNorm2d(channels)
    if plant == "clean-group-norm":
        return nn.GroupNorm(4, channels)
    return SharedBatchNorm(channels)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.stem_norm = norm(8)
        self.body = nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False)
        self.body_norm = norm(16)
        self.head = nn.Linear(16, 10)

    def forward(self, images):
        hidden = torch.relu(self.stem_norm(self.stem(images)))
        hidden = torch.relu(self.body_norm(self.body(hidden)))
        return self.head(hidden.mean((2, 3)))


samples = 29 if plant == "clean-uneven-last-batch" else 64
generator = torch.Generator().manual_seed(1)
dataset = TensorDataset(
    torch.randn(samples, 3, 8, 8, generator=generator), torch.randint(0, 10, (samples,), generator=generator)
)

sampler = DistributedSampler(dataset, shuffle=True)
if plant == "no-sampler":
    sampler = None
if plant == "too-many-replicas":
    sampler = DistributedSampler(dataset, num_replicas=2 * world_size, rank=rank, shuffle=True)
if plant == "rank-zero-everywhere":
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=0, shuffle=True)
if plant == "own-seed-for-each-sampler":
    sampler = DistributedSampler(dataset, shuffle=True, seed=rank)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)

model = DistributedDataParallel(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
criterion = nn.CrossEntropyLoss()

for epoch in range(2):
    if sampler is not None:
        sampler.set_epoch(epoch)
    for images, labels in loader:
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")
dist.destroy_process_group()
