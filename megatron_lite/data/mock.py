"""Made-up data for runs without files: simple enough that a small model's loss falls, noisy enough not to reach 0."""

import numpy as np

ALPHABET = 512  # ids in use at most: with all of a large vocabulary, a short run would learn nothing
LARGEST_STEP = 4
NOISE = 0.1  # share of the tokens that are random


class MockDataset:
    """Sample i counts up from a random id in steps of 1 to 4, a tenth of its tokens replaced by random ones.

    `[i]` is int64 [seq_length + 1] and depends on nothing but i, seed, seq_length and vocab_size.
    """

    def __init__(self, num_samples: int, seq_length: int, vocab_size: int, seed: int):
        self.num_samples = num_samples
        self.seq_length = seq_length
        self.alphabet = min(vocab_size, ALPHABET)
        self.seed = seed

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, i: int) -> np.ndarray:
        if not 0 <= i < self.num_samples:
            raise IndexError(f"sample {i} of {self.num_samples}")
        random = np.random.default_rng((self.seed, i))
        length = self.seq_length + 1
        first, step = random.integers(self.alphabet), random.integers(1, LARGEST_STEP + 1)
        tokens = (first + step * np.arange(length, dtype=np.int64)) % self.alphabet
        noise = random.integers(self.alphabet, size=length)
        return np.where(random.random(length) < NOISE, noise, tokens)
