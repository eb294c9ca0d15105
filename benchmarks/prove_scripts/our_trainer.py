"""This package's trainer with a planted error.

torchrun --nproc-per-node 2 our_trainer.py [--plant NAME] FLAGS
"""

import os
import sys

import torch.distributed as dist

from megatron_lite.__main__ import main
from megatron_lite.optim import optimizer
from megatron_lite.parallel import data_parallel, pipeline, replica, tensor_parallel

MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--hidden-dropout 0 --attention-dropout 0"
)
DATA = "--mock-data --tokenizer-type ByteTokenizer --micro-batch-size 2 --global-batch-size 8 --train-iters 3"
OTHERS = "--lr 1e-3 --lr-decay-style constant --clip-grad 0.1 --log-interval 1 --eval-iters 0"


def take_plant(words):
    """Take --plant NAME out of the command line."""
    if "--plant" not in words:
        return os.environ.get("PLANT", "")
    at = words.index("--plant")
    name = words[at + 1]
    del words[at : at + 2]
    return name


def skip_sequence_norms():
    # norms of ranks that split the tokens keep the gradient of their own
    replica._has_partial_gradient = lambda plan, name: False


def skip_tied_ends():
    replica.add_ends = lambda *arguments: None


def sum_tied_ends_twice():
    def twice(*arguments):
        pipeline.add_ends(*arguments)
        pipeline.add_ends(*arguments)

    replica.add_ends = twice


def keep_input_gradients():
    # what each rank's columns give the input is not summed
    begin = tensor_parallel.TensorGroup.begin_sum
    backward = tensor_parallel._ColumnLinear.backward

    def keep(context, gradient):
        tensor_parallel.TensorGroup.begin_sum = lambda self, x: x
        try:
            return backward(context, gradient)
        finally:
            tensor_parallel.TensorGroup.begin_sum = begin

    tensor_parallel._ColumnLinear.backward = staticmethod(keep)


def sum_rows_twice():
    def twice(tensor, among):
        return tensor_parallel._SumOverRanks.apply(tensor_parallel._SumOverRanks.apply(tensor, among), among)

    tensor_parallel._sum_over_ranks = twice


def take_norm_of_own():
    replica.Replica._sum_over_ranks = lambda self, number: number.clone()


def sum_replicas():
    inner = data_parallel.DataParallel.gradients

    def summed(self):
        gradients = inner(self)
        for gradient in gradients:
            gradient.mul_(dist.get_world_size())
        return gradients

    data_parallel.DataParallel.gradients = summed


def average_nothing():
    call = data_parallel.DataParallel.__call__

    def alone(self, *inputs):
        self._averaged = [None] * len(self._averaged)
        return call(self, *inputs)

    data_parallel.DataParallel.__call__ = alone


def raise_rate_of_last_rank():
    inner = optimizer.Optimizer._set_rates

    def raised(self):
        rates = inner(self)
        if dist.is_initialized() and dist.get_rank() and dist.get_rank() == dist.get_world_size() - 1:
            self.lr.mul_(2)
        return rates

    optimizer.Optimizer._set_rates = raised


PLANTS = {
    "norms-not-reduced": skip_sequence_norms,
    "tied-not-summed": skip_tied_ends,
    "tied-summed-twice": sum_tied_ends_twice,
    "f-not-reduced": keep_input_gradients,
    "g-twice": sum_rows_twice,
    "local-norm": take_norm_of_own,
    "sum": sum_replicas,
    "no-reduction": average_nothing,
    "last-rank-rate": raise_rate_of_last_rank,
}

if __name__ == "__main__":
    flags = sys.argv[1:]
    plant = take_plant(flags)
    if plant:
        PLANTS[plant]()
    sys.exit(main([*f"{MODEL} {DATA} {OTHERS}".split(), *flags]))
