"""Trains a decoder whose sequences are split over ranks: each has a slice, and gathers keys and values of all.

torchrun --nproc-per-node 2 context_parallel.py [--plant NAME]
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

plant = os.environ.get("PLANT", "")
if "--plant" in sys.argv:
    plant = sys.argv[sys.argv.index("--plant") + 1]

dist.init_process_group("gloo")
RANK, SIZE = dist.get_rank(), dist.get_world_size()
VOCABULARY, WIDTH, HEADS, LENGTH = 48, 32, 2, 32
SLICE = LENGTH // SIZE


class GatherSequence(torch.autograd.Function):
    """All ranks' slices (B, heads, T, width); the gradient of a slice is the sum over the ranks that used it."""

    @staticmethod
    def forward(ctx, x):
        slices = [torch.empty_like(x) for _ in range(SIZE)]
        dist.all_gather(slices, x.contiguous())
        return torch.cat(slices, dim=2)

    @staticmethod
    def backward(ctx, gradient):
        if plant != "gather-not-reduced":
            gradient = gradient.contiguous()
            dist.all_reduce(gradient)
        return gradient.chunk(SIZE, dim=2)[RANK]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        def split(y):
            return y.unflatten(-1, (HEADS, -1)).transpose(1, 2)

        query = split(self.query(x))
        key = GatherSequence.apply(split(self.key(x)))
        value = GatherSequence.apply(split(self.value(x)))
        rows = torch.arange(SLICE)[:, None] + RANK * SLICE
        if plant == "mask-of-rank-zero":
            rows = torch.arange(SLICE)[:, None]
        mask = rows >= torch.arange(LENGTH)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.out(attended.transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))
        self.attentions = nn.ModuleList(Attention() for _ in range(2))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        start = 0 if plant == "positions-of-rank-zero" else RANK * SLICE
        x = self.tokens(tokens) + self.positions(start + torch.arange(SLICE))
        for layer in range(2):
            x = x + self.attentions[layer](self.norms[2 * layer](x))
            x = x + self.mlps[layer](self.norms[2 * layer + 1](x))
        return self.head(x)


torch.manual_seed(0)
model = Decoder()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
torch.manual_seed(17)
for step in range(3):
    sequences = torch.randint(0, VOCABULARY, (4, LENGTH + 1))
    mine = slice(RANK * SLICE, (RANK + 1) * SLICE)
    if plant == "next-slice":
        mine = slice((RANK + 1) % SIZE * SLICE, ((RANK + 1) % SIZE + 1) * SLICE)
    inputs = sequences[:, :-1][:, mine]
    labels = sequences[:, 1:][:, mine]
    loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
    optimizer.zero_grad()
    loss.backward()
    for name, parameter in model.named_parameters():
        if plant == "positions-not-reduced" and name == "positions.weight":
            continue
        dist.all_reduce(parameter.grad)
        if plant != "sum":
            parameter.grad /= SIZE
    optimizer.step()
    dist.all_reduce(loss.data)
    if RANK == 0:
        print(step, loss.item() / SIZE)
dist.destroy_process_group()
