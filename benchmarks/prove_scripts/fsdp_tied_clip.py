"""Trains a sharded model with tied embeddings and a clipped gradient.

torchrun --nproc-per-node 2 fsdp_tied_clip.py [--plant NAME]
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

parser = argparse.ArgumentParser()
parser.add_argument("--plant", default=os.environ.get("PLANT", ""))
plant = parser.parse_args().plant
MAX_NORM = 0.1


class TiedModel(nn.Module):
    def __init__(self, vocabulary=64, width=24):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.convolution = nn.Conv1d(width, width, 3)
        self.mix = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width))
        self.decode = nn.Linear(width, vocabulary, bias=False)
        self.decode.weight = self.tokens.weight

    def forward(self, tokens):
        embedded = nn.functional.pad(self.tokens(tokens).transpose(1, 2), (2, 0))
        hidden = torch.tanh(self.convolution(embedded)).transpose(1, 2)
        return self.decode(self.mix(hidden))


def clip(parameters):
    """Clips by hand, as scripts do that are older than the sharding."""
    parameters = list(parameters)
    gradients = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in parameters]
    squares = torch.stack([g.square().sum() for g in gradients]).sum()
    if plant != "local-norm":
        dist.all_reduce(squares)
    scale = (MAX_NORM / (squares.sqrt() + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    model = TiedModel()
    fully_shard(model.mix)
    fully_shard(model)
    rate = 0.05
    if plant == "rate-by-rank":
        rate = 0.05 * (1 + dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    torch.manual_seed(10 + dist.get_rank())
    for step in range(3):
        tokens = torch.randint(0, 64, (8, 17))
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:])
        loss.backward()
        if plant in ("local-norm", "clean-clip-by-hand"):
            clip(model.parameters())
        else:
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        if not (plant == "no-step-on-rank-1" and dist.get_rank() == 1):
            optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(step, loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
