"""A pipeline of torch.distributed.pipelining (1F1B), one stage on each rank.

torchrun --nproc-per-node 4 pipeline_stages.py [--plant NAME] [--rank RANKS] [--step N]
"""

import time

import job
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

WIDTH = 32
MICRO_BATCHES = 4


class Stage(nn.Module):
    """The layers of one rank."""

    def __init__(self, run):
        super().__init__()
        self.run = run
        self.step = 0
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        if self.run.has("raises", self.step):
            raise IndexError("index 5 is out of bounds for dimension 0 with size 4")
        if self.run.has("crash", self.step):
            job.crash()
        if self.run.has("endless-kernel", self.step):
            job.WITHOUT_INTERPRETER.pause()
        if self.run.has("slow-stage") and self.step >= self.run.options.step:
            time.sleep(0.5)
        if self.run.has("hanging-stage", self.step):
            time.sleep(3600)
        if self.run.has("cuda-out-of-memory", self.step):
            job.raise_out_of_memory(0.75)
        return self.layers(x)


def compute_loss(output, target):
    return (output - target).square().mean()


def main():
    run = job.Job()
    module = Stage(run)
    stage = PipelineStage(module, run.rank, run.world, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=compute_loss)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    is_last = run.rank == run.world - 1
    for step in range(1, run.options.steps + 1):
        module.step = step
        if run.has("dies", step):
            job.kill_itself()
        if run.has("stops", step):
            job.stop_itself()
        if run.has("network", step):
            job.break_connections()
        if run.has("skips-step", step):
            # "this batch is empty"
            continue
        x = torch.randn(8, WIDTH)
        losses = []
        if run.rank == 0:
            schedule.step(x)
        elif is_last:
            schedule.step(target=x, losses=losses)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.05)
        if step % 2 == 0:
            loss = torch.stack(losses).mean().detach() if is_last else torch.zeros(())
            dist.broadcast(loss, src=run.world - 1)
            run.log(f"step {step} loss {float(loss):.4f}")
    dist.barrier()
    run.close()


if __name__ == "__main__":
    main()
