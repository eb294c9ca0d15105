"""A checkpoint goes through six layouts of experts and back to the first: are weights and optimizer state the same bits?

python tests/expert_ring.py [--precision bf16 ...]

A rank trains two steps and saves. Each layout loads what the one before has saved (torch_dist), and saves it again before any
step. Each line compares all tensors with those that the one rank has saved, bit by bit.
"""

import argparse
import contextlib
import hashlib
import io
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from layout_table import DEEPSEEK, EXPERTS, LAYOUTS, TRAIN, build_rank
from support.launch import alone, checkpoint, flags, on_ranks, plan_of, train

from megatron_lite.train.checkpoint import Checkpoints
from megatron_lite.train.loop import Progress

STEPS = 2
ALONE = "one rank"
PRECISIONS = {"fp32": "", "bf16": "--bf16"}
RING = (
    "ep2, zero1, 4",
    "ep4, zero1",
    "ep2, etp2, zero1",
    "ep2, pp2, chunks, zero1",
    "ep4, tp2, sp, etp1",
    "ep1, tp2, sp, etp1, zero1",
    "ep2, zero1, 4",
)
MODEL = f"{EXPERTS} {DEEPSEEK} --moe-router-dtype fp32 --ckpt-format torch_dist --exit-interval {STEPS}"


@dataclass(frozen=True)
class Saved:
    """What one layout has saved."""

    layout: str
    tensors: int
    of_experts: int
    num_bytes: int
    digest: str  # of all tensors with their names and types
    different: tuple[str, ...]  # names of tensors that are not those of the one rank


def load_and_save(world, argv: str):
    """For on_ranks: what is loaded from --load is saved again, before any step."""
    plan = plan_of(json.loads(argv), world)
    with Checkpoints(plan, *build_rank(plan), torch.device("cpu")) as checkpoints:
        progress = Progress()
        checkpoints.load(progress)
        checkpoints.save(progress)


def go_round(folder: Path, precision: str) -> Iterator[Saved]:
    """Take a checkpoint of a rank through the ring of layouts."""
    words = f"{MODEL} {PRECISIONS[precision]}"
    kept = folder / "alone"
    with alone(), contextlib.redirect_stdout(io.StringIO()):
        train(flags(TRAIN, words, "--save", kept), folder)
    first = read_state(kept)
    yield describe(ALONE, first, first)
    for number, layout in enumerate(RING):
        layout_words, ranks = LAYOUTS[layout]
        target = folder / str(number)
        argv = flags(TRAIN, words, layout_words, "--load", kept, "--save", target)
        on_ranks(load_and_save, folder, json.dumps(argv), ranks=ranks)
        yield describe(layout, read_state(target), first)
        kept = target


def read_state(save: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint but the states of random generators, which ranks have each."""
    saved = checkpoint(save, STEPS)
    return {name: value for name, value in saved.items() if name != "record" and not name.startswith("random.")}


def describe(layout: str, found: dict[str, torch.Tensor], first: dict[str, torch.Tensor]) -> Saved:
    """Compare tensors with those of the one rank."""
    digest = hashlib.sha256()
    for name, tensor in sorted(found.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    different = [name for name in sorted(found.keys() | first.keys()) if not is_same(found.get(name), first.get(name))]
    return Saved(
        layout=layout,
        tensors=len(found),
        of_experts=sum(".mlp.experts." in name for name in found),
        num_bytes=sum(tensor.nbytes for tensor in found.values()),
        digest=digest.hexdigest()[:16],
        different=tuple(different),
    )


def is_same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether both are there with the same bits."""
    if one is None or other is None or one.dtype != other.dtype or one.shape != other.shape:
        return False
    # as bytes: -0.0 and 0.0 differ, and NaN is itself
    return torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    for precision in parser.parse_args().precision:
        print(f"{precision:29}{'tensors':>8}{'experts':>9}{'bytes':>11}  sha256            differs from the start")
        with tempfile.TemporaryDirectory() as name:
            for one in go_round(Path(name), precision):
                sizes = f"{one.tensors:8}{one.of_experts:9}{one.num_bytes:11,}"
                print(f"{one.layout:29}{sizes}  {one.digest}  {', '.join(one.different) or 'nothing'}", flush=True)


if __name__ == "__main__":
    main()
