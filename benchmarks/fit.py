"""Compares the memory of scripts walked without data with that of the same scripts computing on the CPU.

python -m benchmarks.fit [--nanogpt FOLDER]

FOLDER is a checkout of nanoGPT whose data/shakespeare_char is prepared. Scripts whose packages are not installed fail
in both ways, and are shown so.
"""

import argparse
import os
import sys
import time
from pathlib import Path

from megatron_lite.planner.script_walks import Walker

HERE = Path(__file__).parent / "fit_scripts"
SCRIPTS = (
    "language_model.py llama",
    "language_model.py llama --recompute",
    "language_model.py qwen",
    "language_model.py gpt2",
    "language_model.py t5",
    "images.py vit",
    "images.py resnet",
    "lora.py",
    "gan.py",
    "hf_trainer.py",
    "lightning_encoder.py",
    "accelerated.py",
)
# by torchrun, on gloo: the first rank of so many
SEVERAL_RANKS = (
    "2 data_parallel.py",
    "2 data_parallel.py --unused",
    "2 sharded.py",
    "4 sharded.py --bf16",
    "2 hf_trainer.py --cpu",
    "2 accelerated.py --cpu",
    "2 lightning_encoder.py",
)
NANOGPT = "train.py config/train_shakespeare_char.py --device=cpu --compile=False --batch_size=8 --dtype=float32"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nanogpt", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    print("| script | walked | with data | equal | seconds, walked and with data |")
    print("| --- | --- | --- | --- | --- |")
    for words in SCRIPTS:
        name, *arguments = words.split()
        compare(words, Walker((sys.executable, str(HERE / name), *arguments), None))
    for words in SEVERAL_RANKS:
        ranks, name, *arguments = words.split()
        walker = Walker((sys.executable, str(HERE / name), *arguments), None, int(ranks))
        compare(f"torchrun, {ranks} ranks: {' '.join([name, *arguments])}", walker)
    if options.nanogpt:
        name, *arguments = NANOGPT.split()
        quick = "--eval_iters=1"
        os.chdir(options.nanogpt)
        compare("nanoGPT, characters", Walker((sys.executable, name, *arguments, quick), None))


def compare(name: str, walker: Walker) -> None:
    """Walk a script, run it, and print a row of the table."""
    began = time.perf_counter()
    walked = walker.walk()
    middle = time.perf_counter()
    trained = walker.walk(with_data=True)
    seconds = f"{middle - began:.1f}, {time.perf_counter() - middle:.1f}"
    if walked.failure or trained.failure:
        print(f"| {name} | {walked.failure} | {trained.failure} | | {seconds} |", flush=True)
        return
    difference = walked.allocated_peak_bytes - trained.allocated_peak_bytes
    equal = "yes" if not difference else f"{difference:+,}"
    print(
        f"| {name} | {walked.allocated_peak_bytes:,} | {trained.allocated_peak_bytes:,} | {equal} | {seconds} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
