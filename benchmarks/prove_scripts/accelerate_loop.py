"""Trains an MLP with Accelerate: prepared loader, accumulation, a clipped gradient, a schedule.

torchrun --nproc-per-node 2 accelerate_loop.py [--plant NAME], or accelerate launch --cpu --num_processes 2 ...
"""

import argparse
import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--plant", default=os.environ.get("PLANT", ""))
plant = parser.parse_args().plant


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(5)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(160, 12, generator=generator)
    loader = DataLoader(TensorDataset(inputs, inputs.square().sum(1, keepdim=True)), batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    if plant == "loader-not-prepared":
        model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    else:
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    if plant != "same-masks":
        set_seed(5, device_specific=True)
    for number, (batch, targets) in enumerate(loader):
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(batch), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if number % 2:
            accelerator.print(number, loss.item())
    accelerator.end_training()


if __name__ == "__main__":
    main()
