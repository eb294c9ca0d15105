"""A loader for --external-dataloader of the trainer that computes as long as an environment variable says."""

import os
from collections.abc import Iterator

import numpy as np
import torch


def yield_batches(
    split: str,
    consumed: int,
    micro_batch_size: int,
    seq_length: int,
    rank: int,
    num_ranks: int,
    seed: int,
) -> Iterator[np.ndarray]:
    """Yield random tokens. Each batch draws READ_NUMBERS million random numbers, on the last rank LATE_NUMBERS more.

    Args:
        split: "train", "valid" or "test".
        consumed: Samples of the run that were taken before.
        micro_batch_size: Sequences of a batch.
        seq_length: Tokens of a sequence.
        rank: Of the data parallel ranks.
        num_ranks: How many there are.
        seed: Of the tokens.
    """
    generator = np.random.default_rng([seed, rank, consumed])
    millions = float(os.environ.get("READ_NUMBERS", "0"))
    if rank == num_ranks - 1:
        millions += float(os.environ.get("LATE_NUMBERS", "0"))
    while True:
        for _ in range(round(millions * 10)):
            torch.randn(100_000)
        yield generator.integers(0, 127, (micro_batch_size, seq_length + 1))
