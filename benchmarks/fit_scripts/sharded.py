"""Trains a small encoder by torchrun whose weights FSDP2 (fully_shard) shards; --bf16: gathered and computed in bf16."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

has_gpu = torch.cuda.is_available()
dist.init_process_group("nccl" if has_gpu else "gloo")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
if has_gpu:
    torch.cuda.set_device(device)
torch.manual_seed(0)
layers = [nn.TransformerEncoderLayer(64, 4, 256, batch_first=True, dropout=0.0) for _ in range(4)]
model = nn.Sequential(*layers, nn.Linear(64, 10)).to(device)
mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if "--bf16" in sys.argv else MixedPrecisionPolicy()
for layer in model[:4]:
    fully_shard(layer, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(5):
    x = torch.randn(8, 32, 64).to(device)
    y = torch.randint(0, 10, (8,)).to(device)
    loss = nn.functional.cross_entropy(model(x).mean(1), y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(step, loss.item())
dist.destroy_process_group()
