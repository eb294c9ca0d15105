"""Names of modules and parameters do not depend on what wraps a model, nor on the stage that holds a layer."""

import pytest
import torch
from torch import nn

from megatron_lite.script_record.model_names import list_modules, list_parameters, unwrap


class DistributedDataParallel(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module


class Stage(nn.Module):
    """Layers of Megatron-Core number themselves in the whole model."""

    def __init__(self, first: int):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(2)])
        for place, layer in enumerate(self.layers):
            layer.layer_number = first + place


def list_names(model) -> list[str]:
    return [name for name, _ in list_parameters(unwrap(model), "")]


def test_wrappers_leave_no_trace():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert list_names(DistributedDataParallel(net)) == list_names(net) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert list_names(torch.compile(net, backend="eager")) == list_names(net)


def test_a_wrapped_part_keeps_its_name():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self._checkpoint_wrapped_module = nn.Linear(2, 2, bias=False)

    net = nn.ModuleDict({"block": Checkpointed(), "other": nn.Linear(2, 2, bias=False)})
    assert list_names(net) == ["block.weight", "other.weight"]
    assert [name for name, _ in list_modules(net, "")] == ["", "block", "block", "other"]


@pytest.mark.parametrize(("first", "numbers"), [(1, [0, 1]), (3, [2, 3]), (2, [1, 2])])
def test_layers_of_a_stage_have_the_numbers_of_the_whole(first, numbers):
    assert list_names(Stage(first)) == [f"layers.{number}.weight" for number in numbers]


def test_a_model_named_module_stays_one():
    """Only what wraps whole models is taken off."""
    net = nn.ModuleDict({"module": nn.Linear(2, 2, bias=False)})
    assert list_names(net) == ["module.weight"]


def test_a_weight_with_two_names_comes_with_both():
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    net[1].weight = net[0].weight
    assert list_names(net) == ["0.weight", "1.weight"]
