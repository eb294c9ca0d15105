"""Seconds from launch to the first step's line: eager, compiled with an empty cache, compiled with the cache of the run before.

    python benchmarks/first_step.py [--rounds 3] [-- FLAGS...]

FLAGS replace the trainer's: by default 6 layers x 384, sequence 256, micro-batch 8 in bf16. Prints medians, ranges, the share that
the trainer calls compiling, and the ordinary step.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).parent.parent
FLAGS = (
    "--num-layers 6 --hidden-size 384 --num-attention-heads 6 --seq-length 256 --max-position-embeddings 256 "
    "--micro-batch-size 8 --global-batch-size 16 --train-iters 12 --lr 1e-3 --bf16 --mock-data --vocab-size 255 "
    "--tokenizer-type NullTokenizer --hidden-dropout 0 --attention-dropout 0 --eval-iters 0 --log-interval 4"
)
KINDS = {"eager": "none", "compiled, empty cache": "layers", "compiled, cache kept": "layers"}
FIRST_LINE = re.compile(r"iteration +1/")
COMPILED = re.compile(r"compiled \d+ graphs? in ([\d.]+) s")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("flags", nargs="*", default=FLAGS.split())
    options = parser.parse_args()
    seen: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in KINDS}
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as cache:  # the second kind fills it, the third finds it
            for kind, target in KINDS.items():
                seen[kind].append(_run([*options.flags, "--torch-compile", target], Path(cache)))
                print(f"  {kind}: {seen[kind][-1][0]:.1f} s", flush=True)
    for kind, rows in seen.items():
        first = [row[0] for row in rows]
        median, compiling, ordinary = map(statistics.median, zip(*rows))
        print(
            f"{kind:<23} first step after {median:6.1f} s ({min(first):.1f} to {max(first):.1f}), compiling "
            f"{compiling:5.1f} s, ordinary step {ordinary:6.1f} ms"
        )


def _run(flags: list[str], cache: Path) -> tuple[float, float, float]:
    """Seconds to the first line, seconds of compiling, milliseconds of an ordinary step."""
    environ = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    command = [sys.executable, str(REPO / "pretrain_gpt.py"), *flags, "--run-dir", str(cache / "run")]
    (cache / "run" / "steps.jsonl").unlink(missing_ok=True)
    started, first, lines = time.monotonic(), None, []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environ | {"XDG_CACHE_HOME": str(cache)}
    ) as process:
        for line in process.stdout:
            lines.append(line)
            if first is None and FIRST_LINE.search(line):
                first = time.monotonic() - started
    if process.returncode or first is None:
        raise SystemExit("".join(lines) + f"the trainer ended with {process.returncode}")
    steps = [json.loads(line) for line in (cache / "run" / "steps.jsonl").read_text(encoding="utf-8").splitlines()]
    ordinary = [step["ms"] for step in steps if step.get("step", 0) > 1 and not step.get("compiling")]
    return first, sum(float(seconds) for seconds in COMPILED.findall("".join(lines))), statistics.median(ordinary)


if __name__ == "__main__":
    main()
