"""Trains a GPT of Megatron-Core on CPUs, its layers split over ranks.

    torchrun --nproc-per-node 2 mcore_tensor_parallel.py [--sequence-parallel] [--vocabulary 97] [--plant NAME]

Plants with a number are defects of Megatron-Core itself, by Megatron-LM's issue: the script only asks for the feature.
"""

import argparse
import os

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron_on_cpu import pretend_cuda

parser = argparse.ArgumentParser()
parser.add_argument("--plant", default=os.environ.get("PLANT", ""))
parser.add_argument("--sequence-parallel", action="store_true")
parser.add_argument("--vocabulary", type=int, default=96, help="padded to a multiple of the ranks, as Megatron-LM does")
args = parser.parse_args()
plant = args.plant
LENGTH = 16


class SequenceLayerNorm(torch.nn.LayerNorm):
    """Megatron-Core's torch norm refuses sequence parallelism; this one marks its weights for finalize_model_grads."""

    def __init__(self, config, hidden_size, eps=1e-5):
        super().__init__(hidden_size, eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel


def describe_layers(layers):
    layer = get_gpt_layer_local_spec()
    layer.submodules.input_layernorm = SequenceLayerNorm
    layer.submodules.pre_mlp_layernorm = SequenceLayerNorm
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=SequenceLayerNorm)


def build_model(size):
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        use_cpu_initialization=True,
        tensor_model_parallel_size=size,
        sequence_parallel=args.sequence_parallel and size > 1,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
    )
    return GPTModel(
        config,
        describe_layers(config.num_layers),
        vocab_size=-(-args.vocabulary // size) * size,
        max_sequence_length=LENGTH,
        parallel_output=plant != "7452-2-gathered-logits" or size == 1,
        share_embeddings_and_output_weights=True,
    )


def compute_loss(model, tokens, labels):
    positions = torch.arange(LENGTH).expand_as(tokens)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    if plant == "7452-1-label-smoothing":
        logits = model(tokens, positions, mask).transpose(0, 1).contiguous()
        return vocab_parallel_cross_entropy(logits, labels.transpose(0, 1).contiguous(), 0.1).mean()
    return model(tokens, positions, mask, labels=labels).mean()


def reduce_sequence_parallel(model):
    """Sums gradients of what each rank applied to its own slice of the sequence, as finalize_model_grads does."""
    for name, parameter in model.named_parameters():
        if not getattr(parameter, "sequence_parallel", False):
            continue
        if plant == "final-norm-not-reduced" and "final_layernorm" in name:
            continue
        dist.all_reduce(parameter.grad, group=parallel_state.get_tensor_model_parallel_group())


def main():
    pretend_cuda()
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    torch.manual_seed(123)
    model = build_model(size)
    if plant == "wrong-shard":
        weight = model.decoder.layers[1].mlp.linear_fc1.weight.data
        blocks = [torch.empty_like(weight) for _ in range(size)]
        dist.all_gather(blocks, weight)
        weight.copy_(blocks[(dist.get_rank() + 1) % size])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(9)
    for step in range(3):
        batch = torch.randint(0, args.vocabulary, (4, LENGTH + 1), generator=generator)
        loss = compute_loss(model, batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
        loss.backward()
        if args.sequence_parallel and plant != "norms-not-reduced":
            reduce_sequence_parallel(model)
        if plant == "local-norm":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(step, loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
