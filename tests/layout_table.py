"""How far training on several ranks is from one rank: the largest differences of loss and gradient norm over 10 steps.

python tests/layout_table.py [--models WORD ...] [--layouts WORD ...]    of names in test_parallel_layouts that hold one of the words

The first row is one rank beside itself with micro-batches of 4 sequences instead of 1, so in another order of sums.
"""

import argparse
import contextlib
import io
import sys
import tempfile
from pathlib import Path

from launch import alone, flags, steps, train
from test_parallel_layouts import LAYOUTS, MODELS, TRAIN, run_cases

STEPS = 10
MANY = f"--train-iters {STEPS}"  # the last one of a name wins


def largest(one: list[dict], other: list[dict], key: str) -> float:
    return max(abs(a[key] - b[key]) for a, b in zip(one, other, strict=True))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=["fp32", "bf16", "fp16"])
    parser.add_argument("--layouts", nargs="+", default=[""])
    options = parser.parse_args()
    models = [name for name in MODELS if any(word in name for word in options.models)]
    layouts = [name for name in LAYOUTS if any(word in name for word in options.layouts)]
    cases = [(m, n) for n in layouts for m in models if not (n == "tp4, sp" and "llama" in m)]  # it has 2 groups
    print(f"{'layout':22}{'model':26}{'loss':>9}{'norm':>9}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_cases(folder, cases, MANY)
        with alone(), contextlib.redirect_stdout(io.StringIO()):
            for model in models:
                train(flags(TRAIN, MODELS[model][0], MANY, "--micro-batch-size 4"), folder / "again" / model)
        for model, layout in [*((model, "") for model in models), *cases]:
            one = steps(folder / "alone" / model)
            where = folder / str(LAYOUTS[layout][1]) / f"{model}; {layout}" if layout else folder / "again" / model
            differences = (f"{largest(one, steps(where), key):9.1e}" for key in ("loss", "grad_norm"))
            print(f"{layout or '1 rank':22}{model:26}{''.join(differences)}")


if __name__ == "__main__":
    sys.exit(main())
