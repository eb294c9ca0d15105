"""Products of linear layers as a CPU computes them, against torch's own in fp64."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile

from megatron_lite.config import cpu_kernel_rules as rules
from megatron_lite.config.shape import ModelShape
from megatron_lite.cpu_kernels import products
from megatron_lite.cpu_kernels.install import choose_cpu_kernels, install_kernels
from megatron_lite.cpu_kernels.loss import multiply_logits
from megatron_lite.cpu_kernels.products import (
    PRODUCTS,
    compute_input_gradient,
    compute_weight_gradient,
    describe_products,
    linear,
    multiply,
)
from megatron_lite.machine import read_processor
from megatron_lite.model.attention import Attend, explicit_attention
from megatron_lite.model.gpt import GPT, initialize
from megatron_lite.model.loss import token_losses
from megatron_lite.model.products import LinearByHand


class TorchFunctions(TorchFunctionMode):
    """Which of torch's functions are called with tensors of which type first."""

    def __init__(self):
        self.seen: list[tuple[str, torch.dtype]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if args and isinstance(args[0], torch.Tensor):
            self.seen.append((func.__name__, args[0].dtype))
        return func(*args, **(kwargs or {}))


needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN here")
PROCESSORS = {  # /proc/cpuinfo: does MKL leave AVX-512 unused
    "vendor_id\t: AuthenticAMD\nflags\t\t: fpu avx2 avx512f\n\nvendor_id\t: other\n": True,
    "vendor_id\t: AuthenticAMD\nflags\t\t: fpu avx2\n": False,
    "vendor_id\t: GenuineIntel\nflags\t\t: fpu avx2 avx512f\n": False,
    "CPU implementer\t: 0x41\nFeatures\t: fp asimd\n": False,
}


@pytest.fixture
def convolving(monkeypatch):
    monkeypatch.setattr(products, "CONVOLVES", True)


@pytest.fixture
def all_convolving(monkeypatch, convolving):
    """However small."""
    monkeypatch.setattr(products, "MIN_ROWS", 1)
    monkeypatch.setattr(products, "MIN_MULTIPLICATIONS", 1)


def draw(*sizes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(sizes))
    return torch.randn(sizes, generator=generator, dtype=torch.float64).to(dtype)


def count_operators(function) -> dict[str, int]:
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        function()
    return {event.key: event.count for event in seen.key_averages()}


def assert_close(found, exact):
    """To fp32's precision of sums of that size."""
    assert found.shape == exact.shape and found.dtype == torch.float32
    assert (found.double() - exact).abs().max() <= 1e-5 * exact.abs().max()


@needs_onednn
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("rows", "channels", "filters"), [((2, 256), 96, 192), ((512,), 33, 1700), ((4, 8, 16), 64, 257)]
)
def test_convolutions_give_the_products(convolving, rows, channels, filters, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        input_H, weight_WH, bias_W = draw(*rows, channels), draw(filters, channels), draw(filters)
        gradient_W = draw(*rows, filters)
        results = {}

        def compute():
            results["result"] = multiply(input_H, weight_WH, bias_W)
            results["bare"] = multiply(input_H, weight_WH)
            results["of input"] = compute_input_gradient(gradient_W, weight_WH)
            results["of weight"] = compute_weight_gradient(gradient_W.flatten(0, -2), input_H.flatten(0, -2))

        counted = count_operators(compute)
        pieces = -(-filters // products.FILTER_BLOCK) if filters > products.MAX_FILTERS else 1
        assert counted["aten::mkldnn_convolution"] == 2 and counted["aten::convolution_backward"] == 1 + pieces
        assert not {"aten::mm", "aten::addmm", "aten::slow_conv2d_forward", "aten::thnn_conv2d"} & set(counted)
    finally:
        torch.set_num_threads(before)
    x, w, g = input_H.double(), weight_WH.double(), gradient_W.double()
    assert_close(results["result"], x @ w.t() + bias_W.double())
    assert_close(results["bare"], x @ w.t())
    assert_close(results["of input"], g @ w)
    assert_close(results["of weight"], g.flatten(0, -2).t() @ x.flatten(0, -2))
    assert all(one.is_contiguous() for one in results.values())


@needs_onednn
@pytest.mark.parametrize(
    ("rows", "channels", "filters"), [(496, 256, 256), (520, 256, 256), (512, 64, 128), (1024, 8, 8)], ids=str
)
def test_small_and_uneven_ones_are_torchs(convolving, rows, channels, filters):
    input_H, weight_WH = draw(rows, channels), draw(filters, channels)
    counted = count_operators(lambda: linear(input_H.requires_grad_(), weight_WH).sum().backward())
    assert counted["aten::mm"] >= 1 and "aten::mkldnn_convolution" not in counted


def test_nothing_changes_where_mkl_is_fast(monkeypatch):
    monkeypatch.setattr(products, "CONVOLVES", False)
    monkeypatch.setattr(products, "WIDENED", ())
    input_H, weight_WH = draw(1024, 128).requires_grad_(), draw(128, 128)
    result = linear(input_H, weight_WH)
    assert type(result.grad_fn) is type(F.linear(input_H, weight_WH).grad_fn)
    assert [describe_products(dtype, "cpu") for dtype in (torch.float32, torch.float16)] == ["", ""]


@needs_onednn
@pytest.mark.parametrize("bias", [True, False])
def test_autograd_sees_a_linear_layer(convolving, bias):
    layer = torch.nn.Linear(96, 160, bias=bias)
    x = draw(2, 512, 96).requires_grad_()
    wanted = [x, *layer.parameters()]
    found = torch.autograd.grad((linear(x, layer.weight, layer.bias) * draw(2, 512, 160)).sum(), wanted)
    exact = layer.double()(x.double())
    exact = torch.autograd.grad((exact * draw(2, 512, 160).double()).sum(), [x, *layer.parameters()])
    for mine, theirs in zip(found, exact):
        assert_close(mine, theirs.double())
    layer.float().weight.requires_grad_(False)
    frozen = linear(x, layer.weight, layer.bias)
    assert torch.equal(torch.autograd.grad((frozen * draw(2, 512, 160)).sum(), x)[0], found[0])


@needs_onednn
def test_whoever_keeps_computes_the_weights_gradient_later(convolving):
    kept, x = [], draw(2, 512, 64).requires_grad_()
    weight_WH = draw(192, 64)

    def keep(input_H, gradient_W):
        kept.append((input_H, gradient_W))

    LinearByHand.apply(x, weight_WH, None, PRODUCTS, keep).square().sum().backward()
    (input_H, gradient_W), *rest = kept
    assert rest == [] and torch.equal(input_H, x)
    assert_close(x.grad, gradient_W.double() @ weight_WH.double())


@needs_onednn
def test_a_model_learns_alike(all_convolving, monkeypatch):
    sizes = {"num_attention_heads": 2, "num_query_groups": 2, "kv_channels": 8, "ffn_hidden_size": 64}
    shape = ModelShape(
        num_layers=2, hidden_size=16, seq_length=16, max_position_embeddings=16, padded_vocab_size=128,
        hidden_dropout=0.0, attention_dropout=0.0, **sizes,
    )  # fmt: skip
    tokens_BT = torch.randint(128, (2, 17), generator=torch.Generator().manual_seed(5))

    def train(steps: int) -> list[float]:
        torch.manual_seed(3)
        kernels = choose_cpu_kernels(shape, "fp32")
        attend = Attend(lambda *args: explicit_attention(*args, fp32_softmax=False, scale_by_layer=False), "explicit")
        model = GPT(shape, attend, partial(token_losses, kernels=kernels))
        install_kernels(model, kernels)
        initialize(dict(model.named_parameters()), shape)
        optimizer, losses = torch.optim.AdamW(model.parameters(), 1e-2), []
        for _ in range(steps):
            loss = model(tokens_BT[:, :-1], tokens_BT[:, 1:]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    assert count_operators(lambda: train(1))["aten::mkldnn_convolution"] == 9
    convolved = train(30)
    monkeypatch.setattr(products, "CONVOLVES", False)
    plain = train(30)
    assert plain[-1] < 1 < plain[0] and convolved == pytest.approx(plain, abs=2e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_numbers_without_instructions_are_multiplied_in_fp32(monkeypatch, dtype):
    monkeypatch.setattr(products, "WIDENED", (torch.float16, torch.bfloat16))
    input_H, weight_WH, bias_W = draw(2, 64, 48, dtype=dtype), draw(2500, 48, dtype=dtype), draw(2500, dtype=dtype)
    gradient_W = draw(2, 64, 2500, dtype=dtype)
    wide_H, wide_WH, wide_W = input_H.double(), weight_WH.double(), gradient_W.double()
    pairs = (
        (multiply(input_H, weight_WH, bias_W), wide_H @ wide_WH.t() + bias_W.double()),
        (multiply(input_H, weight_WH), wide_H @ wide_WH.t()),
        (compute_input_gradient(gradient_W, weight_WH), wide_W @ wide_WH),
        (
            compute_weight_gradient(gradient_W.flatten(0, 1), input_H.flatten(0, 1)),
            wide_W.flatten(0, 1).t() @ wide_H.flatten(0, 1),
        ),
    )
    for found, exact in pairs:
        assert found.dtype == dtype and found.shape == exact.shape
        rounding = torch.finfo(dtype).eps / 2 * exact.abs() + 1e-5 * exact.abs().max()
        assert ((found.double() - exact).abs() <= rounding).all()


@pytest.mark.parametrize("text", list(PROCESSORS))
def test_the_processor_decides(pretend, tmp_path, text):
    (tmp_path / "cpuinfo").write_text(text)
    pretend(tmp_path / "cpuinfo")
    assert rules.mkl_lacks_avx512() is PROCESSORS[text]
    pretend(tmp_path / "none")
    assert read_processor() == {} and not rules.mkl_lacks_avx512()


def test_what_is_done_is_told(monkeypatch, convolving):
    monkeypatch.setattr(products, "WIDENED", (torch.float16,))
    convolutions = "as oneDNN's convolutions"
    assert describe_products(torch.float32, "cpu") == convolutions
    assert describe_products(torch.float16, "cpu") == f"in fp32, {convolutions}"
    assert describe_products(torch.bfloat16, "cpu") == describe_products(torch.float32, "cuda") == ""


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_torch_agrees_which_numbers_this_processor_has_instructions_for(name):
    answer = f"_is_mkldnn_{name}_supported"
    if not hasattr(torch.ops.mkldnn, answer) or "flags" not in read_processor():
        pytest.skip("nothing tells")
    assert (name in rules.find_slow_precisions()) is not getattr(torch.ops.mkldnn, answer)()


def test_a_weights_gradient_in_pieces_takes_no_second_copy(convolving):
    gradient_MW, input_MH = draw(512, 4096), draw(512, 64)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        compute_weight_gradient(gradient_MW, input_MH)
    allocated = [event.self_cpu_memory_usage for event in seen.events() if event.name == "aten::empty"]
    assert "aten::cat" not in {event.name for event in seen.events()} and max(allocated) == 4 * 4096 * 64


def test_16_bit_logits_are_computed_in_blocks_of_the_vocabulary(monkeypatch):
    monkeypatch.setattr(products, "WIDENED", ())
    hidden_MH, weight_VH = draw(4, 32, dtype=torch.bfloat16), draw(5000, 32, dtype=torch.bfloat16)
    with TorchFunctions() as called:
        found = multiply_logits(hidden_MH, weight_VH)
    assert [name for name, _ in called.seen if name in ("linear", "mm")] == ["mm"] * 3
    exact = hidden_MH.double() @ weight_VH.double().t()
    assert ((found.double() - exact).abs() <= 2.0**-8 * exact.abs() + 1e-4).all()


def test_the_logits_of_slow_16_bit_numbers_are_multiplied_in_fp32(monkeypatch):
    """More than a block of them, which elsewhere are multiplied block by block."""
    monkeypatch.setattr(products, "WIDENED", (torch.bfloat16,))
    hidden_MH, weight_VH = draw(4, 32, dtype=torch.bfloat16), draw(5000, 32, dtype=torch.bfloat16)
    with TorchFunctions() as called:
        found = multiply_logits(hidden_MH, weight_VH)
    assert {dtype for name, dtype in called.seen if name in ("linear", "mm")} == {torch.float32}
    exact = hidden_MH.double() @ weight_VH.double().t()
    assert ((found.double() - exact).abs() <= 2.0**-8 * exact.abs() + 1e-4).all()  # rounded once, to eight bits
