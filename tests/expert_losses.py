"""Ten losses of each kind of mixture of experts, of this trainer and of Megatron-Core, one below the other.

python tests/expert_losses.py [WORD ...]    kinds whose names hold one of the words; needs megatron-core
"""

import argparse
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # of the benchmarks

from support.expert_variants import EXPERT_VARIANTS
from support.latent_variants import LATENT_VARIANTS
from support.megatron_core import (
    Ours,
    Theirs,
    as_theirs,
    batches,
    package_info,
    plan_for,
    pretend_cuda,
    reference,
)

from benchmarks.experts import megatron_on_cpu
from megatron_lite.config.shape import ModelShape
from megatron_lite.model.experts import list_mixtures

STEPS = 10
WITH_LATENT = {f"latent, {name}": LATENT_VARIANTS[name] for name in ("deepseek", "experts")}
KINDS = EXPERT_VARIANTS | WITH_LATENT


def train_both(shape: ModelShape) -> tuple[list[float], list[float], float]:
    """(our losses, theirs, the largest relative difference of losses and gradient norms) from the same weights."""
    plan = plan_for("fp32")
    ours = Ours(plan, shape)
    names = dict(reference(shape).named_parameters())
    theirs = Theirs(plan, shape, as_theirs(dict(ours.model.named_parameters()), names))
    losses: tuple[list[float], list[float]] = ([], [])
    largest = 0.0
    for batch in batches(shape, STEPS):
        for _, mixture in list_mixtures(ours.model):
            mixture.router.state.begin_step()
        for run, found in zip((ours, theirs), losses):
            found.append(run.train(batch))
        for module in theirs.model.modules():
            if hasattr(module, "reset_global_aux_loss_tracker"):
                module.reset_global_aux_loss_tracker()
        pairs = ((losses[0][-1], losses[1][-1]), (ours.grad_norm, float(theirs.grad_norm)))
        largest = max(largest, *(abs(one - other) / abs(other) for one, other in pairs))
    return *losses, largest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", default=[""])
    words = parser.parse_args().words
    with pytest.MonkeyPatch.context() as patch, megatron_on_cpu():
        print(f"Megatron-Core {package_info.__version__}, fp32, {STEPS} steps")
        patch.setattr("megatron.core.transformer.multi_latent_attention.HAVE_TE", False)
        pretend_cuda(patch)
        for name, shape in KINDS.items():
            if not any(word in name for word in words):
                continue
            try:
                ours, theirs, largest = train_both(shape)
            except pytest.skip.Exception as skipped:
                print(f"{name:24} left out: {skipped.msg}")
                continue
            for side, losses in (("ours", ours), ("theirs", theirs)):
                print(f"{name:24} {side:7}", *(f"{loss:.6f}" for loss in losses))
            print(f"{name:24} largest relative difference of losses and norms {largest:.1e}", flush=True)


if __name__ == "__main__":
    main()
