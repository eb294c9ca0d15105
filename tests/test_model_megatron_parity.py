"""The model computes what Megatron-Core computes: same state dict in, same logits, losses and gradients out."""

import contextlib
import types

import pytest
import torch
import torch.distributed as dist
from lazy_module import LazyModule
from model_variants import VARIANTS, build, tokens

parallel_state = LazyModule("megatron.core.parallel_state")
gpt, layer_specs = LazyModule("megatron.core.models.gpt"), LazyModule("megatron.core.models.gpt.gpt_layer_specs")
transformer = LazyModule("megatron.core.transformer")
# megatron-core's torch norms refuse layernorm_1p.
COMPARED = [name for name in VARIANTS if name != "layernorm_1p"]


@pytest.fixture(scope="module")
def megatron_on_cpu():
    """One gloo rank; the two places where the local spec reaches for CUDA (a scratch buffer, dropout's random state)."""
    patch = pytest.MonkeyPatch()
    patch.setattr(torch.cuda, "current_device", lambda: "cpu")
    tracker = types.SimpleNamespace(fork=contextlib.nullcontext)
    patch.setattr(pytest.importorskip("megatron.core.tensor_parallel"), "get_cuda_rng_tracker", lambda: tracker)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    patch.undo()


def activation(shape):
    functions = {
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        "gelu_erf": torch.nn.functional.gelu,
        "swiglu": torch.nn.functional.silu,
        "squared_relu": lambda x: torch.relu(x) ** 2,
    }
    return {"activation_func": functions[shape.activation], "gated_linear_unit": shape.activation == "swiglu"}


def reference(shape, stage=None):
    """stage: of a pipeline: (its number, their number)."""
    number, stages = stage or (0, 1)
    config = transformer.TransformerConfig(
        pipeline_model_parallel_size=stages,
        pipeline_dtype=torch.float32 if stages > 1 else None,
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        kv_channels=shape.kv_channels,
        ffn_hidden_size=shape.ffn_hidden_size,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        normalization=shape.normalization,
        layernorm_epsilon=shape.norm_epsilon,
        add_bias_linear=shape.linear_bias,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_layernorm,
        apply_query_key_layer_scaling=shape.query_key_layer_scaling,
        attention_softmax_in_fp32=shape.softmax_in_fp32 or shape.query_key_layer_scaling,
        rotary_interleaved=shape.rotary_interleaved,
        use_cpu_initialization=True,
        persist_layer_norm=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        **activation(shape),
    )
    return gpt.GPTModel(
        config,
        layer_specs.get_gpt_layer_local_spec(qk_layernorm=shape.qk_layernorm, normalization=shape.normalization),
        vocab_size=shape.padded_vocab_size,
        max_sequence_length=shape.max_position_embeddings,
        share_embeddings_and_output_weights=shape.tied_embeddings,
        position_embedding_type=shape.position_embedding,
        rotary_percent=shape.rotary_percent,
        rotary_base=shape.rotary_base,
        seq_len_interpolation_factor=shape.rotary_seq_len_interpolation_factor,
        pre_process=number == 0,
        post_process=number == stages - 1,
    )


def largest_difference(ours, theirs):
    return (ours - theirs).abs().max().item()


@pytest.mark.parametrize("name", COMPARED)
def test_equals_megatron_core(name, megatron_on_cpu):
    shape = VARIANTS[name]
    ours, theirs = build(shape), reference(shape)
    missing = theirs.load_state_dict(ours.state_dict(), strict=False)
    assert not missing.unexpected_keys
    assert [key for key in missing.missing_keys if not key.endswith("_extra_state")] == []

    inputs, labels = tokens(shape, seed=1), tokens(shape, seed=2)
    positions = torch.arange(shape.seq_length).expand_as(inputs)
    blocked = torch.ones(shape.seq_length, shape.seq_length, dtype=torch.bool).triu(1)[None, None]
    logits = largest_difference(ours(inputs), theirs(inputs, positions, blocked))
    our_losses, their_losses = ours(inputs, labels), theirs(inputs, positions, blocked, labels=labels)
    our_losses.mean().backward()
    their_losses.mean().backward()

    theirs_by_name = dict(theirs.named_parameters())
    assert theirs_by_name.keys() == dict(ours.named_parameters()).keys()
    gradients = max(largest_difference(p.grad, theirs_by_name[key].grad) for key, p in ours.named_parameters())
    losses = largest_difference(our_losses, their_losses)
    print(f"largest differences, {name}: logits {logits:.1e} losses {losses:.1e} gradients {gradients:.1e}")
    assert logits < 1e-5 and losses < 1e-5 and gradients < 2e-6


@pytest.mark.parametrize("name", COMPARED)
def test_every_compared_gradient_says_something(name):
    """A gradient of zero would equal anything's zero. The keys' norm bias is the one that softmax cancels."""
    ours, inputs = build(VARIANTS[name]), tokens(VARIANTS[name])
    ours(inputs, tokens(VARIANTS[name], seed=2)).mean().backward()
    silent = [key for key, p in ours.named_parameters() if p.grad.abs().max() < 1e-5]
    assert [key for key in silent if not key.endswith("k_layernorm.bias")] == []


def test_the_comparison_would_notice_another_activation(megatron_on_cpu):
    shape, other = VARIANTS["gelu_tanh"], VARIANTS["gelu_erf"]
    ours, theirs = build(shape), reference(other)
    theirs.load_state_dict(ours.state_dict(), strict=False)
    inputs = tokens(shape)
    blocked = torch.ones(shape.seq_length, shape.seq_length, dtype=torch.bool).triu(1)[None, None]
    positions = torch.arange(shape.seq_length).expand_as(inputs)
    assert largest_difference(ours(inputs), theirs(inputs, positions, blocked)) > 1e-4
