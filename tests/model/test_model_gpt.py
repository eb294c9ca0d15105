"""Properties of the whole model: causality, documents, grouped queries, dropout, precision, construction."""

import math
from dataclasses import replace

import pytest
import torch
from support.model_variants import PLAIN, VARIANTS, build, tokens

from megatron_lite.model.attention_choice import choose_attention
from megatron_lite.model.gpt import GPT, initialize
from megatron_lite.model.loss import token_losses
from megatron_lite.model.rotary import make_rotary_tables, rotate

BACKENDS = ["auto", "flash", "unfused", "local"]
DOCUMENT_VARIANTS = ["gelu_tanh", "rope", "gqa_swiglu_rmsnorm", "layer_scaling"]


def input_gradients(model, inputs, t, **arguments):
    """Gradient of all logits at position t with respect to each position's word vector, (B, T, H)."""
    kept = []
    handle = model.embedding.word_embeddings.register_forward_hook(lambda module, args, out: kept.append(out))
    logits = model(inputs, **arguments)
    handle.remove()
    weights = torch.randn(logits.shape[-1], generator=torch.Generator().manual_seed(0))
    return torch.autograd.grad((logits[:, t] * weights).sum(), kept[0])[0]


@pytest.mark.parametrize("backend", ["auto", "unfused"])
@pytest.mark.parametrize("name", VARIANTS)
def test_no_position_sees_a_later_one(name, backend):
    shape = VARIANTS[name]
    model, inputs = build(shape, backend), tokens(shape)
    for t in (0, 5, 11):
        gradients = input_gradients(model, inputs, t)
        assert gradients[:, t + 1 :].abs().sum() == 0
        windows = [shape.find_window(layer) for layer in range(shape.num_layers)]
        # each layer reaches back by its window
        first = 0 if None in windows else max(t - sum(windows), 0)
        assert (gradients[:, first : t + 1].abs().amax(dim=-1) > 0).all(), "an earlier position is not seen"
        assert gradients[:, :first].abs().sum() == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", DOCUMENT_VARIANTS)
def test_documents_in_one_row_equal_documents_run_alone(name, backend):
    shape = VARIANTS[name]
    model, inputs = build(shape, backend, masked=True), tokens(shape)
    documents = torch.tensor([[7] * 5 + [8] * 7, [0] * 2 + [1] * 9 + [2]])
    positions = torch.tensor([[*range(5), *range(7)], [*range(2), *range(9), 0]])
    together = model(inputs, positions_BT=positions, documents_BT=documents)
    for row, column, end in [(0, 0, 5), (0, 5, 12), (1, 0, 2), (1, 2, 11), (1, 11, 12)]:
        alone = model(inputs[row : row + 1, column:end])
        torch.testing.assert_close(together[row : row + 1, column:end], alone, rtol=0, atol=1e-5)
    assert (together - model(inputs)).abs().max() > 0.01


def test_no_gradient_crosses_a_document_boundary():
    model, inputs = build(PLAIN, masked=True), tokens(PLAIN)
    documents = torch.tensor([[0] * 5 + [1] * 7] * 2)
    gradients = input_gradients(model, inputs, 8, documents_BT=documents)
    assert gradients[:, :5].abs().sum() == 0 and (gradients[:, 5:9].abs().amax(dim=-1) > 0).all()


def test_positions_count_from_zero_and_only_learned_ones_are_reset():
    """As in Megatron, whose rotations count from the start of the sequence whatever --reset-position-ids does."""
    restarted = torch.arange(PLAIN.seq_length)[None] % 5
    for name, moves in [("rope", False), ("rope_partial_interleaved", False), ("gelu_tanh", True)]:
        model, inputs = build(VARIANTS[name]), tokens(PLAIN)
        assert torch.equal(model(inputs), model(inputs, positions_BT=torch.arange(PLAIN.seq_length).expand_as(inputs)))
        assert ((model(inputs) - model(inputs, positions_BT=restarted)).abs().max() > 1e-3) == moves


@pytest.mark.parametrize("name", ["rope", "rope_partial_interleaved"])
def test_rope_sees_only_distances(name):
    shape = VARIANTS[name]
    x_BNTD, y_BNTD = torch.randn(2, 1, 1, 1, shape.kv_channels)

    def score(first: int, second: int) -> torch.Tensor:
        turned = [
            rotate(v, *make_rotary_tables(torch.tensor([[p]]), shape), shape.rotary_interleaved)
            for v, p in ((x_BNTD, first), (y_BNTD, second))
        ]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(score(3, 7), score(23, 27))
    assert (score(3, 7) - score(3, 9)).abs() > 1e-3


def test_interpolation_divides_positions_and_layernorm_1p_stores_the_weight_minus_one():
    positions = torch.arange(PLAIN.seq_length)[None]
    near, far = VARIANTS["rope"], VARIANTS["rope_interpolated"]
    torch.testing.assert_close(make_rotary_tables(positions, near), make_rotary_tables(positions * 4, far))
    plain, minus_one = build(PLAIN), build(VARIANTS["layernorm_1p"])
    state = plain.state_dict()
    minus_one.load_state_dict({k: v - 1 if k.endswith("layernorm.weight") else v for k, v in state.items()})
    torch.testing.assert_close(plain(tokens(PLAIN)), minus_one(tokens(PLAIN)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", ["auto", "unfused"])
@pytest.mark.parametrize("groups", [1, 2])
def test_grouped_queries_equal_heads_with_repeated_keys(groups, backend):
    shape = replace(PLAIN, num_query_groups=groups, position_embedding="rope")
    per_group = shape.num_attention_heads // groups
    grouped, full = build(shape, backend), build(replace(shape, num_query_groups=4), backend)
    state = grouped.state_dict()
    for name in [n for n in state if "linear_qkv" in n]:
        rows = state[name].unflatten(0, (groups, per_group + 2, shape.kv_channels))
        heads = [torch.cat((g[i : i + 1], g[-2:])) for g in rows for i in range(per_group)]
        state[name] = torch.stack(heads).flatten(0, 2)
    full.load_state_dict(state)
    torch.testing.assert_close(grouped(tokens(shape)), full(tokens(shape)), rtol=0, atol=1e-5)


def test_losses_are_the_cross_entropy_of_the_logits_unless_another_loss_takes_its_place():
    model, inputs, labels = build(PLAIN), tokens(PLAIN), tokens(PLAIN, seed=2)
    expected = -model(inputs).double().log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    torch.testing.assert_close(model(inputs, labels).double(), expected, rtol=0, atol=1e-5)
    doubled = GPT(PLAIN, model.decoder.layers[0].self_attention.attend, lambda *args: 2 * token_losses(*args))
    doubled.load_state_dict(model.state_dict())
    assert torch.equal(doubled(inputs, labels), 2 * model(inputs, labels))


def test_hidden_dropout_strikes_the_embedding_and_both_outputs_of_each_block():
    model = build(replace(PLAIN, hidden_dropout=0.25, hidden_size=128, kv_channels=32))
    struck = []
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.register_forward_hook(lambda module, args, out: struck.append((args[0], out)))
    model(tokens(PLAIN))
    assert len(struck) == 1 + 2 * PLAIN.num_layers
    for before, after in struck:
        assert 0.2 < (after == 0).float().mean() < 0.3
        torch.testing.assert_close(after[after != 0], before[after != 0] / 0.75)
    model.eval()
    assert torch.equal(model(tokens(PLAIN)), model(tokens(PLAIN)))


def test_low_precision_keeps_the_loss_in_fp32():
    model, inputs, labels = build(PLAIN, "auto"), tokens(PLAIN), tokens(PLAIN, seed=2)
    exact = model(inputs, labels).mean()
    with torch.autocast("cpu", torch.bfloat16):
        autocast = model(inputs, labels)
    assert autocast.dtype == torch.float32
    assert abs(autocast.mean() - exact) < 0.02
    for name, shape in VARIANTS.items():
        model = build(shape, "auto")
        exact, half = model(inputs, labels).mean(), model.bfloat16()(inputs, labels)
        assert half.dtype == torch.float32 and abs(half.mean() - exact) < 0.05, name


@pytest.mark.parametrize("name", VARIANTS)
def test_a_model_built_without_memory_loses_nothing(name):
    """Construction on the meta device and initialization later gives the same model: no state outside parameters."""
    shape = VARIANTS[name]
    direct = build(shape)
    torch.manual_seed(5)
    initialize(dict(direct.named_parameters()), shape)
    with torch.device("meta"):
        empty = GPT(shape, direct.decoder.layers[0].self_attention.attend)
    later = empty.to_empty(device="cpu")
    torch.manual_seed(5)
    initialize(dict(later.named_parameters()), shape)
    assert torch.equal(direct(tokens(shape)), later(tokens(shape)))


@pytest.mark.parametrize("backend", [*(pytest.param(b, marks=pytest.mark.slow) for b in ("auto", "flash")), "unfused"])
def test_a_layer_compiles_into_one_graph(backend):
    shape = VARIANTS["qk_rmsnorm_rope"]
    model = build(shape, backend)
    inputs, labels = tokens(shape), tokens(shape, seed=2)
    documents = torch.tensor([[0] * 5 + [1] * 7] * 2)
    plain = [model(inputs, labels), model(inputs, labels, documents_BT=documents)]
    model.decoder.layers[0].compile(fullgraph=True, backend="aot_eager")
    compiled = [model(inputs, labels), model(inputs, labels, documents_BT=documents)]
    compiled[1].mean().backward()
    torch.testing.assert_close(compiled, plain, rtol=0, atol=1e-5)


# --- the start of the parameters


def started(shape, seed=0):
    attend = choose_attention("unfused", shape, batch=1, device="cpu", dtype=torch.float32, masked=False)
    model = GPT(shape, attend)
    torch.manual_seed(seed)
    initialize(dict(model.named_parameters()), shape)
    return model


@pytest.mark.parametrize("name", VARIANTS)
def test_every_parameter_starts_as_megatron_starts_it(name):
    shape = replace(VARIANTS[name], hidden_size=256, num_layers=3, init_method_std=0.006)
    for key, parameter in started(shape).named_parameters():
        if parameter.dim() == 1:
            norm_weight = key.endswith("layernorm.weight") and not shape.layernorm_1p
            assert (parameter == (1.0 if norm_weight else 0.0)).all(), key
            continue
        expected = 0.006 / math.sqrt(6) if "linear_proj" in key or "linear_fc2" in key else 0.006
        # The standard deviation of a sample's standard deviation is sigma / sqrt(2n); six of them.
        tolerance = 6 / math.sqrt(2 * parameter.numel())
        assert parameter.std().item() == pytest.approx(expected, rel=tolerance), key
        assert abs(parameter.mean().item()) < 6 * expected / math.sqrt(parameter.numel()), key


def test_the_seed_decides_the_numbers():
    one, again, other = (dict(started(PLAIN, seed).named_parameters()) for seed in (1, 1, 2))
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one if one[name].dim() == 2)


def test_depth_does_not_depend_on_a_stage_of_the_model():
    """Initializing a part uses the whole model's depth, as a pipeline stage needs."""
    shape = replace(PLAIN, num_layers=8, hidden_size=256)
    layer = started(shape).decoder.layers[3]
    initialize({f"decoder.layers.3.{name}": p for name, p in layer.named_parameters()}, shape)
    assert layer.mlp.linear_fc2.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
