"""The attention kernels agree with each other, and the choice says what really runs."""

import warnings
from dataclasses import replace

import pytest
import torch
from support.model_variants import PLAIN, VARIANTS, build, tokens
from support.wording import wording
from torch.nn.attention import SDPBackend

from megatron_lite.errors import UserError
from megatron_lite.model.attention import (
    CAUSAL,
    Scope,
    explicit_attention,
    find_document_edges,
    make_mask,
    sdpa_attention,
)
from megatron_lite.model.attention_choice import choose_attention

CPU = torch.device("cpu")
DROPPING = replace(PLAIN, attention_dropout=0.25)
GROUPED = replace(PLAIN, num_query_groups=2)


def choose(backend, shape=PLAIN, device="cpu", dtype=torch.float32, masked=False, explain=False, **more):
    return choose_attention(backend, shape, batch=2, device=device, dtype=dtype, masked=masked, explain=explain, **more)


def edges_of(documents):
    return find_document_edges(torch.tensor(documents), CPU)


def heads(number, seed, length=12, width=8, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, number, length, width, generator=generator).to(dtype)


@pytest.mark.parametrize("backend", ["auto", "flash"])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_explicit_attention_equals_sdpa(name, documents, backend):
    shape = VARIANTS[name]
    arguments = {"documents_BT": torch.tensor([[0] * 5 + [1] * 7] * 2)} if documents else {}
    results = []
    for kernel in ("unfused", backend):
        model = build(shape, kernel, masked=documents)
        losses = model(tokens(shape), tokens(shape, seed=2), **arguments)
        losses.mean().backward()
        results.append([losses, *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*results, rtol=0, atol=1e-5)


@pytest.mark.parametrize("spread", [1.0, 3.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_16_bit_kernels_round_no_more_than_what_they_store(dtype, spread):
    """Against fp64, in units of one rounding (2^-11 in fp16) of sum(p |v|). Both kernels round probabilities and result; the
    sums themselves are in fp32. The explicit one rounds scores too, by up to that unit times the largest score, which moves
    each probability by up to twice as much."""
    q, k, v = (spread * heads(4, seed, length=32, dtype=torch.float64) for seed in (1, 2, 3))
    q, k, v = (x.to(dtype) for x in (q, k, v))
    exact, spread_of_values = (
        explicit_attention(
            q.double(), k.double(), values.double(), CAUSAL, 0.0, 1, fp32_softmax=False, scale_by_layer=False
        )
        for values in (v, v.abs())
    )
    largest_score = (q.double() @ k.double().transpose(-2, -1)).abs().max() / q.shape[-1] ** 0.5
    unit = torch.finfo(dtype).eps / 2 * spread_of_values
    flash = sdpa_attention(q, k, v, CAUSAL, 0.0, 1, backend=SDPBackend.FLASH_ATTENTION, expand=False)
    explicit = explicit_attention(q, k, v, CAUSAL, 0.0, 1, fp32_softmax=False, scale_by_layer=False)
    for out, roundings in ((flash, 2.5), (explicit, 2.5 + 2 * largest_score)):
        units = (out.double() - exact).abs() / unit
        assert 0.4 < units.max() < roundings  # at least the result's own rounding


def test_expanding_the_groups_changes_nothing():
    q, k, v = heads(4, 1), heads(2, 2), heads(2, 3)
    outs = [sdpa_attention(q, k, v, CAUSAL, 0.0, 1, backend=None, expand=expand) for expand in (False, True)]
    torch.testing.assert_close(*outs, rtol=0, atol=1e-6)


def test_layer_scaling_keeps_half_precision_scores_finite():
    """Scores of 113,000 overflow fp16; divided by the layer's number 4 they do not, and the result is the same."""
    q, k, v = heads(4, 1).sign() * 200, heads(4, 2).sign() * 200, heads(4, 3)
    arguments = {"scope": CAUSAL, "dropout": 0.0, "layer_number": 4, "fp32_softmax": False}
    exact = explicit_attention(q.double(), k.double(), v.double(), **arguments, scale_by_layer=False)
    half = [x.half() for x in (q, k, v)]
    assert not explicit_attention(*half, **arguments, scale_by_layer=False).isfinite().all()
    scaled = explicit_attention(*half, **arguments, scale_by_layer=True)
    assert (scaled.double() - exact).abs().max() < 0.01


@pytest.mark.parametrize("backend", ["auto", "unfused"])
def test_attention_dropout_strikes_probabilities(backend):
    q, k = heads(4, 1, length=64), heads(4, 2, length=64)
    identity = torch.eye(64).expand(2, 4, 64, 64)
    function = choose(backend, DROPPING).function
    kept, struck = function(q, k, identity, CAUSAL, 0.0, 1), function(q, k, identity, CAUSAL, 0.25, 1)
    allowed = torch.ones(64, 64, dtype=torch.bool).tril().expand_as(kept)
    assert (kept[~allowed] == 0).all() and (struck[~allowed] == 0).all()
    assert 0.22 < (struck[allowed] == 0).float().mean() < 0.28
    survivors = struck != 0
    torch.testing.assert_close(struck[survivors], kept[survivors] / 0.75)


def test_dropout_ends_with_training():
    model = build(DROPPING, "unfused")
    assert not torch.equal(model(tokens(PLAIN)), model(tokens(PLAIN)))
    model.eval()
    assert torch.equal(model(tokens(PLAIN)), model(tokens(PLAIN)))


def test_document_mask_is_causal_within_equal_numbers():
    mask = make_mask(Scope(edges_of([[3, 3, 4]])), 1, 3, 3, CPU)
    assert mask.tolist() == [[[[True, False, False], [True, True, False], [False, False, True]]]]


@pytest.mark.parametrize("backend, shape", [("auto", PLAIN), ("flash", PLAIN), ("auto", GROUPED), ("auto", DROPPING)])
@pytest.mark.parametrize("masked", [False, True])
def test_the_name_is_what_runs(backend, shape, masked):
    chosen = choose(backend, shape, masked=masked)
    q, k, v = heads(4, 1).requires_grad_(), heads(shape.num_query_groups, 2), heads(shape.num_query_groups, 3)
    scope = Scope(edges_of([[0] * 12] * 2)) if masked else CAUSAL
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        chosen.function(q, k, v, scope, shape.attention_dropout, 1)
    ran_flash = any("flash_attention" in event.key for event in profile.key_averages())
    assert chosen.name == ("sdpa flash" if ran_flash else "sdpa math")


def test_reasons_come_on_request():
    for backend in ("unfused", "local"):
        chosen = choose(backend, explain=True)
        assert chosen.name == "explicit" and f"--attention-backend {backend} " in chosen.why_not[0]
    preferred = choose("auto", dtype=torch.bfloat16, explain=True, why_explicit="it is slower here")
    assert preferred.name == "explicit" and preferred.why_not == (wording("model/sdpa-it-is-slower"),)
    asked = choose("unfused", explain=True, why_explicit="it is slower here")
    assert asked.why_not == choose("unfused", explain=True).why_not
    assert choose("auto", DROPPING).why_not == ()
    lines = choose("auto", DROPPING, explain=True).why_not
    assert [line.split(":")[0] for line in lines] == ["sdpa flash", "sdpa cudnn", "sdpa efficient"]
    assert "dropout" in lines[0] and "CUDA" in lines[1] and not any("\n" in line for line in lines)


@pytest.mark.parametrize(
    "backend, shape, device, part",
    [
        ("fused", PLAIN, "cpu", "needs a CUDA device, not cpu"),
        ("flash", DROPPING, "cpu", "dropout"),
        ("flash", PLAIN, "meta", "torch takes math for meta tensors"),
        ("flush", PLAIN, "cpu", "not one of"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(backend, shape, device, part):
    with pytest.raises(UserError) as caught:
        choose(backend, shape, device)
    message = str(caught.value)
    assert message.startswith(f"--attention-backend {backend}: ") and part in message and "; use " in message
    assert "\n" not in message


def refusing(*args, **kwargs):
    """torch's answer on a GPU when the one allowed kernel cannot run: headings, reasons, then the error."""
    for line in (
        "Memory efficient kernel not used because:",
        "Memory Efficient attention has been runtime disabled.",
        "Flash attention kernel not used because:",
        "Flash Attention does not support non-null attn_mask.",
        "CuDNN attention kernel not used because:",
        "cuDNN attention has been runtime disabled.",
    ):
        warnings.warn(f"{line} (Triggered internally at sdp_utils.cpp:1.)", stacklevel=1)
    raise RuntimeError("No available kernel. Aborting execution.")


def test_only_the_refused_kernels_own_reasons_are_told(monkeypatch):
    monkeypatch.setattr(torch, "_fused_sdp_choice", refusing)
    with pytest.raises(UserError) as caught:
        choose("flash", masked=True)
    assert wording("model/flash-attention-does-not") in str(caught.value)


def test_auto_survives_a_torch_that_does_not_answer(monkeypatch):
    monkeypatch.delattr(torch, "_fused_sdp_choice")
    chosen = choose("auto", GROUPED, explain=True)
    assert chosen.name == "sdpa"
    q, k, v = heads(4, 1), heads(2, 2), heads(2, 3)
    expected = choose("unfused", GROUPED).function(q, k, v, CAUSAL, 0.0, 1)
    torch.testing.assert_close(chosen.function(q, k, v, CAUSAL, 0.0, 1), expected, rtol=0, atol=1e-6)


def test_groups_are_expanded_where_only_that_allows_a_fused_kernel(monkeypatch):
    def knows_no_groups(*args, enable_gqa, **kwargs):
        return (SDPBackend.MATH if enable_gqa else SDPBackend.EFFICIENT_ATTENTION).value

    monkeypatch.setattr(torch, "_fused_sdp_choice", knows_no_groups)
    chosen = choose("auto", GROUPED)
    assert chosen.name == "sdpa efficient"
    seen, functional = [], torch.nn.functional
    monkeypatch.setattr(functional, "scaled_dot_product_attention", lambda q, k, v, **rest: seen.append((k, rest)))
    chosen.function(heads(4, 1), heads(2, 2), heads(2, 3), CAUSAL, 0.0, 1)
    assert seen[0][0].shape[1] == 4 and seen[0][1]["enable_gqa"] is False


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("backend", ["auto", "flash", "fused"])
@pytest.mark.parametrize("masked", [False, True])
def test_kernels_on_a_gpu_equal_the_explicit_one(backend, masked):
    shape = replace(PLAIN, seq_length=128, kv_channels=64, num_query_groups=2)
    try:
        chosen = choose(backend, shape, "cuda", torch.bfloat16, masked, explain=True)
    except UserError as error:
        pytest.skip(str(error))
    q, k, v = (heads(n, n, 128, 64, torch.bfloat16).cuda() for n in (4, 2, 2))
    documents = (torch.arange(128) // 50).expand(2, 128)
    scope = Scope(find_document_edges(documents, torch.device("cuda"))) if masked else CAUSAL
    expected = choose("unfused", shape).function(q.float(), k.float(), v.float(), scope, 0.0, 1)
    assert (chosen.function(q, k, v, scope, 0.0, 1).float() - expected).abs().max() < 0.03


def test_layers_differ_by_their_number_only_where_it_counts():
    """What differs is compiled again for each layer."""
    for scaled, numbers in ((False, [1, 1]), (True, [1, 2])):
        model = build(replace(PLAIN, query_key_layer_scaling=scaled))
        assert [layer.self_attention.layer_number for layer in model.decoder.layers] == numbers
