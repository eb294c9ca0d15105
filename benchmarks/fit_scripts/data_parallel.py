"""Trains a small encoder by DistributedDataParallel, with gradients of two batches added up; --unused: it looks for
parameters that a batch did not use."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

has_gpu = torch.cuda.is_available()
dist.init_process_group("nccl" if has_gpu else "gloo")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
layers = [nn.TransformerEncoderLayer(64, 4, 256, batch_first=True, dropout=0.0) for _ in range(4)]
model = nn.Sequential(*layers, nn.Linear(64, 10)).to(device)
ids = [device.index] if has_gpu else None
model = DistributedDataParallel(model, device_ids=ids, find_unused_parameters="--unused" in sys.argv)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(5):
    for part in range(2):
        x = torch.randn(8, 32, 64).to(device)
        y = torch.randint(0, 10, (8,)).to(device)
        model.require_backward_grad_sync = part == 1
        loss = nn.functional.cross_entropy(model(x).mean(1), y)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
