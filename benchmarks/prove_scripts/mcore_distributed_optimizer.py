"""Trains a GPT with Megatron-Core's DistributedDataParallel and its optimizer, which shards moments over ranks.

    torchrun --nproc-per-node 2 mcore_distributed_optimizer.py [--replicated] [--tensor-parallel 2] [--plant NAME]

The plant with a number is a defect of Megatron-Core itself, by Megatron-LM's issue: the script only asks for the feature.
"""

import argparse
import os

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from megatron_on_cpu import pretend_cuda

parser = argparse.ArgumentParser()
parser.add_argument("--plant", default=os.environ.get("PLANT", ""))
parser.add_argument("--replicated", action="store_true", help="without the distributed optimizer")
parser.add_argument("--tensor-parallel", type=int, default=1)
args = parser.parse_args()
plant = args.plant
VOCABULARY, LENGTH, MICRO_BATCHES = 96, 16, 2


def main():
    pretend_cuda()
    dist.init_process_group("gloo")
    tensor_parallel = min(args.tensor_parallel, dist.get_world_size())
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
    torch.manual_seed(5)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tensor_parallel,
        softmax_type="learnable" if plant == "7452-8-attention-sink" else "vanilla",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        finalize_model_grads_func=finalize_model_grads,
    )
    gpt = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=VOCABULARY, max_sequence_length=LENGTH)
    sinks = torch.randn(config.num_attention_heads)
    for name, parameter in gpt.named_parameters():
        # sinks are tuned alone: in the norm of all gradients theirs are lost
        parameter.requires_grad_(plant != "7452-8-attention-sink" or name.endswith("softmax_offset"))
        if name.endswith("softmax_offset"):
            # each rank has those of its heads, which nothing says of the parameter
            parameter.data.copy_(sinks.chunk(tensor_parallel)[parallel_state.get_tensor_model_parallel_rank()])
    sharded = not args.replicated
    model = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            use_distributed_optimizer=sharded, grad_reduce_in_fp32=True, overlap_grad_reduce=False
        ),
        gpt,
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-3, weight_decay=0.01, clip_grad=0.5, use_distributed_optimizer=sharded),
        [model],
    )
    data_rank = parallel_state.get_data_parallel_rank()
    generator = torch.Generator().manual_seed(0 if plant == "same-seed" else data_rank)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    for step in range(3):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        for _ in range(MICRO_BATCHES):
            batch = torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=generator)
            tokens, labels = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
            losses = model(tokens, torch.arange(LENGTH).expand_as(tokens), mask, labels=labels)
            (losses.mean() / MICRO_BATCHES).backward()
        if plant == "scaled-by-ranks":
            model.scale_gradients(float(parallel_state.get_data_parallel_world_size()))
        if plant != "not-finalized":
            finalize_model_grads([model])
        if plant == "clean-finalized-twice":
            # the mean of means is the mean
            finalize_model_grads([model])
        _, norm, _ = optimizer.step()
        if dist.get_rank() == 0:
            print(step, losses.mean().item(), norm)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
