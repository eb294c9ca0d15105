"""Trains a small language model sharded by FSDP2 (fully_shard).

torchrun --nproc-per-node 2 fsdp_language_model.py [--plant NAME]
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

parser = argparse.ArgumentParser()
parser.add_argument("--plant", default=os.environ.get("PLANT", ""))
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--accumulate", type=int, default=2)
args = parser.parse_args()
plant = args.plant

VOCABULARY, WIDTH, LENGTH = 96, 32, 24


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm = nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp_norm = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(self.mlp_norm(x))))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.RMSNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = Transformer()
    options = {"mesh": mesh}
    if plant == "clean-bf16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if plant == "norm-ignored":
        options["ignored_params"] = {model.norm.weight}
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **({k: v for k, v in options.items() if k == "mp_policy"}))
    fully_shard(model, **options)
    # gloo knows no other factor than that of the mean: the planted ones come afterwards
    summed = []
    if plant == "sum":
        summed = list(model.parameters())
    if plant == "one-layer-sum":
        summed = list(model.layers[1].parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(100 if plant == "same-seed" else 100 + dist.get_rank())
    for step in range(args.steps):
        for micro_batch in range(args.accumulate):
            batch = torch.randint(0, VOCABULARY, (4, LENGTH + 1), generator=generator)
            is_last = micro_batch == args.accumulate - 1
            if plant == "clean-late-reduction":
                model.set_requires_gradient_sync(is_last)
            logits = model(batch[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
            (loss / args.accumulate).backward()
        for parameter in summed:
            parameter.grad.mul_(dist.get_world_size())
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
