"""Trains a transformer split over ranks by hand, with Megatron's f and g.

torchrun --nproc-per-node 2 tp_by_hand.py [--plant NAME]
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--plant", default=os.environ.get("PLANT", ""))
plant = parser.parse_args().plant

VOCABULARY, WIDTH, HEADS, LENGTH = 64, 32, 4, 16
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()


class CopyToRanks(torch.autograd.Function):
    """f: the identity, whose gradient is summed over ranks."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        if plant == "f-not-reduced":
            return gradient
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class SumOverRanks(torch.autograd.Function):
    """g: a sum over ranks, whose gradient is the identity."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        if plant == "g-twice":
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        if plant == "g-backward-reduces":
            gradient = gradient.clone()
            dist.all_reduce(gradient)
        return gradient


def own_block(weight, dim, shift=0):
    return weight.chunk(world_size, dim)[(rank + shift) % world_size].clone()


class ColumnLinear(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        whole = torch.randn(outputs, inputs) * inputs**-0.5
        self.weight = nn.Parameter(own_block(whole, 0))
        self.bias = nn.Parameter(own_block(0.1 * torch.randn(outputs), 0))

    def forward(self, x):
        return F.linear(CopyToRanks.apply(x), self.weight, self.bias)


class RowLinear(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        whole = torch.randn(outputs, inputs) * inputs**-0.5
        self.weight = nn.Parameter(own_block(whole, 1, 1 if plant == "wrong-shard" else 0))
        self.bias = nn.Parameter(0.1 * torch.randn(outputs))

    def forward(self, x):
        if plant == "bias-on-each-rank":
            return SumOverRanks.apply(F.linear(x, self.weight, self.bias))
        return SumOverRanks.apply(F.linear(x, self.weight)) + self.bias


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = ColumnLinear(WIDTH, WIDTH)
        self.key = ColumnLinear(WIDTH, WIDTH)
        self.value = ColumnLinear(WIDTH, WIDTH)
        self.out = RowLinear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (
            layer(x).unflatten(-1, (HEADS // world_size, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = ColumnLinear(WIDTH, 4 * WIDTH)
        self.down = RowLinear(4 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def clip(parameters, max_norm):
    """The norm over all ranks' blocks, where what each rank has counts once."""
    split, whole = [], []
    for name, parameter in parameters:
        is_split = any(part in name for part in ("query", "key", "value", "up", "weight_of_row")) or (
            name.endswith("weight") and ("out" in name or "down" in name)
        )
        (split if is_split else whole).append(parameter)
    squares = sum(p.grad.square().sum() for p in split)
    if plant != "local-norm":
        dist.all_reduce(squares)
    squares = squares + sum(p.grad.square().sum() for p in whole)
    scale = (max_norm / (squares.sqrt() + 1e-6)).clamp(max=1.0)
    for parameter in split + whole:
        parameter.grad *= scale


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(5 + (rank if plant == "batches-of-own-seed" else 0))
for step in range(3):
    tokens = torch.randint(0, VOCABULARY, (4, LENGTH + 1))
    logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    if plant in ("local-norm", "clean-clip"):
        clip(list(model.named_parameters()), 0.2)
    if plant == "split-averaged":
        # blocks of different ranks are no replicas
        for name, parameter in model.named_parameters():
            if "up" in name:
                dist.all_reduce(parameter.grad)
                parameter.grad /= world_size
    optimizer.step()
    if rank == 0:
        print(step, loss.item())
dist.destroy_process_group()
