"""Learning rate and weight decay against numbers measured from Megatron-LM and against slow formulas."""

import math
from itertools import product

import numpy as np
import pytest
from support.command_lines import plan

from megatron_lite.optim.optimizer import compute_learning_rates, compute_weight_decays

SEED = (
    "--micro-batch-size 4 --global-batch-size 16 --train-iters 20000 --lr 6.0e-5 --lr-decay-style cosine "
    "--min-lr 6.0e-6 --lr-warmup-fraction .001 --lr-decay-iters 20000"
)
STYLES = ["constant", "linear", "cosine", "inverse-square-root", "WSD"]


MEGATRON = {
    0: 0.0, 1: 3e-6, 20: 6e-5, 110: 5.999729653770222e-05, 10000: 3.304245393728478e-05, 20000: 6e-6, 30000: 6e-6,
}  # fmt: skip


def test_seed_script_as_megatron_logs_it():
    schedule = plan(SEED).learning_rate
    assert schedule.warmup_samples == 320 and schedule.decay_samples == 320_000
    rates = compute_learning_rates(schedule, np.array(list(MEGATRON)) * 16)
    assert rates.tolist() == pytest.approx(list(MEGATRON.values()), rel=1e-14)


def slow_rate(n, *, style, peak, floor, init, warmup, decay, last, shape):
    """Learning rate after n samples, by cases."""
    if warmup > 0 and n <= warmup:
        return init + (peak - init) * n / warmup
    if style == "constant":
        return peak
    if n > decay:
        return floor
    if style == "inverse-square-root":
        return max(floor, peak * math.sqrt(max(warmup, 1)) / math.sqrt(max(n, 1)))
    if style == "WSD":
        if n <= decay - last:
            return peak
        done = (n - (decay - last)) / last
        left = {
            "linear": 1 - done,
            "cosine": (math.cos(math.pi * done) + 1) / 2,
            "exponential": 2 * 0.5**done - 1,
            "minus_sqrt": 1 - math.sqrt(done),
        }[shape]
    else:
        done = (n - warmup) / (decay - warmup)
        left = 1 - done if style == "linear" else (math.cos(math.pi * done) + 1) / 2
    return floor + (peak - floor) * left


def settings(changes):
    """The flags of `changes`, with what they mean in samples: (learning rate plan, arguments of slow_rate)."""
    words = changes.split()
    given = dict(zip(words[::2], words[1::2]))
    p = plan(f"--lr 1e-3 --min-lr 1e-4 --global-batch-size 8 --train-iters 100 {changes}")
    decay = int(given.get("--lr-decay-iters", 100)) * 8
    warmup = int(given.get("--lr-warmup-iters", 0)) * 8
    if "--lr-warmup-fraction" in given:
        warmup = float(given["--lr-warmup-fraction"]) * decay
    style, shape = given.get("--lr-decay-style", "linear"), given.get("--lr-wsd-decay-style", "exponential")
    init, last = float(given.get("--lr-warmup-init", 0)), int(given.get("--lr-wsd-decay-iters", 0)) * 8
    amounts = {"peak": 1e-3, "floor": 1e-4, "decay": decay, "warmup": warmup, "init": init, "last": last}
    return p.learning_rate, {"style": style, "shape": shape, **amounts}


WARMUPS = ["", "--lr-warmup-iters 7", "--lr-warmup-fraction 0.013", "--lr-warmup-iters 10 --lr-warmup-init 5e-4"]
CASES = [
    f"--lr-decay-style {style} {warmup} {decay}".strip()
    for style, warmup, decay in product(STYLES[:-1], WARMUPS, ("", "--lr-decay-iters 60"))
]
CASES += [
    f"--lr-decay-style WSD --lr-wsd-decay-iters {last} --lr-wsd-decay-style {shape} {warmup}".strip()
    for shape, last, warmup in product(("linear", "cosine", "exponential", "minus_sqrt"), (0, 30, 100), WARMUPS[:2])
]


@pytest.mark.parametrize("changes", CASES)
def test_every_style_against_a_formula_by_cases(changes):
    schedule, facts = settings(changes)
    samples = np.arange(0, 1000)
    expected = [slow_rate(int(n), **facts) for n in samples]
    np.testing.assert_allclose(compute_learning_rates(schedule, samples), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("style", STYLES)
def test_in_samples_and_in_iterations_is_the_same(style):
    last = " --lr-wsd-decay-{} {}" if style == "WSD" else ""
    by_iters = plan(f"--lr-decay-style {style} --lr-warmup-iters 5 --lr-decay-iters 80" + last.format("iters", 20))
    by_samples = plan(
        f"!--train-iters --train-samples 800 --lr-decay-style {style} --lr-warmup-samples 40 "
        f"--lr-decay-samples 640" + last.format("samples", 160)
    )
    assert by_iters.learning_rate == by_samples.learning_rate


def test_left_out_decay_lasts_the_whole_training():
    assert plan().learning_rate.decay_samples == 800
    growing = "--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 1"
    by_samples = plan(f"!--train-iters --train-samples 803 {growing}")
    assert by_samples.learning_rate.decay_samples == by_samples.learning_rate.weight_decay_samples == 803
    assert by_samples.train_samples == 800


def slow_decay(n, style, start, end, total):
    if n > total:
        return end
    share = {"constant": 1.0, "linear": n / total, "cosine": 0.5 * (math.cos(math.pi * (1 - n / total)) + 1)}[style]
    return start + (end - start) * share


@pytest.mark.parametrize("style", ["linear", "cosine"])
def test_growing_weight_decay(style):
    schedule = plan(f"--weight-decay-incr-style {style} --start-weight-decay 0.02 --end-weight-decay 0.1").learning_rate
    samples = np.arange(0, 1000)
    expected = [slow_decay(int(n), style, 0.02, 0.1, 800) for n in samples]
    np.testing.assert_allclose(compute_weight_decays(schedule, samples), expected, rtol=1e-12)
    assert compute_weight_decays(schedule, [0, 400, 800]).tolist() == pytest.approx([0.02, 0.06, 0.1])


def test_constant_weight_decay_and_shapes():
    schedule = plan("--weight-decay 0.1").learning_rate
    assert set(compute_weight_decays(schedule, np.arange(0, 2000, 50)).tolist()) == {0.1}
    assert compute_learning_rates(schedule, np.zeros((2, 3))).shape == (2, 3)
    assert compute_learning_rates(schedule, 0).shape == compute_weight_decays(schedule, 0).shape == ()
