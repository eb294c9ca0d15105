"""What is put on a model from outside stands in for methods that the model has."""

import pytest
import torch
from torch import nn

from megatron_lite.parallel.layers import replace_method


def test_one_module_calls_the_function_and_others_their_own_method():
    changed = nn.Linear(2, 2)
    other = nn.Linear(2, 2)
    names = list(changed.state_dict())
    replace_method(changed, "forward", lambda x: x + 1)
    x = torch.zeros(3, 2)
    assert torch.equal(changed(x), x + 1)
    assert not torch.equal(other(x), x + 1)
    assert list(changed.state_dict()) == names


@pytest.mark.parametrize("name", ["foreward", "weight"])
def test_a_name_that_is_no_method_is_refused(name):
    with pytest.raises((AttributeError, AssertionError)):
        replace_method(nn.Linear(2, 2), name, lambda x: x)
