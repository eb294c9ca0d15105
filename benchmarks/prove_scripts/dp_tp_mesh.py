"""Trains an MLP-mixer on 4 ranks: two groups of data parallelism (fully_shard), each split over two (DTensor).

torchrun --nproc-per-node 4 dp_tp_mesh.py [--plant NAME]
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

parser = argparse.ArgumentParser()
parser.add_argument("--plant", default=os.environ.get("PLANT", ""))
plant = parser.parse_args().plant


class Mixer(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(10, 32)
        self.blocks = nn.ModuleList(Mixer() for _ in range(3))
        self.leave = nn.Linear(32, 10)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


def main():
    dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    tensor_size = 2 if world_size > 1 else 1
    mesh = init_device_mesh("cpu", (world_size // tensor_size, tensor_size), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = Net()
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    # gloo knows no other factor than that of the mean: the planted ones come afterwards
    factor = 1.0
    if plant == "sum":
        factor = float(mesh["dp"].size())
    if plant == "divided-by-world":
        # by all ranks, though those of a tensor group have the same samples
        factor = mesh["dp"].size() / world_size
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, foreach=False)

    index, parts = mesh.get_local_rank("dp"), mesh["dp"].size()
    if plant == "batches-by-global-rank":
        index, parts = dist.get_rank(), world_size
    generator = torch.Generator().manual_seed(11)
    for step in range(3):
        inputs = torch.randn(16, 10, generator=generator)
        targets = inputs.roll(1, dims=1) ** 2
        mine = slice(index * 16 // parts, (index + 1) * 16 // parts)
        loss = F.mse_loss(model(inputs[mine]), targets[mine])
        loss.backward()
        if factor != 1:
            for p in model.parameters():
                p.grad.mul_(factor)
        if plant == "local-norm":
            squares = sum(p.grad.to_local().square().sum() for p in model.parameters())
            for p in model.parameters():
                p.grad.to_local().mul_((0.1 / squares.sqrt()).clamp(max=1.0))
        elif plant == "clean-clip":
            squares = sum(p.grad.full_tensor().square().sum() for p in model.parameters())
            for p in model.parameters():
                p.grad.to_local().mul_((0.1 / squares.sqrt()).clamp(max=1.0))
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(step, loss.item())
    assert isinstance(model.enter.weight, DTensor)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
