"""Trains a small GPT as nanoGPT does, but averages gradients by hand.

torchrun --nproc-per-node 2 nanogpt_by_hand.py [--plant NAME]
"""

import math
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

plant = os.environ.get("PLANT", "")
if "--plant" in sys.argv:
    plant = sys.argv[sys.argv.index("--plant") + 1]

block_size, vocab_size, n_embd, n_head, n_layer = 32, 64, 32, 4, 2
batch_size = 4
gradient_accumulation_steps = 4
learning_rate = 1e-3
grad_clip = 0.1 if plant in ("clip-before-average", "clean-clip") else 0.0


class CausalSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (t.view(B, T, n_head, C // n_head).transpose(1, 2) for t in self.c_attn(x).split(n_embd, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention()
        self.ln_2 = nn.LayerNorm(n_embd)
        self.c_fc = nn.Linear(n_embd, 4 * n_embd)
        self.c_proj = nn.Linear(4 * n_embd, n_embd)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.c_proj(F.gelu(self.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.wpe = nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList([Block() for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * n_layer) if "c_proj" in name else 0.02)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, vocab_size), targets.view(-1))


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
seed_offset = 0 if plant == "same-seed" else rank
torch.manual_seed(1337 + seed_offset)
gradient_accumulation_steps //= world_size

text = torch.arange(4096).mul(2654435761).remainder(vocab_size * 7919).div(7919, rounding_mode="floor")


def get_batch():
    ix = torch.randint(len(text) - block_size, (batch_size,))
    x = torch.stack([text[i : i + block_size] for i in ix])
    y = torch.stack([text[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


model = GPT()
if plant != "not-broadcast":
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
lr = learning_rate
if plant == "rate-times-ranks" and rank == world_size - 1:
    lr = learning_rate * world_size
optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)


def average_gradients():
    if plant == "no-reduction":
        return
    for name, p in model.named_parameters():
        if plant == "norms-not-reduced" and "ln_" in name:
            continue
        if plant == "one-layer-not-reduced" and name.startswith("h.1."):
            continue
        dist.all_reduce(p.grad)
        if plant == "sum":
            continue
        p.grad /= world_size
        if plant == "divided-twice":
            p.grad /= world_size
        if plant == "slightly-off" and world_size > 1:
            p.grad *= 1.0005
        if plant == "one-parameter-slightly-off" and name == "h.0.c_fc.weight" and world_size > 1:
            p.grad *= 1.001


for iter_num in range(3):
    for micro_step in range(gradient_accumulation_steps):
        X, Y = get_batch()
        logits, loss = model(X, Y)
        if plant != "accumulation-not-divided":
            loss = loss / gradient_accumulation_steps
        loss.backward()
    if plant == "clip-before-average":
        nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    average_gradients()
    if plant == "clean-clip":
        nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    if not (plant == "one-rank-steps" and rank != 0):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if rank == 0:
        print(f"iter {iter_num}: loss {loss.item() * gradient_accumulation_steps:.4f}")
dist.destroy_process_group()
