"""This package's trainer with a fault.

torchrun --nproc-per-node 2 our_trainer.py [--plant NAME] [--rank RANKS] [--step N] FLAGS
"""

import argparse
import datetime
import os
import sys
import time

import job
import torch.distributed as dist

from megatron_lite.__main__ import main
from megatron_lite.train import step as training_step

MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--hidden-dropout 0 --attention-dropout 0"
)
DATA = "--mock-data --tokenizer-type ByteTokenizer --micro-batch-size 2 --global-batch-size 8 --train-iters 16"
OTHERS = "--lr 1e-3 --lr-decay-style constant --log-interval 1 --eval-iters 0"
TIMEOUT_S = 10
NOTHING = ""


class Fault:
    """Strikes once a rank has come to the forward of a step."""

    def __init__(self, options):
        self._options = options
        self._calls = 0
        self._is_struck = os.environ["RANK"] in options.rank.split(",")
        self._forward = training_step.loss_and_tokens
        self._step = training_step.TrainingStep.__call__
        training_step.loss_and_tokens = self.forward
        training_step.TrainingStep.__call__ = lambda step, *words: self.count(step, *words)

    def count(self, step, *words):
        self._calls += 1
        return self._step(step, *words)

    def forward(self, *words):
        is_now = self._is_struck and self._calls >= self._options.step
        plant = self._options.plant if is_now else NOTHING
        if plant and os.environ.get("PLANTED_MARKER"):
            with open(os.environ["PLANTED_MARKER"], "a") as file:
                file.write(f"{os.environ['RANK']} {os.getpid()}\n")
        if plant == "dies":
            job.kill_itself()
        if plant == "stops":
            job.stop_itself()
        if plant == "endless-kernel":
            job.WITH_INTERPRETER.pause()
        if plant == "slow-rank":
            time.sleep(1.5)
        if plant == "cuda-out-of-memory":
            job.raise_out_of_memory(3.38)
        if plant == "raises":
            raise ValueError("positions must be smaller than 32, got 32")
        if plant == "extra-reduction" and self._calls == self._options.step:
            dist.all_reduce(words[1].tokens_BT.float().sum())
        time.sleep(0.05)
        losses, tokens = self._forward(*words)
        if plant == "not-finite":
            losses = losses * float("nan")
        return losses, tokens


def shorten_timeouts():
    start = dist.init_process_group

    def start_with_limit(*words, **named):
        return start(*words, **{**named, "timeout": datetime.timedelta(seconds=TIMEOUT_S)})

    dist.init_process_group = start_with_limit


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--plant", default=NOTHING)
    parser.add_argument("--rank", default="1")
    parser.add_argument("--step", type=int, default=6)
    known, flags = parser.parse_known_args()
    shorten_timeouts()
    Fault(known)
    sys.exit(main([*f"{MODEL} {DATA} {OTHERS}".split(), *flags]))
