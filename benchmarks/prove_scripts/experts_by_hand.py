"""Trains a mixture of experts by hand: each rank has some of the experts, and tokens travel by all_to_all.

torchrun --nproc-per-node 2 experts_by_hand.py [--plant NAME]
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

EXPERTS, WIDTH, VOCABULARY = 4, 24, 40
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
EACH = EXPERTS // world_size


class Exchange(torch.autograd.Function):
    """Sends rows to ranks; the gradient goes the way back."""

    @staticmethod
    def forward(ctx, rows, sent, received):
        ctx.counts = sent, received
        out = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), received, sent)
        return out

    @staticmethod
    def backward(ctx, gradient):
        sent, received = ctx.counts
        out = gradient.new_empty(sum(sent), *gradient.shape[1:])
        dist.all_to_all_single(out, gradient.contiguous(), sent, received)
        return out, None, None


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class MixtureOfExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        shift = 1 if plant == "wrong-experts" else 0
        whole = [Expert() for _ in range(EXPERTS)]
        first = rank * EACH
        self.experts = nn.ModuleDict({str(first + i): whole[(first + i + shift * EACH) % EXPERTS] for i in range(EACH)})

    def forward(self, x):
        tokens = x.flatten(0, 1)
        weight, chosen = self.router(tokens).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=EXPERTS)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        sent = counts.view(world_size, EACH).sum(1).tolist()
        received = theirs.view(world_size, EACH).sum(1).tolist()
        rows = Exchange.apply(tokens[order], sent, received)
        expert_of_row = torch.arange(EACH).repeat(world_size).repeat_interleave(theirs)
        out = torch.zeros_like(rows)
        for i, expert in enumerate(self.experts.values()):
            where = (expert_of_row == i).nonzero().squeeze(1)
            out = out.index_add(0, where, expert(rows[where]))
        back = Exchange.apply(out, received, sent)
        result = torch.zeros_like(tokens).index_add(0, order, back)
        return (result * weight[:, None]).view_as(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.moe = MixtureOfExperts()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.head(x + self.moe(self.norm(x)))


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(50 + rank)
for step in range(3):
    tokens = torch.randint(0, VOCABULARY, (8, 17))
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    for name, parameter in model.named_parameters():
        if "experts" in name:
            # its tokens came from all ranks already: a sum, of which the mean is wanted
            if plant != "experts-not-divided":
                parameter.grad /= world_size
        elif not (plant == "router-not-reduced" and "router" in name):
            dist.all_reduce(parameter.grad)
            parameter.grad /= world_size
    if plant == "experts-averaged":
        # experts of different ranks are no replicas
        for expert in model.moe.experts.values():
            for parameter in expert.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= world_size
    optimizer.step()
    if rank == 0:
        print(step, loss.item())
dist.destroy_process_group()
