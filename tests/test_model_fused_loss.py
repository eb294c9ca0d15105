"""The loss in two pieces for a compiler, against the eager one and torch's cross entropy."""

from functools import partial

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from loss_cases import V, made, whole
from torch._dynamo.utils import counters

from megatron_lite.model.fused_loss import Pieces, fused_token_losses
from megatron_lite.model.loss import token_losses
from megatron_lite.parallel.layers import LOSS_PIECES


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    torch._dynamo.reset()
    counters.clear()


def results(losses, dtype):
    hidden, weight, labels, factors = made(dtype)
    found = losses(hidden, weight, labels)
    (found * factors).sum().backward()
    return found.detach(), hidden.grad, weight.grad


def compiled(backend="aot_eager"):
    return partial(
        fused_token_losses, pieces=Pieces(*(torch.compile(f, backend=backend, dynamic=False) for f in Pieces()))
    )


WAYS = {
    "eager": lambda: partial(fused_token_losses, pieces=Pieces()),
    "aot_eager": compiled,
    "inductor": lambda: compiled("inductor"),
}
SOME = [pytest.param(name, marks=pytest.mark.slow if name == "inductor" else ()) for name in WAYS]
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("way", SOME)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("other", [whole, token_losses])
def test_losses_and_gradients_are_those_of_the_others(way, dtype, other):
    (mine, *gradients), (theirs, *expected) = results(WAYS[way](), dtype), results(other, dtype)
    assert torch.allclose(mine, theirs, atol=3e-6)
    for one, right in zip(gradients, expected):
        assert (one - right).norm() < TOLERANCES[dtype] * right.norm()


@pytest.mark.parametrize("way", SOME)
def test_small_gradients_survive_fp16_with_the_loss_scale(way):
    hidden, weight, labels, _ = made(torch.float16)
    mean, scale = 1 / 32768, 2.0**12
    (WAYS[way]()(hidden, weight, labels).sum() * mean * scale).backward()
    exact = made(torch.float64)
    (
        F.cross_entropy(F.linear(exact[0], exact[1]).flatten(0, 1), labels.flatten(), reduction="sum") * mean * scale
    ).backward()
    for mine, theirs in ((hidden, exact[0]), (weight, exact[1])):
        assert (mine.grad.double() - theirs.grad).norm() < 5e-3 * theirs.grad.norm()


@pytest.mark.parametrize("way", SOME)
def test_logits_become_their_gradient_in_place_and_only_once(way):
    hidden, weight, labels, _ = made(torch.bfloat16)
    losses = WAYS[way]()(hidden, weight, labels)
    logits_MV = losses.grad_fn.next_functions[0][0].saved_tensors[0]
    place, before = logits_MV.data_ptr(), logits_MV.clone()
    losses.sum().backward(retain_graph=True)
    assert logits_MV.data_ptr() == place and not torch.equal(logits_MV, before)
    assert logits_MV.float().sum(-1).abs().max() < 0.02  # softmax less a one
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses.sum().backward()


@pytest.mark.parametrize("way", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_training_and_evaluating_are_one_variant(way):
    losses, (hidden, weight, labels, _) = WAYS[way](), made(torch.float32)
    for _ in range(2):
        losses(hidden, weight, labels).sum().backward()
        with torch.no_grad():
            assert torch.allclose(losses(hidden, weight, labels), whole(hidden, weight, labels), atol=3e-6)
    assert counters["stats"]["unique_graphs"] == len(Pieces()) == LOSS_PIECES
    assert not counters["graph_break"]


@pytest.mark.slow
def test_inductor_stores_nothing_of_the_logits_size(monkeypatch):
    """Beside the logits: some numbers per row."""
    sources = []
    from torch._inductor.graph import GraphLowering

    inner = GraphLowering.codegen
    monkeypatch.setattr(
        GraphLowering, "codegen", lambda self: (found := inner(self), sources.append(str(found[0].value)))[0]
    )
    with torch._inductor.utils.fresh_cache():
        results(compiled("inductor"), torch.bfloat16)
    stored = [line for text in sources for line in text.splitlines() if "= empty_strided" in line and "((" in line]
    assert len(sources) == 2 and stored
    assert not any(str(V) in line.split("empty_strided")[1] for line in stored), stored
