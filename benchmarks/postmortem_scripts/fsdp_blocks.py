"""A stack of blocks under fully_shard, with gradient clipping and a metric per block.

torchrun --nproc-per-node 2 fsdp_blocks.py [--plant NAME] [--rank RANKS] [--step N]
"""

import time

import job
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    """An MLP with a residual."""

    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    """Blocks of two widths, the last ones behind a bottleneck."""

    def __init__(self, run):
        super().__init__()
        self.run = run
        self.step = 0
        self.blocks = nn.ModuleList([Block(32), Block(32)])
        self.narrow = nn.Linear(32, 16)
        self.expert = Block(16)
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        first, second = self.blocks
        x = second(first(x))
        x = self.narrow(x)
        if self.run.has("key-error", self.step):
            x = x * {"scale": 1.0}["gain"]
        if self.run.has("cuda-out-of-memory", self.step):
            job.raise_out_of_memory(18.07)
        if self.run.has("native-crash", self.step):
            job.crash()
        if self.run.has("endless-regex", self.step):
            job.normalize_spaces("a " * 40 + "!")
        if self.run.has("slow-rank") and self.step >= self.run.options.step:
            time.sleep(2)
        if self.run.has("skips-expert", self.step):
            # "no token was routed to the expert"
            return self.head(x)
        return self.head(self.expert(x))


def share_statistics(run, step, x):
    """Gather the means of all ranks' batches."""
    mean = x.mean(0)
    if run.has("gathers-other-shape", step):
        mean = x.mean(1)
    gathered = [torch.empty_like(mean) for _ in range(run.world)]
    if run.has("statistics-reduced", step):
        dist.all_reduce(mean)
        return mean
    dist.all_gather(gathered, mean)
    return torch.stack(gathered)


def main():
    run = job.Job()
    torch.manual_seed(7)
    model = Stack(run)
    for part in (*model.blocks, model.expert):
        fully_shard(part)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(1, run.options.steps + 1):
        model.step = step
        if run.has("dies", step):
            job.kill_itself()
        if run.has("leaves", step):
            job.end_quietly(1)
        if run.has("stops", step):
            job.stop_itself()
        if run.has("network", step):
            job.break_connections()
        if run.has("host-memory", step):
            job.allocate_until_it_fails()
        x = torch.randn(8 if not run.has("smaller-batch") else 4, 32)
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor())
        optimizer.step()
        share_statistics(run, step, x)
        time.sleep(0.05)
        if run.rank == 0:
            run.log(f"iter {step} loss {float(loss):.4f} grad_norm {norm:.3f}")
        if run.has("not-finite", step):
            raise FloatingPointError(f"iter {step}: grad_norm is nan")
    dist.barrier()
    run.close()


if __name__ == "__main__":
    main()
