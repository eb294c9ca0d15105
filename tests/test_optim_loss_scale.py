"""The dynamic loss scale against the rules written down as plain Python."""

import random

import pytest
import torch
from launch import flags, plan_of

from megatron_lite.optim.optimizer import DynamicLossScale, LossScale, make_loss_scale

CPU = torch.device("cpu")


class Rules:
    """Halve once `hysteresis` overflows are used up; double after `window` clean steps, which restores them."""

    def __init__(self, scale: float, minimum: float, window: int, hysteresis: int):
        self.scale, self.minimum, self.window, self.hysteresis = scale, minimum, window, hysteresis
        self.clean, self.left = 0, hysteresis

    def update(self, overflow: bool):
        if overflow:
            self.clean = 0
            self.left -= 1
            if self.left <= 0:
                self.scale = max(self.scale / 2, self.minimum)
            return
        self.clean += 1
        if self.clean == self.window:
            self.clean, self.left = 0, self.hysteresis
            self.scale *= 2


@pytest.mark.parametrize("seed", range(6))
def test_thousands_of_random_updates(seed):
    draw = random.Random(seed)
    settings = 2.0**10, draw.choice([1.0, 0.25, 64.0]), draw.choice([1, 2, 5, 20]), draw.choice([1, 2, 3, 7])
    rules, ours = Rules(*settings), DynamicLossScale(*settings, CPU)
    for _ in range(1000):
        # always while the scale is high, so that it does not grow into inf
        overflow = rules.scale > 2**20 or draw.random() < (0.02 if rules.scale < 2**6 else 0.2)
        ours.update(torch.tensor(overflow))
        rules.update(overflow)
        found = [tensor.item() for tensor in ours.tensors().values()]
        assert found == [rules.scale, rules.clean, rules.left]


@pytest.mark.parametrize(
    ("given", "overflows", "scales"),
    [
        ((2.0**32, 1.0, 1000, 2), [True] * 17, [2.0 ** (33 - max(n, 1)) for n in range(1, 18)]),  # to 2**16
        # a clean step restores nothing
        ((16.0, 1.0, 100, 2), [n % 4 == 0 for n in range(9)], [16] * 4 + [8] * 4 + [4]),
        ((8.0, 4.0, 100, 1), [True] * 5, [4.0] * 5),  # never below the minimum
    ],
)
def test_known_sequences(given, overflows, scales):
    ours, found = DynamicLossScale(*given, CPU), []
    for overflow in overflows:
        ours.update(torch.tensor(overflow))
        found.append(ours.scale.item())
    assert found == scales


def test_a_saved_scale_goes_on_where_it_was():
    one, other = (DynamicLossScale(1024.0, 1.0, 4, 3, CPU) for _ in range(2))
    for overflow in (True, False, False, True, False):
        one.update(torch.tensor(overflow))
    for name, tensor in other.tensors().items():
        tensor.copy_(one.tensors()[name])
    for overflow in (True, False, False, False, False, True) * 3:
        one.update(torch.tensor(overflow))
        other.update(torch.tensor(overflow))
        assert one.tensors() == other.tensors()


@pytest.mark.parametrize(
    "words, kind, scale",
    [
        ("--fp16", DynamicLossScale, 2.0**32),
        ("--fp16 --initial-loss-scale 4096", DynamicLossScale, 4096.0),
        ("--fp16 --loss-scale 64", LossScale, 64.0),
        ("--fp16 --loss-scale 0", DynamicLossScale, 2.0**32),
        ("--bf16 --loss-scale 8", LossScale, 8.0),
        ("--bf16", type(None), None),
        ("", type(None), None),
    ],
)
def test_which_precision_has_which_scale(words, kind, scale):
    plan = plan_of(flags(words))
    made = make_loss_scale(plan.precision, plan.args.precision, CPU)
    assert type(made) is kind and (made is None or made.scale.item() == scale)
    assert kind is not LossScale or made.tensors() == {}, "a fixed one has nothing to be saved"
