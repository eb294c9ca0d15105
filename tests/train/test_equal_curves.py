"""Each fast piece of the trainer trains as the plain path does: 120 iterations on made-up code, losses laid upon each other.

Where tolerances come from. Two paths that compute the same round differently, by some 2^-24 of a number in fp32, 2^-11 in
fp16, 2^-8 in bf16. The first steps' gradient norms differ by about that. Training then amplifies it, whatever the piece:
what was seen of correct pairs is written beside the tolerances, and every tolerance is below what planted
mistakes do. Adam is blind to a wrong scale of all gradients, so that the norms have to show that one.
"""

import functools
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support.equal_curves import STEPS, WORDS, apart, curve_of, norms_apart, offset, plain_curve, read_curve, write_text
from support.launch import flags, on_ranks, train_all
from support.plain_gpt import Curve

from megatron_lite.parallel import data_parallel
from megatron_lite.parallel.data_parallel import Fp32Gradients
from megatron_lite.train import choose_kernels

pytestmark = pytest.mark.usefixtures("process_group")

FEW = 20  # iterations, at which a run exits: the order of data depends on --train-iters
FP16 = "--fp16 --initial-loss-scale 4096 --loss-scale-window 25"  # doubles four times


@dataclass(frozen=True)
class Tolerance:
    """loss: at any step, nats; offset: of the last half's mean, nats; norm: of the first gradients, relative."""

    loss: float
    offset: float
    norm: float

    def holds(self, one: Curve, other: Curve) -> bool:
        found = apart(one.losses, other.losses), offset(one, other), norms_apart(one, other)
        print("apart: losses {:.1e}, offset {:.1e}, norms {:.1e}".format(*found))
        return all(value < limit for value, limit in zip(found, (self.loss, self.offset, self.norm)))


# most that was seen of correct pairs, whichever kernels: fp32 7e-7, 2e-7, 2e-7; fp16 2.6e-3, 5e-4, 1e-4; bf16 3.6e-3, 1e-3, 7e-4;
# between precisions 2.2e-3, 8e-4, 2.2e-3. The least of the small mistakes in fp32: 4e-4, 2e-4
IN_FP32, IN_FP16, IN_BF16 = Tolerance(3e-5, 5e-6, 1e-5), Tolerance(1e-2, 2e-3, 1e-3), Tolerance(2e-2, 4e-3, 5e-3)
BETWEEN_PRECISIONS = Tolerance(2e-2, 4e-3, 1e-2)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text")


@pytest.fixture(scope="module")
def train(data, tmp_path_factory) -> Callable[[str], Curve]:
    """The trainer's curve with these flags; trained once. In fp32 the loss is in rows: 18 whole chunks of 7 tokens, one of 2."""

    @functools.cache
    def train_once(words: str) -> Curve:
        with pytest.MonkeyPatch.context() as patch:
            if "16" not in words:
                patch.setattr(choose_kernels, "count_rows", lambda vocabulary, max_logits: 7)
            return curve_of(data, tmp_path_factory.mktemp("run"), words)

    return train_once


@pytest.fixture(scope="module")
def ours(train) -> Curve:
    return train("")


def test_the_trainer_in_fp32_is_plain_pytorch(data, ours):
    """torch's attention, GELU, the loss in rows, unscaling and clipping folded into the optimizer, the schedule."""
    assert ours.losses[-1] < ours.losses[0] - 1.8, "it learns"
    assert min(ours.norms) < 0.8 < statistics.median(ours.norms), "many steps are clipped, not all"
    assert IN_FP32.holds(ours, plain_curve(data))


@pytest.mark.parametrize("mistake", [{"divide_by": 2.001}, {"summed": 1}], ids=str)
def test_a_wrong_scale_is_seen_in_the_first_norms(data, ours, mistake):
    assert norms_apart(ours, plain_curve(data, steps=2, **mistake)) > 10 * IN_FP32.norm


def test_a_missing_clip_is_seen_in_the_losses(data, ours):
    assert apart(ours.losses, plain_curve(data, steps=60, clip=1e9).losses) > 10 * IN_FP32.loss


@pytest.mark.slow
@pytest.mark.parametrize(
    "mistake", [{"clip": 0.88}, {"lr": 1.01e-3}, {"decay": 0.11}, {"decay_all": True}, {"eps": 1e-7}], ids=str
)
def test_a_small_mistake_is_seen_in_fp32(data, ours, mistake):
    assert not IN_FP32.holds(ours, plain_curve(data, **mistake))


@pytest.mark.slow
@pytest.mark.parametrize("words, tolerance", [(FP16, IN_FP16), ("--bf16", IN_BF16)], ids=["fp16", "bf16"])
def test_16_bits_are_plain_pytorch(data, train, ours, words, tolerance):
    curve, reference = train(words), plain_curve(data, words)
    assert tolerance.holds(curve, reference) and BETWEEN_PRECISIONS.holds(curve, ours)
    assert curve.scales == reference.scales and curve.scales[-1] == (65536 if words == FP16 else 1)
    for mistake in ({"summed": 1}, {"divide_by": 2.2}):
        assert norms_apart(curve, plain_curve(data, words, steps=2, **mistake)) > tolerance.norm, mistake
    assert apart(curve.losses, plain_curve(data, words, steps=100, clip=1e9).losses) > tolerance.loss


@pytest.mark.slow
@pytest.mark.parametrize(
    "words, tolerance", [("", IN_FP32), (FP16, IN_FP16), ("--bf16", IN_BF16)], ids=["fp32", "fp16", "bf16"]
)
def test_kernels_of_attention_agree(train, words, tolerance):
    """On a CPU auto is torch's kernel in fp16, and the explicit one in fp32 and bf16."""
    chosen, other = ("flash", "unfused") if words == FP16 else ("unfused", "flash")
    auto = train(words)
    few = train(f"{words} --attention-backend {chosen} --exit-interval {FEW}")
    assert few.losses == auto.losses[:FEW], "it is the chosen one"
    different = train(f"{words} --attention-backend {other}")
    assert apart(auto.losses, different.losses) > 0, "they are different kernels"
    assert tolerance.holds(auto, different)


@pytest.mark.slow
@pytest.mark.parametrize("words, tolerance", [("", IN_FP32), ("--bf16", IN_BF16)], ids=["fp32", "bf16"])
def test_compiled_layers_agree_with_eager_ones(train, words, tolerance):
    eager, compiled = train(words), train(f"{words} --torch-compile layers")
    assert apart(eager.losses, compiled.losses) > 0, "they are different kernels"
    assert tolerance.holds(eager, compiled)


@pytest.mark.slow
def test_two_ranks_agree_with_one(data, tmp_path, train, ours):
    scenarios = tmp_path / "scenarios.json"
    words = {"fp32": "", "bf16": "--bf16"}
    scenarios.write_text(json.dumps({name: flags(WORDS, words[name], data=data) for name in words}))
    on_ranks(train_all, tmp_path, str(scenarios))
    assert IN_FP32.holds(read_curve(tmp_path / "fp32"), ours)
    assert IN_BF16.holds(read_curve(tmp_path / "bf16"), train("--bf16"))


class Sums(Fp32Gradients):
    """In another precision."""

    def __init__(self, parameters, *args, dtype):
        super().__init__(parameters, *args)
        self._sums = {p: torch.zeros_like(p, dtype=dtype) for p in parameters}

    def gradients(self):
        return [gradient.float() for gradient in super().gradients()]


@pytest.mark.slow
def test_sums_in_fp32_are_as_good_as_exact_ones(data, tmp_path, monkeypatch):
    """Of 8 micro-batches: those in bf16 leave them at the first step."""
    words, curves = "--bf16 --micro-batch-size 1", []
    for dtype, steps in ((torch.float32, STEPS), (torch.float64, STEPS), (torch.bfloat16, 1)):
        sums = Fp32Gradients if dtype == torch.float32 else functools.partial(Sums, dtype=dtype)
        monkeypatch.setattr(data_parallel, "Fp32Gradients", sums)
        curves.append(curve_of(data, tmp_path / str(dtype), words, f"--exit-interval {steps}"))
    ours, exact, rough = curves
    assert abs(ours.norms[0] / exact.norms[0] - 1) < 1e-6
    assert abs(rough.norms[0] / exact.norms[0] - 1) > 1e-4
    assert IN_BF16.holds(ours, exact)
