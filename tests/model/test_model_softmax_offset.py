"""--softmax-type: what attention's softmax is divided by besides, in every kernel and against transformers' GPT-OSS."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.launch import alone, checkpoint, flags, losses, plan_of, quietly
from support.model_variants import PLAIN, build, tokens

from megatron_lite.checkpoint.find import open_checkpoint
from megatron_lite.config.model_size import count_parameters
from megatron_lite.convert.families import family_of_shape
from megatron_lite.errors import ConfigError
from megatron_lite.generate import Generator
from megatron_lite.model.attention import Scope, explicit_attention, find_document_edges
from megatron_lite.model.flash_attention import flash_attention

CPU = torch.device("cpu")
LEARNABLE = replace(PLAIN, softmax_type="learnable", num_query_groups=2)
DOCUMENTS = torch.tensor([[7] * 5 + [8] * 7, [0] * 2 + [1] * 9 + [2]])
EDGES = find_document_edges(DOCUMENTS, CPU)


def heads(number, seed, length=12, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, number, length, 8, generator=generator).to(dtype).requires_grad_()


def explicitly(q, k, v, scope):
    return explicit_attention(q, k, v, scope, 0.0, 1, fp32_softmax=False, scale_by_layer=False)


@pytest.mark.parametrize("queries", [12, 5])
@pytest.mark.parametrize("offset", [None, torch.tensor([-1.0, 0.0, 0.7, 3.0])])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("edges", [None, EDGES], ids=["whole", "documents"])
def test_flash_equals_scores_in_memory(queries, offset, window, edges):
    """With all that a scope knows, also of the last queries alone; results and gradients."""
    results = []
    for kernel in (explicitly, lambda q, k, v, scope: flash_attention(q, k, v, scope, 0.0, 1)):
        inputs = [heads(4, 1, queries), heads(2, 2), heads(2, 3)]
        if offset is not None:
            inputs.append(offset.clone().requires_grad_())
        out = kernel(*inputs[:3], Scope(edges, window, *inputs[3:]))
        weights = torch.arange(out.numel()).reshape(out.shape).cos()
        results.append([out, *torch.autograd.grad((out * weights).sum(), inputs)])
    torch.testing.assert_close(*results, rtol=0, atol=2e-6)


@pytest.mark.parametrize("window", [None, 4])
def test_a_layer_equals_transformers_gpt_oss(window):
    """Probabilities beside a learned sink per head, and the gradients of all that it is made from."""
    gpt_oss = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    module = SimpleNamespace(num_key_value_groups=2, sinks=torch.tensor([0.3, -2.0, 1.0, 4.0], requires_grad=True))
    positions = torch.arange(12)
    distance = positions[:, None] - positions[None]
    seen = (distance >= 0) & (distance <= (12 if window is None else window))
    mask = torch.zeros(1, 1, 12, 12).masked_fill(~seen, -torch.inf)
    module.training = False
    inputs = [heads(4, 1), heads(2, 2), heads(2, 3)]
    theirs, _ = gpt_oss.eager_attention_forward(module, *inputs, mask, scaling=8**-0.5)
    expected = [theirs, *torch.autograd.grad(theirs.cos().sum(), [*inputs, module.sinks])]
    ours = flash_attention(*inputs, Scope(None, window, module.sinks), 0.0, 1).transpose(1, 2)
    found = [ours, *torch.autograd.grad(ours.cos().sum(), [*inputs, module.sinks])]
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("softmax_type", ["off-by-one", "learnable"])
@pytest.mark.parametrize("window", [None, 3])
def test_kernels_of_a_model_agree(softmax_type, window):
    shape = replace(LEARNABLE, softmax_type=softmax_type, window=window)
    results = []
    for backend in ("unfused", "auto"):
        model = build(shape, backend, masked=window is not None)
        found = model(tokens(shape), tokens(shape, seed=2))
        found.mean().backward()
        results.append([found, *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*results, rtol=0, atol=1e-5)
    plain = build(replace(shape, softmax_type="vanilla"), masked=window is not None)
    assert (plain(tokens(shape), tokens(shape, seed=2)) - results[0][0]).abs().max() > 1e-4


def test_a_parameter_of_each_layer_is_counted():
    model = build(LEARNABLE)
    names = [name for name, _ in model.named_parameters() if "softmax_offset" in name]
    assert names == [f"decoder.layers.{i}.self_attention.core_attention.softmax_offset" for i in range(2)]
    assert count_parameters(LEARNABLE) == sum(p.numel() for p in model.parameters())


def test_a_generator_keeps_the_offset():
    shape = replace(LEARNABLE, window=3)
    whole, generator = build(shape, "auto", masked=True).eval(), Generator(shape).eval()
    generator.load_state_dict(whole.state_dict())
    inputs = tokens(shape)
    with torch.no_grad():
        generator.reset(2, shape.seq_length)
        found = [generator.advance(inputs[:, :5])]
        found += [generator.advance(inputs[:, i : i + 1]) for i in range(5, shape.seq_length)]
        expected = whole(inputs)[:, 4:]
    torch.testing.assert_close(torch.stack(found, dim=1), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", ["torch_dist", "torch"])
def test_a_checkpoint_keeps_the_offset(form, tmp_path):
    common = flags("--softmax-type learnable --train-iters 4 --save-interval 2 --ckpt-format", form)
    with alone():
        quietly([*common, "--save", str(tmp_path / "save")], tmp_path / "whole")
        quietly([*common, "--load", str(tmp_path / "save"), "--ckpt-step", "2"], tmp_path / "rest")
    assert losses(tmp_path / "rest") == losses(tmp_path / "whole")[2:]
    assert open_checkpoint(tmp_path / "save" / "iter_0000004").record.model_shape == plan_of(common).shape
    assert checkpoint(tmp_path / "save", 4)["record"].shape["softmax_type"] == "learnable"


def test_hugging_face_gets_no_model_without_its_offset():
    with pytest.raises(ConfigError, match="--softmax-type learnable"):
        family_of_shape(LEARNABLE)
