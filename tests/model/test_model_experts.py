"""A mixture of experts: losses and biases that balance it, capacities, and experts without tokens."""

from dataclasses import replace

import pytest
import torch
from support.expert_variants import DEEPSEEK, EXPERT_VARIANTS, PLAIN_EXPERTS, mix
from support.model_variants import build, tokens
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_lite.model.experts import (
    Routes,
    count_assignments,
    drop_beyond_capacity,
    list_mixtures,
    multiply_groups,
    sort_by_expert,
)

CPU = torch.device("cpu")


def test_the_losses_that_balance_experts_are_noted_once_for_each_backward():
    shape = EXPERT_VARIANTS["two losses"]
    model = build(shape)
    inputs = tokens(shape)
    states = [mixture.router.state for _, mixture in list_mixtures(model)]
    with torch.no_grad():
        model(inputs, inputs)
    assert all(state.losses == {} for state in states)
    for _ in range(2):
        model(inputs, inputs).mean().backward()
    for state in states:
        assert set(state.losses) == {"load_balancing_loss", "seq_load_balancing_loss"}
        # even shares of assignments and scores give 1, and two backwards were done
        assert 1.9 < state.losses["load_balancing_loss"] < 4
        assert state.tokens_E.sum() == 2 * inputs.numel() * shape.experts.topk
        assert state.dropped == 0


def test_biases_move_by_their_rate_towards_the_mean():
    model = build(mix(replace(DEEPSEEK, layers=(True, True))))
    _, mixture = next(iter(list_mixtures(model)))
    mixture.router.state.prepare(CPU)
    mixture.router.state.balance(torch.tensor([4.0, 0, 2, 2, 2, 2, 2, 2]), 1e-3)
    expected = torch.tensor([-1e-3, 1e-3, 0, 0, 0, 0, 0, 0])
    assert torch.equal(mixture.router.state.bias_E, expected)


@pytest.mark.parametrize(("policy", "kept"), [("position", [1, 1, 0, 0]), ("probs", [0, 1, 0, 1])])
def test_what_is_beyond_capacity_is_dropped(policy, kept):
    """Four tokens want the first of two experts, which has room for two."""
    shares = torch.tensor([[0.1], [0.4], [0.2], [0.3]])
    routes = Routes(torch.zeros(4, 1, dtype=torch.long), shares, None)
    dropped = drop_beyond_capacity(routes, 2, 1.0, policy)
    assert dropped.kept_MK.flatten().int().tolist() == kept
    assert count_assignments(dropped, 2).tolist() == [2, 0]
    assigned = sort_by_expert(dropped, 2)
    assert assigned.tokens_A.tolist() == [token for token, stays in enumerate(kept) if stays]
    assert assigned.counts_E.tolist() == [2, 0]


def test_an_expert_without_tokens_has_a_gradient_of_zero():
    shape = mix(replace(PLAIN_EXPERTS, number=16, topk=1, pre_softmax=True))
    model = build(shape)
    inputs = tokens(shape)[:1, :4]
    model(inputs, inputs).mean().backward()
    _, mixture = next(iter(list_mixtures(model)))
    gradients = mixture.experts.linear_fc1.weight.grad.unflatten(0, (16, -1))
    silent = [number for number, gradient in enumerate(gradients) if not gradient.any()]
    counts = mixture.router.state.tokens_E
    assert silent == [number for number, count in enumerate(counts.tolist()) if count == 0] != []


class NotesCopies(TorchDispatchMode):
    """Notes of each copy to another device whether the host goes on meanwhile."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        named = named or {}
        if function is torch.ops.aten._to_copy.default and named.get("device", arguments[0].device) != CPU:
            self.found.append(named.get("non_blocking", False))
        return function(*arguments, **named)


def test_a_gpus_products_of_experts_do_not_keep_the_host_waiting():
    with FakeTensorMode():
        rows = torch.empty(16, 8, device="cuda", dtype=torch.bfloat16)
        weights = torch.empty(2, 24, 8, device="cuda", dtype=torch.bfloat16)
        with NotesCopies() as copies:
            assert multiply_groups(rows, weights, [4, 12]).shape == (16, 24)
    assert copies.found == [True]
