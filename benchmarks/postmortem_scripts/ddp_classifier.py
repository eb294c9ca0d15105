"""A classifier under DistributedDataParallel, with a data loader, metrics, evaluation and checkpoints.

torchrun --nproc-per-node 2 ddp_classifier.py [--plant NAME] [--rank RANKS] [--step N] [--workers N]
"""

import os
import signal
import tempfile
import time

import job
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Digits(Dataset):
    """Noise with a label."""

    def __init__(self, run, samples):
        self.run = run
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        worker = torch.utils.data.get_worker_info()
        if worker is not None and worker.id == 0:
            self.fail_in_worker(index)
        if self.run.has("bad-sample") and index > 40:
            raise ValueError(f"sample {index}: expected 64 features, got 63")
        if self.run.has("slow-disk"):
            time.sleep(0.4)
        if self.run.has("dead-disk") and index > 40:
            time.sleep(3600)
        return torch.randn(64), index % 10

    def fail_in_worker(self, index):
        if index < 24:
            return
        if self.run.has("worker-killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.run.has("worker-hangs"):
            time.sleep(3600)
        if self.run.has("worker-bus-error"):
            signal.raise_signal(signal.SIGBUS)
        if self.run.has("worker-raises"):
            raise OSError(5, "Input/output error", f"/data/shards/{index:05d}.tar")


class Classifier(nn.Module):
    """Two hidden layers."""

    def __init__(self, run):
        super().__init__()
        self.run = run
        self.step = 0
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU())
        self.head = nn.Linear(256, 10)

    def forward(self, x):
        hidden = self.layers(x)
        if self.run.has("wrong-width", self.step):
            hidden = hidden[:, :-1]
        if self.run.has("cuda-out-of-memory", self.step):
            job.raise_out_of_memory(2.5)
        if self.run.has("crash", self.step):
            job.crash()
        if self.run.has("endless-kernel", self.step):
            job.WITHOUT_INTERPRETER.pause()
        if self.run.has("endless-kernel-with-interpreter", self.step):
            job.WITH_INTERPRETER.pause()
        if self.run.has("slow-rank") and self.step >= self.run.options.step:
            time.sleep(2)
        if self.run.has("very-slow-rank") and self.step >= self.run.options.step:
            time.sleep(1.2 * self.run.options.timeout)
        return self.head(hidden)


def build_loader(run):
    samples = 8 * run.options.steps * run.world
    if run.has("fewer-batches"):
        # "this rank's shard is shorter"
        samples = 8 * (run.options.step - 1) * run.world
    dataset = Digits(run, samples)
    sampler = DistributedSampler(dataset, shuffle=False)
    waits = 4 if run.options.plant == "worker-hangs" and run.options.workers == 1 else 0
    return DataLoader(dataset, batch_size=8, sampler=sampler, num_workers=run.options.workers, timeout=waits)


def average_metrics(run, step, loss):
    if run.has("skips-metrics", step):
        # "nothing to report where the loss is small"
        return loss
    metrics = torch.stack([loss.detach(), torch.ones(())])
    if run.has("metrics-in-double", step):
        metrics = metrics.double()
    if run.has("more-metrics", step):
        metrics = torch.cat([metrics, torch.zeros(3)])
    rate = torch.full((33,), 1e-3)
    if run.has("metrics-first", step):
        dist.all_reduce(metrics)
        dist.broadcast(rate, src=1)
    else:
        dist.broadcast(rate, src=1)
        dist.all_reduce(metrics)
    return metrics[0] / metrics[1]


def save_checkpoint(run, step, model):
    if run.has("barrier-on-one", step):
        dist.barrier()
    if run.rank == 0:
        if run.has("disk-full", step):
            raise OSError(28, "No space left on device", "/checkpoints/step_6/model.pt")
        if run.has("slow-save", step):
            time.sleep(0.7 * run.options.timeout)
        with tempfile.TemporaryFile() as file:
            torch.save(model.state_dict(), file)
    dist.barrier()


def evaluate(run, step):
    score = torch.rand(1)
    taker = 0
    if run.has("other-root", step):
        taker = run.rank
    if run.has("slow-evaluation", step):
        time.sleep(0.7 * run.options.timeout)
    scores = [torch.empty(1) for _ in range(run.world)] if run.rank == taker else None
    dist.gather(score, scores, dst=taker)


def train(run):
    model = DistributedDataParallel(Classifier(run))
    if run.has("backward-hook"):
        model.module.head.register_full_backward_hook(check_gradient)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = 0
    if run.has("slow-first-step"):
        time.sleep(0.6 * run.options.timeout)
    while step < run.options.steps:
        for inputs, labels in build_loader(run):
            step += 1
            model.module.step = step
            if run.has("dies", step):
                job.kill_itself()
            if run.has("leaves", step):
                job.end_quietly(3)
            if run.has("stops", step):
                job.stop_itself()
            if run.has("host-memory", step):
                job.allocate_until_it_fails()
            if run.has("network", step):
                job.break_connections()
            if run.has("breaks-early", step):
                # "stops when the loss is small enough"
                return
            loss = F.cross_entropy(model(inputs), labels)
            if run.has("not-finite", step):
                loss = loss * float("nan")
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            time.sleep(0.05)
            shown = average_metrics(run, step, loss) if step % 2 == 0 else loss
            run.log(f"step {step}/{run.options.steps} loss {float(shown):.4f}")
            if run.options.plant == "not-finite" and not torch.isfinite(shown):
                raise RuntimeError(f"loss is {float(shown)} at step {step}")
            if step % 6 == 0:
                evaluate(run, step)
                save_checkpoint(run, step, model)
            if step == run.options.steps:
                return
        if run.has("fewer-batches"):
            return


def check_gradient(module, gradients, outputs):
    assert outputs[0].abs().max() < 0, "gradient of the head is larger than expected"


@record
def main():
    run = job.Job()
    train(run)
    run.log("training is over")
    run.close()


if __name__ == "__main__":
    main()
