"""A model that a CPU's kernels are put on is the model that it was."""

from functools import partial

import pytest
import torch
from support.model_variants import PLAIN, VARIANTS, build, tokens

from megatron_lite.cpu_kernels import products
from megatron_lite.cpu_kernels.gelu import gelu_in_blocks
from megatron_lite.cpu_kernels.install import choose_cpu_kernels, install_kernels
from megatron_lite.model.gpt import GPT
from megatron_lite.model.loss import token_losses
from megatron_lite.model.mlp import gelu_tanh


def suit(model: GPT):
    """Have a model compute as it does in a run on a CPU."""
    kernels = choose_cpu_kernels(model.shape, "fp32")
    model.losses = partial(token_losses, rows_at_once=5, kernels=kernels)
    for layer in model.decoder.layers:
        layer.self_attention.attend = kernels.suit_attention(layer.self_attention.attend)
    install_kernels(model, kernels)


@pytest.fixture(params=["own", "AMD"])
def processor(request, monkeypatch, tmp_path, pretend):
    """This machine's, or one whose products are convolutions, however small."""
    if request.param == "own":
        return
    if not torch.backends.mkldnn.is_available():
        pytest.skip("torch has no oneDNN here")
    (tmp_path / "cpuinfo").write_text("vendor_id\t: AuthenticAMD\nflags\t: avx2 avx512f\n")
    pretend(tmp_path / "cpuinfo")
    for name in ("MIN_ROWS", "MIN_MULTIPLICATIONS"):
        monkeypatch.setattr(products, name, 1)
    monkeypatch.setattr(products, "CONVOLVES", True)


@pytest.mark.parametrize("name", VARIANTS)
def test_losses_and_gradients_are_the_same_but_for_the_last_digits(name, processor):
    shape, results = VARIANTS[name], []
    for change in (lambda model: None, suit):
        model = build(shape)
        change(model)
        losses = model(tokens(shape, batch=4), tokens(shape, batch=4, seed=2))
        losses.mean().backward()
        results.append([losses, *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def test_parameters_and_modules_stay(pretend, tmp_path):
    (tmp_path / "cpuinfo").write_text("vendor_id\t: GenuineIntel\nflags\t: avx2\n")
    pretend(tmp_path / "cpuinfo")
    model, plain = build(PLAIN), build(PLAIN)
    suit(model)
    kinds = {name: type(one) for name, one in plain.named_modules()}
    suited = dict(model.named_modules())
    assert suited.keys() == kinds.keys()
    assert all(isinstance(suited[name], kind) for name, kind in kinds.items())
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert all(layer.mlp.activation is gelu_in_blocks for layer in model.decoder.layers)


def test_layers_of_a_kind_share_their_class_and_forward(pretend, tmp_path):
    """torch.compile takes two layers for one only then, and would compile each layer of a model otherwise."""
    (tmp_path / "cpuinfo").write_text("vendor_id\t: GenuineIntel\nflags\t: avx2\n")
    pretend(tmp_path / "cpuinfo")
    model = build(PLAIN)
    suit(model)
    first, second = model.decoder.layers
    assert type(first.mlp.linear_fc1) is type(second.mlp.linear_fc1)
    assert first.mlp.linear_fc1.products is second.mlp.linear_fc1.products
    assert not [name for name, module in model.named_modules() if "forward" in vars(module)]


@pytest.mark.parametrize("options", [{"compiled": True}, {}])
def test_a_compiler_is_left_the_formulas(options, pretend, tmp_path):
    """A layer that computes a gradient in Python is compiled anew in each run."""
    (tmp_path / "cpuinfo").write_text("vendor_id\t: GenuineIntel\nflags\t: avx2\n")
    pretend(tmp_path / "cpuinfo")
    kernels = choose_cpu_kernels(PLAIN, "fp32", **options)
    assert bool(kernels.why_explicit) is not bool(options)
    assert (gelu_tanh in kernels.activations) is not bool(options)
