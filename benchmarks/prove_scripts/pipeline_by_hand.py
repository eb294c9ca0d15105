"""Trains a model in two stages, sent by hand; the first and the last stage share the embedding.

torchrun --nproc-per-node 2 pipeline_by_hand.py [--plant NAME]
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

VOCABULARY, WIDTH, LENGTH, BATCH = 50, 32, 10, 8
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
is_first, is_last = rank == 0, rank == world_size - 1


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fc1 = nn.Linear(WIDTH, 64)
        self.fc2 = nn.Linear(64, WIDTH)

    def forward(self, x):
        return x + self.fc2(F.relu(self.fc1(self.norm(x))))


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        nn.init.normal_(self.embedding.weight, std=0.2)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.final_norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        if is_first:
            x = self.embedding(x)
        for layer in self.layers:
            if not isinstance(layer, nn.Identity):
                x = layer(x)
        if is_last:
            x = F.linear(self.final_norm(x), self.embedding.weight)
        return x


torch.manual_seed(0)
model = Whole()
count = len(model.layers) // world_size
for index in range(4):
    if index // count != rank:
        model.layers[index] = nn.Identity()
if not is_last:
    model.final_norm = nn.Identity()
if plant == "embedding-of-own-seed" and is_last:
    nn.init.normal_(model.embedding.weight, std=0.2)
if not is_first and not is_last:
    model.embedding = nn.Identity()

optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(3)
for step in range(3):
    batch = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    inputs, labels = batch[:, :-1], batch[:, 1:]
    if is_first:
        received = inputs
    else:
        received = torch.empty(BATCH, LENGTH, WIDTH)
        dist.recv(received, rank - 1)
        received.requires_grad_()
    output = model(received)
    if is_last:
        loss = F.cross_entropy(output.flatten(0, 1), labels.flatten())
        loss.backward()
        print(step, loss.item())
    else:
        dist.send(output.detach(), rank + 1)
        gradient = torch.empty_like(output)
        dist.recv(gradient, rank + 1)
        output.backward(gradient)
    if not is_first:
        gradient = received.grad
        if plant == "gradient-halved":
            gradient = gradient / world_size
        dist.send(gradient, rank - 1)
    if world_size > 1 and (is_first or is_last) and plant != "tied-not-summed":
        dist.all_reduce(model.embedding.weight.grad)
        if plant == "tied-averaged":
            model.embedding.weight.grad /= 2
        if plant == "tied-summed-twice":
            dist.all_reduce(model.embedding.weight.grad)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
