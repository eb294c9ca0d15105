"""Time and memory of building a data set's indices, beside Megatron-core's compiled helpers where they are installed.

    python benchmarks/index_building.py                        # 10 million documents: some minutes
    python benchmarks/index_building.py --documents 1000000 --repeats 3

Both build the three indices of a GPT data set from the same lengths (lognormal, 600 tokens on average) in turn, in one
process; a row gives the medians and their ratio. Peak memory is that of a fresh process which builds ours and nothing
else. The last rows are blends, and what the cache on disk costs and saves.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.training.process import peak_bytes_of
from megatron_lite.data.blend_order import mix
from megatron_lite.data.gpt_dataset import sample_recipe
from megatron_lite.data.index_cache import IndexCache

MEAN_TOKENS, SIGMA, SEED = 600, 1.0, 1234


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=10_000_000)
    parser.add_argument("--blend-samples", type=int, default=10_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--memory-of", nargs=3, metavar=("LENGTHS", "SEQ", "EPOCHS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory_of:
        file, seq_length, epochs = args.memory_of
        lengths = np.load(file, mmap_mode="r")
        recipe_of(lengths, int(seq_length), float(epochs)).build(lengths)
        print(peak_bytes_of(os.getpid()))  # not getrusage's: that also knows what the parent had before exec
        return
    helpers = megatron_helpers()
    print(f"{'what':<48}{'megatron_lite':>15}{'Megatron-core':>15}{'ratio':>8}{'peak memory':>14}")
    lengths = document_lengths(args.documents)
    with tempfile.TemporaryDirectory() as folder:
        np.save(f"{folder}/lengths.npy", lengths)
        for seq_length in (2048, 4096):
            for epochs in (0.98, 2.98):
                indices_row(helpers, lengths, seq_length, epochs, args.repeats, f"{folder}/lengths.npy")
        for num_datasets in (2, 10, 100):
            blend_row(helpers, num_datasets, args.blend_samples, args.repeats)
        cache_rows(lengths, folder)


def document_lengths(documents: int) -> np.ndarray:
    """int32 [documents]."""
    random = np.random.default_rng(SEED)
    return np.maximum(1, random.lognormal(np.log(MEAN_TOKENS) - SIGMA**2 / 2, SIGMA, documents)).astype(np.int32)


def recipe_of(lengths: np.ndarray, seq_length: int, epochs: float):
    """Ours, for as many samples as `epochs` hold."""
    tokens = int(lengths.sum(dtype=np.int64))
    return sample_recipe(range(len(lengths)), tokens, int(epochs * tokens) // seq_length, seq_length, SEED)


def megatron_helpers():
    """The functions that Megatron's GPTDataset builds its indices with; None without megatron-core."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            from megatron.core.datasets import gpt_dataset, helpers
        except ImportError as error:
            print(f"no comparison: {error}")
            return None
    return gpt_dataset, helpers


def megatron_build(modules, lengths: np.ndarray, recipe) -> tuple:
    """The steps of GPTDataset._build_document_sample_shuffle_indices, without its files."""
    gpt_dataset, helpers = modules
    random = np.random.RandomState(recipe.seed)
    documents = np.arange(recipe.sequences.start, recipe.sequences.stop, dtype=np.int32)
    apart = recipe.samples_shuffled_first is not None
    document_index = gpt_dataset._build_document_index(documents, recipe.epochs, random, apart)
    sample_index = helpers.build_sample_idx(
        lengths.copy(), document_index, recipe.seq_length, recipe.epochs, recipe.tokens, True, True
    )
    samples = len(sample_index) - 1
    first = recipe.samples_shuffled_first if apart else samples
    return document_index, sample_index, gpt_dataset._build_shuffle_index(first, samples, random)


def in_turn(ours, theirs, repeats: int) -> list[float]:
    """Median seconds of each that is there; RuntimeError if they do not give the same."""
    functions = [ours, theirs] if theirs else [ours]
    seconds = np.empty((repeats, len(functions)))
    for repeat in range(repeats):
        found = []
        for number, function in enumerate(functions):
            start = time.perf_counter()
            result = function()
            seconds[repeat, number] = time.perf_counter() - start
            found.append(result if repeat == 0 else None)
            del result
        if theirs and repeat == 0 and not all(np.array_equal(a, b) for a, b in zip(*found, strict=True)):
            raise RuntimeError("the two do not agree")
    return np.median(seconds, axis=0).tolist()


def indices_row(modules, lengths: np.ndarray, seq_length: int, epochs: float, repeats: int, file: str) -> None:
    recipe = recipe_of(lengths, seq_length, epochs)
    theirs = modules and (lambda: megatron_build(modules, lengths, recipe))
    medians = in_turn(lambda: tuple(recipe.build(lengths).values()), theirs, repeats)
    command = [sys.executable, __file__, "--memory-of", file, str(seq_length), str(epochs)]
    peak = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    row(f"{len(lengths):,} documents, seq {seq_length}, {recipe.epochs} epochs", *medians, f"{peak / 2**20:,.0f} MiB")


def blend_row(modules, num_datasets: int, samples: int, repeats: int) -> None:
    weights = np.random.default_rng(SEED).random(num_datasets) + 0.05
    shares = (weights / weights.sum()).tolist()

    def theirs():
        chosen, earlier = np.zeros(samples, np.int16), np.zeros(samples, np.int64)
        modules[1].build_blending_indices(chosen, earlier, shares, num_datasets, samples, False)
        return chosen, earlier

    medians = in_turn(lambda: mix(shares, samples), theirs if modules else None, repeats)
    row(f"blend of {num_datasets}, {samples:,} samples", *medians)


def cache_rows(lengths: np.ndarray, folder: str) -> None:
    recipe = recipe_of(lengths, 4096, 0.98)
    cache = IndexCache(os.path.join(folder, "cache"))
    for what in ("built and written to the cache", "opened from the cache"):
        start = time.perf_counter()
        cache.get(f"{folder}/cache", recipe.entry(lengths, "train"), lambda: recipe.build(lengths))
        row(f"{what}, seq 4096, {recipe.epochs} epochs", time.perf_counter() - start)


def row(what: str, ours_s: float, theirs_s: float | None = None, peak: str = "") -> None:
    beside = f"{theirs_s:>13.2f} s{ours_s / theirs_s:>8.2f}" if theirs_s else " " * 23
    print(f"{what:<48}{ours_s:>13.2f} s{beside}{peak:>14}", flush=True)


if __name__ == "__main__":
    main()
