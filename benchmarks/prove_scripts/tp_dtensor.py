"""Trains a transformer whose layers are split by DTensor: tensor and sequence parallelism, and a split loss.

torchrun --nproc-per-node 2 tp_dtensor.py [--plant NAME]
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

parser = argparse.ArgumentParser()
parser.add_argument("--plant", default=os.environ.get("PLANT", ""))
plant = parser.parse_args().plant

VOCABULARY, WIDTH, HEADS, LENGTH = 64, 32, 4, 16


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wk = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wv = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        q, k, v = (w(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        return self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = nn.Linear(WIDTH, 4 * WIDTH)
        self.w2 = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.w2(F.gelu(self.w1(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.ffn_norm = nn.LayerNorm(WIDTH)
        self.feed_forward = FeedForward()

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def parallelize(model, mesh):
    parallelize_module(
        model,
        mesh,
        {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        },
    )
    for layer in model.layers:
        plan = {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "attention.wq": ColwiseParallel(),
            "attention.wk": ColwiseParallel(),
            "attention.wv": ColwiseParallel(),
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
            "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        }
        if plant == "clean-replicated-mlp":
            for name in ("feed_forward.w1", "feed_forward.w2"):
                del plan[name]
            plan["feed_forward"] = PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=True
            )
            plan["feed_forward.w1"] = ColwiseParallel(output_layouts=Replicate())
            plan["feed_forward.w2"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        if plant == "norm-without-plan":
            # a plain norm over a slice of the sequence: its gradient stays this rank's own
            del plan["ffn_norm"]
        parallelize_module(layer, mesh, plan)


def reduce_again(module, inputs, output):
    """Sums an output that the layer has summed already."""
    local = output.to_local() if isinstance(output, DTensor) else output
    return local * dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model = Transformer()
    parallelize(model, mesh["tp"])
    if plant == "output-reduced-again":
        model.layers[0].feed_forward.w2.register_forward_hook(reduce_again)
    if plant == "wrong-shard":
        with torch.no_grad():
            weight = model.layers[1].feed_forward.w1.weight
            whole = weight.full_tensor()
            block = whole.chunk(mesh.size())[(mesh.get_local_rank() + 1) % mesh.size()]
            weight.to_local().copy_(block)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    torch.manual_seed(1)
    if plant == "batches-of-own-seed":
        torch.manual_seed(1 + dist.get_rank())
    for step in range(3):
        batch = torch.randint(0, VOCABULARY, (4, LENGTH + 1))
        with loss_parallel():
            loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
        if plant == "norms-divided":
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
        value = loss.full_tensor() if isinstance(loss, DTensor) else loss
        if dist.get_rank() == 0:
            print(step, value.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
