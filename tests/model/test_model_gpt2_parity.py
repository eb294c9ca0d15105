"""The model computes what transformers' GPT-2 computes with the same weights."""

from dataclasses import replace

import pytest
import torch
from support.model_variants import PLAIN, build, tokens

transformers = pytest.importorskip("transformers", reason="parity needs transformers")

SHAPE = replace(PLAIN, seq_length=16)
NORMS_AND_OUTPUTS = {
    "ln_1": "input_layernorm",
    "ln_2": "pre_mlp_layernorm",
    "attn.c_proj": "self_attention.linear_proj",
    "mlp.c_fc": "mlp.linear_fc1",
    "mlp.c_proj": "mlp.linear_fc2",
}


def gpt2(shape):
    sizes = {"n_embd": shape.hidden_size, "n_layer": shape.num_layers, "n_head": shape.num_attention_heads}
    sizes |= {"vocab_size": shape.padded_vocab_size, "n_positions": shape.max_position_embeddings}
    kinds = {"activation_function": "gelu_new", "attn_implementation": "eager", "n_inner": shape.ffn_hidden_size}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **kinds, **no_dropout))


def as_gpt2(named, shape):
    """Our tensors (weights or gradients) under GPT-2's names and layouts: Conv1D is [in, out], q, k, v are blocks."""
    out = {
        "transformer.wte.weight": named["embedding.word_embeddings.weight"],
        "transformer.wpe.weight": named["embedding.position_embeddings.weight"],
    }
    for kind in ("weight", "bias"):
        out[f"transformer.ln_f.{kind}"] = named[f"decoder.final_layernorm.{kind}"]
        for layer in range(shape.num_layers):
            ours, theirs = f"decoder.layers.{layer}", f"transformer.h.{layer}"
            for new, old in NORMS_AND_OUTPUTS.items():
                tensor = named[f"{ours}.{old}.{kind}"]
                out[f"{theirs}.{new}.{kind}"] = tensor.T if tensor.dim() == 2 else tensor
            qkv = named[f"{ours}.self_attention.linear_qkv.{kind}"]
            blocks = qkv.unflatten(0, (shape.num_attention_heads, 3, shape.kv_channels)).transpose(0, 1).flatten(0, 2)
            out[f"{theirs}.attn.c_attn.{kind}"] = blocks.T if blocks.dim() == 2 else blocks
    return out


@pytest.mark.parametrize("backend", ["unfused", "auto"])
def test_equals_gpt2(backend):
    ours, theirs = build(SHAPE, backend), gpt2(SHAPE)
    missing = theirs.load_state_dict(as_gpt2(dict(ours.named_parameters()), SHAPE), strict=False)
    assert not missing.unexpected_keys and set(missing.missing_keys) <= {"lm_head.weight"}

    inputs, labels = tokens(SHAPE, seed=1), tokens(SHAPE, seed=2)
    their_logits = theirs(inputs).logits
    their_loss = torch.nn.functional.cross_entropy(their_logits.flatten(0, 1), labels.flatten())
    our_loss = ours(inputs, labels).mean()
    our_loss.backward()
    their_loss.backward()

    our_gradients = as_gpt2({name: p.grad for name, p in ours.named_parameters()}, SHAPE)
    their_gradients = {name: p.grad for name, p in theirs.named_parameters()}
    assert our_gradients.keys() == their_gradients.keys()
    logits = (ours(inputs) - their_logits).abs().max().item()
    loss = abs(our_loss.item() - their_loss.item())
    gradients = max((our_gradients[name] - their_gradients[name]).abs().max().item() for name in our_gradients)
    print(f"largest differences, {backend}: logits {logits:.1e} loss {loss:.1e} gradients {gradients:.1e}")
    assert logits < 1e-5 and loss < 1e-5 and gradients < 2e-6
