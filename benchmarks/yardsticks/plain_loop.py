"""What a careful user writes in plain PyTorch to train a GPT-2, after the example of nanoGPT.

[torchrun --nproc-per-node N -m] python -m benchmarks.yardsticks.plain_loop --help
"""

import argparse
import contextlib
import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.yardsticks.task import BETAS, CLIP, WEIGHT_DECAY, WORKS_OF_16_BITS, RandomWindows, StepLog, read_task


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int, gelu: str):
        super().__init__()
        self.heads, self.gelu = heads, gelu
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.fc1, self.fc2 = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x)), approximate=self.gelu))

    def attend(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(mixed.transpose(1, 2).reshape(batch, length, hidden))


class GPT(nn.Module):
    """GPT-2 with tied embeddings and without dropout; called with tokens and labels, it returns the mean loss."""

    def __init__(self, task: argparse.Namespace):
        super().__init__()
        self.words = nn.Embedding(task.vocabulary, task.hidden)
        self.positions = nn.Embedding(task.sequence, task.hidden)
        self.blocks = nn.ModuleList(Block(task.hidden, task.heads, task.gelu) for _ in range(task.layers))
        self.norm = nn.LayerNorm(task.hidden)
        self.head = nn.Linear(task.hidden, task.vocabulary, bias=False)
        self.head.weight = self.words.weight
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                writes_residual = name.endswith(("proj.weight", "fc2.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * task.layers) if writes_residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(weight)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.words(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.reshape(-1))


def main():
    task = read_task(__doc__.splitlines()[0])
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device(task.device, int(os.environ.get("LOCAL_RANK", "0")) if task.device == "cuda" else None)
    if task.device == "cuda":
        torch.cuda.set_device(device)
    if ranks > 1:
        dist.init_process_group("nccl" if task.device == "cuda" else "gloo")
    torch.manual_seed(task.seed)
    model = GPT(task).to(device)
    optimizer = make_optimizer(model, task.lr)
    if task.compile:
        model = torch.compile(model)
    if ranks > 1:
        model = DistributedDataParallel(
            model, device_ids=[device] if task.device == "cuda" else None, gradient_as_bucket_view=True
        )
    train(task, model, optimizer, RandomWindows(task, rank), device, StepLog(task, ranks))
    if ranks > 1:
        dist.destroy_process_group()


def make_optimizer(model: nn.Module, lr: float) -> torch.optim.AdamW:
    """Fused; weight decay for matrices only."""
    weights = list(model.parameters())
    groups = [
        {"params": [w for w in weights if w.dim() >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [w for w in weights if w.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=BETAS, fused=True)


def train(task, model, optimizer, windows: RandomWindows, device, log: StepLog):
    """All steps."""
    dtype = WORKS_OF_16_BITS.get(task.precision)
    scaler = torch.amp.GradScaler(task.device, enabled=task.precision == "fp16")
    autocast = torch.autocast(task.device, dtype) if dtype else contextlib.nullcontext()
    weights = list(model.parameters())
    for number in range(task.steps):
        for group in optimizer.param_groups:
            group["lr"] = task.lr * min(number / task.lr_warm_up, 1)
        total = torch.zeros((), device=device)
        for index in range(task.accumulation):
            tokens, labels = next_batch(task, windows, device)
            last = index == task.accumulation - 1
            with contextlib.nullcontext() if last or not dist.is_initialized() else model.no_sync():
                with autocast:
                    loss = model(tokens, labels) / task.accumulation
                scaler.scale(loss).backward()
            total += loss.detach()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(weights, CLIP)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        log.end_of_step(total)


def next_batch(task, windows: RandomWindows, device) -> tuple[Tensor, Tensor]:
    """Tokens and labels, [micro-batch, sequence]."""
    batch = torch.stack([windows[0] for _ in range(task.micro_batch)])
    if device.type == "cuda":
        batch = batch.pin_memory().to(device, non_blocking=True)
    return batch[:, :-1].contiguous(), batch[:, 1:].contiguous()


if __name__ == "__main__":
    main()
