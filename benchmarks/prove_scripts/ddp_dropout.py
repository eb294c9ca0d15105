"""Trains a model with dropout under DistributedDataParallel.

torchrun --nproc-per-node 2 ddp_dropout.py [--plant NAME]
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--plant", default=os.environ.get("PLANT", ""))
parser.add_argument("--seed", type=int, default=1234)
args = parser.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(args.seed)
model = nn.Sequential(
    nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 4)
)
inputs = torch.randn(256, 20)
targets = inputs[:, :4].argmax(1)
dataset = TensorDataset(inputs, targets)
if args.plant != "same-mask":
    # masks differ between ranks, weights do not
    torch.manual_seed(args.seed + rank)
if args.plant == "weights-of-own-seed":
    for layer in model:
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()
if args.plant == "weights-of-own-seed":
    trained, average = model, True
else:
    trained, average = DistributedDataParallel(model), False
optimizer = torch.optim.Adam(trained.parameters(), lr=1e-3)
loader = DataLoader(dataset, batch_size=16, sampler=DistributedSampler(dataset, drop_last=True))
loss_function = nn.CrossEntropyLoss()
trained.train()
for inputs, targets in loader:
    optimizer.zero_grad()
    loss = loss_function(trained(inputs), targets)
    loss.backward()
    if average:
        for parameter in trained.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(dist.get_world_size())
    optimizer.step()
    if rank == 0:
        print(f"{loss.item():.4f}")
dist.destroy_process_group()
