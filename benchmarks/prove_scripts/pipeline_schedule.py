"""Trains a model in stages by torch.distributed.pipelining.

torchrun --nproc-per-node 2 pipeline_schedule.py [--schedule 1f1b] [--plain] [--plant NAME]
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

parser = argparse.ArgumentParser()
parser.add_argument("--plant", default=os.environ.get("PLANT", ""))
parser.add_argument("--schedule", default="gpipe", choices=["gpipe", "1f1b"])
parser.add_argument("--plain", action="store_true", help="without a schedule, on one rank")
args = parser.parse_args()
plant = args.plant

VOCABULARY, WIDTH, LENGTH, LAYERS, BATCH, MICRO_BATCHES = 40, 24, 12, 4, 8, 4


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        mixed = torch.tanh(self.mix(self.norm(x))).cumsum(1) / torch.arange(1, LENGTH + 1)[:, None]
        return x + self.out(mixed)


class Model(nn.Module):
    """Stages leave out what is not theirs: names stay those of the whole model."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(index): Layer() for index in range(LAYERS)})
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x):
        x = self.embedding(x) if self.embedding is not None else x
        for layer in self.layers.values():
            x = layer(x)
        x = self.norm(x) if self.norm is not None else x
        return self.head(x) if self.head is not None else x


def loss_function(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def cut(model, rank, stages):
    per_stage = LAYERS // stages
    first = rank * per_stage
    if plant == "next-layers":
        # this stage's names, with the weights of the next stage
        blocks = [model.layers[str((first + per_stage + i) % LAYERS)] for i in range(per_stage)]
        for i, block in enumerate(blocks):
            model.layers[str(first + i)] = block
    for index in range(LAYERS):
        if not first <= index < first + per_stage:
            del model.layers[str(index)]
    if rank != 0:
        model.embedding = None
    if rank != stages - 1:
        model.norm = None
        model.head = None
    return model


def main():
    dist.init_process_group("gloo")
    rank, stages = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Model()
    if not args.plain:
        model = cut(model, rank, stages)
        stage = PipelineStage(model, rank, stages, torch.device("cpu"))
        kind = ScheduleGPipe if args.schedule == "gpipe" else Schedule1F1B
        schedule = kind(stage, n_microbatches=MICRO_BATCHES, loss_fn=loss_function, scale_grads=plant != "not-scaled")
    rate = 0.1
    if plant == "last-stage-rate" and rank == stages - 1:
        rate = 0.1 * stages
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    generator = torch.Generator().manual_seed(2)
    for step in range(3):
        batch = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
        inputs, labels = batch[:, :-1], batch[:, 1:].contiguous()
        optimizer.zero_grad()
        losses = []
        if args.plain:
            loss = loss_function(model(inputs), labels)
            loss.backward()
            losses = [loss.detach()]
        elif stages == 1:
            schedule.step(inputs, target=labels, losses=losses)
        elif rank == 0:
            schedule.step(inputs)
        elif rank == stages - 1:
            schedule.step(target=labels, losses=losses)
        else:
            schedule.step()
        optimizer.step()
        if losses:
            print(step, torch.stack(losses).mean().item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
