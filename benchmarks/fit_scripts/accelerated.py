"""Trains by Accelerate, with gradients of two batches added up; --cpu: by gloo, where torchrun starts it."""

import sys

import torch
from accelerate import Accelerator
from torch import nn

accelerator = Accelerator(gradient_accumulation_steps=2, cpu="--cpu" in sys.argv)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters())
data = torch.utils.data.TensorDataset(torch.randn(256, 64), torch.randint(0, 10, (256,)))
model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, 16))
for vectors, labels in loader:
    with accelerator.accumulate(model):
        accelerator.backward(nn.functional.cross_entropy(model(vectors), labels))
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
