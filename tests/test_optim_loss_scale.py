"""The dynamic loss scale against the rules written down as plain Python."""

import random
from dataclasses import dataclass

import pytest
import torch
from launch import flags, plan_of

from megatron_lite.optim.loss_scale import DynamicLossScale, LossScale, make_loss_scale

CPU = torch.device("cpu")


@dataclass
class Rules:
    """Halve once `hysteresis` overflows are used up; double after `window` clean steps, which restores them."""

    scale: float
    minimum: float
    window: int
    hysteresis: int

    def __post_init__(self):
        self.clean, self.left = 0, self.hysteresis

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
    settings = {
        "minimum": draw.choice([1.0, 0.25, 64.0]),
        "window": draw.choice([1, 2, 5, 20]),
        "hysteresis": draw.choice([1, 2, 3, 7]),
    }
    rules = Rules(scale=2.0**10, **settings)
    ours = DynamicLossScale(2.0**10, settings["minimum"], settings["window"], settings["hysteresis"], CPU)
    for _ in range(3000):
        # always while the scale is high, so that it does not grow into inf
        overflow = rules.scale > 2**20 or draw.random() < (0.02 if rules.scale < 2**6 else 0.2)
        ours.update(torch.tensor(overflow))
        rules.update(overflow)
        assert (ours.scale.item(), ours.growth_tracker.item(), ours.hysteresis_tracker.item()) == (
            rules.scale,
            rules.clean,
            rules.left,
        )


def test_from_2_32_to_2_16_takes_17_overflows():
    ours = DynamicLossScale(2.0**32, 1.0, 1000, 2, CPU)
    scales = []
    while ours.scale.item() > 2**16:
        ours.update(torch.tensor(True))
        scales.append(ours.scale.item())
    assert len(scales) == 17 and scales[:3] == [2.0**32, 2.0**31, 2.0**30]


def test_hysteresis_is_not_restored_by_a_clean_step():
    ours = DynamicLossScale(16.0, 1.0, 100, 2, CPU)
    scales = []
    for overflow in (True, False, False, False, True, False, False, False, True):
        ours.update(torch.tensor(overflow))
        scales.append(ours.scale.item())
    assert scales == [16, 16, 16, 16, 8, 8, 8, 8, 4]


def test_never_below_the_minimum():
    ours = DynamicLossScale(8.0, 4.0, 100, 1, CPU)
    for _ in range(5):
        ours.update(torch.tensor(True))
    assert ours.scale.item() == 4.0


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


def test_a_fixed_scale_has_nothing_to_be_saved():
    assert LossScale(128.0, CPU).tensors() == {}


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
    made = make_loss_scale(plan_of(flags(words)), CPU)
    assert type(made) is kind and (made is None or made.scale.item() == scale)
