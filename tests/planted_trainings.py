"""Trainings with a planted cause, and sound ones: `python tests/planted_trainings.py CAUSE FLAGS` is such a run, under a launcher or alone."""

import gc
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

CLEAN = "clean"


SLEEP_S = 0.04


KEPT = []  # what the leak keeps


VALUE = torch.ones(1)


def after_forward(do: Callable[[], object]):
    """`do()` after the forward of every micro-batch."""
    from megatron_lite.train import step

    inner = step.loss_and_tokens

    def doing(*arguments):
        result = inner(*arguments)
        do()
        return result

    step.loss_and_tokens = doing


def log_heavily():
    logger = logging.getLogger("heavy")
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    logger.addHandler(logging.FileHandler(os.devnull))
    after_forward(lambda: [logger.debug("value %d", index) for index in range(5000)])


def sleeping_loader():
    from megatron_lite.data import loader

    inner = loader._stack

    def slow(samples):
        time.sleep(SLEEP_S)
        return inner(samples)

    loader._stack = slow


def reduce_every_micro_batch():
    from megatron_lite.parallel.data_parallel import DataParallel

    inner = DataParallel.backward
    DataParallel.backward = lambda self, last: inner(self, True)


def slow_rank():
    square = torch.ones(384, 384)

    def compute():
        # Operators, as on a slow core: a sleep would be Python between operators, and fp32 products a cause of their own.
        until = time.monotonic() + SLEEP_S
        while os.environ["RANK"] == "1" and time.monotonic() < until:
            square.exp()

    after_forward(compute)


def unfused_optimizer():
    from megatron_lite.optim import optimizer

    class Loop(torch.optim.AdamW):
        """What fused kernels do with the scale, by hand."""

        def step(self):
            scale, found_inf = self.__dict__.pop("grad_scale"), self.__dict__.pop("found_inf")
            for group in self.param_groups:
                for weight in group["params"]:
                    weight.grad.div_(scale)
            super().step()
            self.grad_scale, self.found_inf = scale, found_inf

    def make_loop(o, members, rates, width, compositions):
        groups = [{"params": own, "lr": rates[kind.rate], "decays": kind.decays} for kind, own in members.items()]
        return Loop(groups, lr=rates["usual"], foreach=False, fused=False)

    optimizer.make_engine = make_loop


def recompiles():
    from megatron_lite.train.step import BatchMaker

    inner, calls = BatchMaker.__call__, []

    def shorter(self, raw_BT1):
        calls.append(1)
        return inner(self, raw_BT1[:, : raw_BT1.shape[1] - 8 * (len(calls) // 6)])

    BatchMaker.__call__ = shorter


def collect_garbage():
    """In every step, walking a million objects of the run: those from before its first step are frozen."""
    held: list[list] = []

    def collect():
        held.extend([] for _ in range(1_000_000 - len(held)))
        gc.collect()

    after_forward(collect)


@dataclass(frozen=True)
class Cause:
    """How it is planted, and the code of the finding that must come first."""

    code: str
    plant: Callable[[], None] = lambda: None
    flags: str = ""
    ranks: int = 1


CAUSES = {
    "gc.collect() in every step": Cause("gc-pauses", collect_garbage),
    "a sleep in every step": Cause("host-gaps", lambda: after_forward(lambda: time.sleep(SLEEP_S))),
    "heavy logging": Cause("host-gaps", log_heavily),
    "a sleeping loader": Cause("starved-loader", sleeping_loader),
    "hidden 1000": Cause(
        "matmul-shapes", flags="--hidden-size 1000 --num-attention-heads 5 --micro-batch-size 16 --global-batch-size 16"
    ),
    "fp32": Cause("fp32-products", flags="!--bf16"),
    "tiny micro-batches": Cause("tiny-micro-batches", flags="--micro-batch-size 1 --global-batch-size 12"),
    "all-reduce in every micro-batch": Cause(
        "reduce-every-micro-batch",
        reduce_every_micro_batch,
        "--hidden-size 768 --num-attention-heads 12 --micro-batch-size 2 --global-batch-size 12 --profile-step-end 14",
        ranks=2,
    ),
    "a slow rank": Cause("straggler", slow_rank, "--profile-step-end 14", ranks=2),
    # 4 MiB per micro-batch, as if outputs were kept for later
    "a leak": Cause("memory-growth", lambda: after_forward(lambda: KEPT.append(torch.ones(2**20)))),
    "an unfused optimizer": Cause(
        "unfused-optimizer",
        unfused_optimizer,
        "--hidden-size 512 --num-attention-heads 8 --micro-batch-size 1 --global-batch-size 1",
    ),
    "recompiles": Cause("recompilation", recompiles, "--torch-compile --torch-compile-backend aot_eager"),
}


# Planted as products in fp32, or as sizes that units for bf16 products take badly.
NEED_BF16_PRODUCTS = {"fp32", "hidden 1000"}


def has_bf16_products() -> bool:
    """Has this processor units for products in bf16?"""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


CLEAN_RUNS = {  # sound runs of several kinds
    "as it is": Cause(CLEAN),
    "values read on a CPU": Cause(CLEAN, lambda: after_forward(lambda: [VALUE.item() for _ in range(42)])),
    "one micro-batch": Cause(CLEAN, flags="--micro-batch-size 8"),
    "RMSNorm, SwiGLU, rope": Cause(CLEAN, flags="--normalization RMSNorm --swiglu --position-embedding-type rope"),
    "recomputation": Cause(
        CLEAN, flags="--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    ),
    "longer sequences": Cause(
        CLEAN, flags="--seq-length 128 --max-position-embeddings 128 --micro-batch-size 2 --global-batch-size 4"
    ),
    "two ranks": Cause(CLEAN, flags="--global-batch-size 16", ranks=2),
}


if __name__ == "__main__":  # a run, under a launcher or alone: CAUSE FLAGS
    from megatron_lite.__main__ import train

    (CAUSES | CLEAN_RUNS)[sys.argv[1]].plant()
    sys.exit(train(sys.argv[2:]))
