"""Tensor and data parallelism by hand on four ranks: two groups of each kind, and messages around a ring.

torchrun --nproc-per-node 4 groups_by_hand.py [--plant NAME] [--rank RANKS] [--step N]
"""

import datetime
import time

import job
import torch
import torch.distributed as dist


class Layer:
    """A product whose columns two ranks have."""

    def __init__(self):
        self.weight = torch.randn(64, 32)

    def gather(self, run, step, group, x):
        part = x @ self.weight
        if run.has("skips-gather", step):
            # "the cache has it"
            return torch.cat([part, part], -1)
        if run.has("smaller-part", step):
            part = part[:, :-8]
        whole = [torch.empty_like(part) for _ in range(2)]
        dist.all_gather(whole, part, group=group)
        return torch.cat(whole, -1)


def average(run, step, tensor_group, data_group, gradient, norm):
    """Average gradients over replicas, and sum norms over parts."""
    if run.has("norm-first", step):
        dist.all_reduce(norm, group=tensor_group)
        dist.all_reduce(gradient, group=data_group)
        return
    if run.has("half-precision", step):
        gradient = gradient.to(torch.bfloat16)
    dist.all_reduce(gradient, group=data_group)
    dist.all_reduce(norm, group=tensor_group)


def pass_around(run, step, x):
    """Send a block to the next rank, and take the one of the rank before, even ranks first."""
    after, before = (run.rank + 1) % run.world, (run.rank - 1) % run.world
    taken = torch.empty_like(x)
    is_first = run.rank % 2 == 0
    if run.has("ring-order", step):
        is_first = not is_first
    if is_first:
        dist.send(x, after)
        dist.recv(taken, before)
    else:
        dist.recv(taken, before)
        dist.send(x, after)
    return taken


def main():
    run = job.Job()
    limit = datetime.timedelta(seconds=run.options.timeout)
    tensor_groups = [dist.new_group(ranks, limit, group_desc="tensor") for ranks in ([0, 1], [2, 3])]
    data_groups = [dist.new_group(ranks, limit, group_desc="data") for ranks in ([0, 2], [1, 3])]
    tensor_group, data_group = tensor_groups[run.rank // 2], data_groups[run.rank % 2]
    layer = Layer()
    for step in range(1, run.options.steps + 1):
        if run.has("dies", step):
            job.kill_itself()
        if run.has("stops", step):
            job.stop_itself()
        if run.has("network", step):
            job.break_connections()
        if run.has("tokenizes-for-ever", step):
            job.normalize_spaces("a " * 40 + "!")
        x = layer.gather(run, step, tensor_group, torch.randn(4, 64))
        passed = pass_around(run, step, x)
        average(run, step, tensor_group, data_group, passed.clone(), x.norm())
        time.sleep(0.05)
        if step % 4 == 0:
            total = x.square().sum()
            if run.rank == 0 or not run.has("logs-without-others", step):
                dist.all_reduce(total)
            run.log(f"step {step} activations {float(total):.1f}")
    dist.barrier()
    run.close()


if __name__ == "__main__":
    main()
