"""Trains an MLP with DistributedDataParallel, several micro-batches for each update, and no_sync.

torchrun --nproc-per-node 2 ddp_accumulate.py [--plant NAME]
"""

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

ACCUMULATE = 3


class Curves(Dataset):
    def __init__(self, length=240):
        generator = torch.Generator().manual_seed(7)
        self.inputs = torch.rand(length, 16, generator=generator) * 2 - 1
        self.targets = torch.sin(3 * self.inputs).sum(1, keepdim=True)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.targets[index]


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.out = nn.Linear(64, 1)

    def forward(self, inputs):
        return self.out(self.layers(inputs))


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, values):
        return self.weight * values


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--plant", default=os.environ.get("PLANT", ""))
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(42)
    regressor = Regressor()
    if args.plant == "scale-outside":
        # the module is trained, but nobody averages its gradient
        model = DDP(regressor)
        scale = Scale()
        parameters = [*model.parameters(), *scale.parameters()]
    else:
        model = DDP(nn.Sequential(regressor, Scale()))
        scale = nn.Identity()
        parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    dataset = Curves()
    loader = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset), num_workers=0, drop_last=True)
    for number, (inputs, targets) in enumerate(loader):
        is_last = (number + 1) % ACCUMULATE == 0
        is_synchronized = is_last
        if args.plant == "no-sync-always":
            is_synchronized = False
        if args.plant == "sync-first":
            is_synchronized = number % ACCUMULATE == 0
        if args.plant == "clean-sync-each":
            is_synchronized = True
        with contextlib.nullcontext() if is_synchronized else model.no_sync():
            loss = F.mse_loss(scale(model(inputs)), targets) / ACCUMULATE
            loss.backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if dist.get_rank() == 0:
                print(number, ACCUMULATE * loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
