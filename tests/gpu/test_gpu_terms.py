"""What a step takes beside its matrix products, each term timed by itself and beside the least time that its memory traffic allows.

Speed is reported, not judged: figures are milliseconds per step. Terms overlap in no step, so that with products and attention they add up to one.
"""

import contextlib
import itertools
import math
import statistics
import time
from dataclasses import dataclass

import pytest
import torch
from gpu_checks.pytest_side import checked_device
from torch import Tensor

pytestmark = pytest.mark.usefixtures("process_group")

DEVICE = checked_device()
if DEVICE is None:
    pytest.skip("needs a GPU", allow_module_level=True)

from support.launch import ALONE, build, flags, plan_of, steps, train
from support.rehearsal_cases import EXAMPLE

from megatron_lite.config.plan import Plan
from megatron_lite.config.world import World
from megatron_lite.model.attention import Scope
from megatron_lite.model.gpt import DTYPES
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.parallel.replica import Replica
from megatron_lite.train.step import BatchMaker, TrainingStep

ON_GPU = DEVICE == "cuda"
HERE = World(gpus=1) if ON_GPU else ALONE
TINY = "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 --vocab-size 255"
MODEL = f"{EXAMPLE} --hidden-dropout 0 --attention-dropout 0 --clip-grad 1.0 {'' if ON_GPU else TINY}"
RUNS, WARM_UP = (20, 5) if ON_GPU else (2, 1)
WAITS = (1, 10)  # --log-interval of the two runs that are compared
MIB = 2**20


@dataclass(frozen=True)
class Timed:
    """One plan's model, replica, optimizer and step on the device."""

    plan: Plan
    replica: Replica
    optimizer: Optimizer
    step: TrainingStep
    bytes_per_ms: float  # of a copy, read and written

    @property
    def micro_batches(self) -> int:
        return self.plan.micro_batches(0)

    @property
    def tokens(self) -> int:
        return self.plan.args.training.micro_batch_size * self.plan.shape.seq_length

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.replica.parameters)

    def draw(self, *sizes: int, learns: bool = True) -> Tensor:
        """Random numbers in the model's precision; a leaf that takes gradients."""
        numbers = torch.randn(sizes, device=DEVICE).to(DTYPES[self.plan.precision])
        return numbers.requires_grad_(learns)

    def compute_floor_ms(self, num_bytes: float) -> float:
        return num_bytes / self.bytes_per_ms


def measure_ms(function) -> float:
    """Median time of a call: on a GPU between events, with nothing that waits inside."""
    for _ in range(WARM_UP):
        function()
    if not ON_GPU:
        seconds = []
        for _ in range(RUNS):
            began = time.perf_counter()
            function()
            seconds.append(time.perf_counter() - began)
        return 1000 * statistics.median(seconds)
    torch.cuda.synchronize()
    edges = [torch.cuda.Event(enable_timing=True) for _ in range(RUNS + 1)]
    edges[0].record()
    for edge in edges[1:]:
        function()
        edge.record()
    torch.cuda.synchronize()
    return statistics.median(first.elapsed_time(last) for first, last in itertools.pairwise(edges))


def measure_backward_ms(function, *leaves: Tensor) -> float:
    """Forward and backward of `function`, whose result's gradient is ones; gradients of `leaves` are made and dropped."""

    def run():
        result = function()
        torch.autograd.grad(result, leaves, torch.ones_like(result))

    return measure_ms(run)


@pytest.fixture(scope="module")
def bytes_per_ms():
    source = torch.empty((1024 if ON_GPU else 16) * MIB, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.numel() / measure_ms(lambda: target.copy_(source))


@pytest.fixture(scope="module", params=["--fp16", "--fp16 --accumulate-allreduce-grads-in-fp32", "--bf16"])
def timed(request, bytes_per_ms):
    words = MODEL.replace("--fp16 ", "", 1)
    plan = plan_of(flags(words, request.param), HERE)
    device = torch.device(DEVICE, 0) if ON_GPU else torch.device("cpu")
    replica = build(plan, device)
    optimizer = Optimizer(plan, replica.parameters, device)
    yield Timed(
        plan,
        replica,
        optimizer,
        TrainingStep(plan, replica, optimizer, BatchMaker(plan.args.data, plan.layout, device, 0)),
        bytes_per_ms,
    )
    if ON_GPU:
        torch.cuda.empty_cache()


@pytest.fixture
def report(record_property):
    def note(ms: float, floor_ms: float | None = None):
        assert math.isfinite(ms)  # a difference of two medians may be less than nothing where all is noise
        record_property("ms per step", round(ms, 4))
        if floor_ms is not None:
            assert floor_ms > 0
            record_property("floor ms", round(floor_ms, 4))

    return note


def test_a_whole_step(timed, report):
    raw_BT1 = torch.randint(
        timed.plan.shape.padded_vocab_size, (timed.plan.args.training.micro_batch_size, timed.plan.shape.seq_length + 1)
    )
    batches = iter(lambda: raw_BT1.pin_memory() if ON_GPU else raw_BT1, None)
    report(measure_ms(lambda: timed.step(batches, 0, lambda phase: contextlib.nullcontext())))


def test_gradients_of_micro_batches_are_added(timed, report):
    """As in backward: every parameter's gradient arrives, and DataParallel adds it to the sum of the micro-batches before."""
    replica, parameters = timed.replica, timed.replica.parameters
    gradients = [torch.ones_like(p) for p in parameters]

    def add():
        with replica.backward(last=False):
            torch.autograd.backward(parameters, gradients)

    replica.clear()
    add()  # the first micro-batch's are kept, or written over old sums
    ms = measure_ms(add)
    assert float(replica.gradients()[0].flatten()[0]) == pytest.approx(1 + WARM_UP + RUNS, rel=0.01)
    replica.clear()
    moved = (2 + 4 + 4) if timed.plan.fp32_gradients else 3 * 2
    added = max(timed.micro_batches - 1, 1)
    report(added * ms, added * timed.compute_floor_ms(moved * timed.parameters))


def test_gradients_of_query_key_and_value_are_joined(timed, report):
    """Backward of the split that model/gpt.py makes of linear_qkv's output."""
    shape, batch = timed.plan.shape, timed.plan.args.training.micro_batch_size
    heads = shape.num_attention_heads // shape.num_query_groups
    joined = timed.draw(batch, shape.seq_length, shape.num_query_groups, heads + 2, shape.kv_channels)
    parts = joined.split((heads, 1, 1), dim=-2)
    gradients = [torch.ones_like(part).transpose(1, 2).contiguous().transpose(1, 2) for part in parts]
    ms = measure_ms(lambda: torch.autograd.grad(parts, joined, gradients, retain_graph=True))
    times = shape.num_layers * timed.micro_batches
    report(times * ms, times * timed.compute_floor_ms(2 * 2 * joined.numel()))


def test_the_loss_beside_its_products(timed, report):
    """Forward and backward of the trainer's loss, less the three products of logits with hidden states and weights."""
    shape, batch = timed.plan.shape, timed.plan.args.training.micro_batch_size
    hidden = timed.draw(batch, shape.seq_length, shape.hidden_size)
    weight = timed.draw(shape.padded_vocab_size, shape.hidden_size)
    labels = torch.randint(shape.padded_vocab_size, (batch, shape.seq_length), device=DEVICE)
    losses = timed.replica.chunks[0].losses
    whole = measure_backward_ms(lambda: losses(hidden, weight, labels), hidden, weight)
    products = measure_products_ms(timed, shape.hidden_size, shape.padded_vocab_size)
    # written by the product, read for the sums, read and written as gradients
    floor_ms = timed.compute_floor_ms(3 * 2 * timed.tokens * shape.padded_vocab_size)
    report(timed.micro_batches * (whole - products), timed.micro_batches * floor_ms)


def test_layers_beside_their_products_and_attention(timed, report):
    """Norms, GELU, biases, residuals and what is read again between them: a layer as it trains, less its parts."""
    shape, batch = timed.plan.shape, timed.plan.args.training.micro_batch_size
    layer = timed.replica.chunks[0].decoder.layers[0]
    hidden = timed.draw(batch, shape.seq_length, shape.hidden_size)
    whole = measure_backward_ms(lambda: layer(hidden), hidden, *layer.parameters())
    rows = (
        (shape.hidden_size, shape.qkv_rows),
        (shape.attention_width, shape.hidden_size),
        (shape.hidden_size, shape.fc1_width),
        (shape.ffn_hidden_size, shape.hidden_size),
    )
    heads = (batch, shape.num_attention_heads, shape.seq_length, shape.kv_channels)
    q, k, v = (timed.draw(*heads) for _ in range(3))
    attend = layer.self_attention.attend.function
    attention = measure_backward_ms(lambda: attend(q, k, v, Scope(), 0.0, 1), q, k, v)
    rest = whole - attention - sum(measure_products_ms(timed, *sizes) for sizes in rows)
    times = shape.num_layers * timed.micro_batches
    # read and written in 16 bits at least: input, both norms, both residual sums, GELU's two; twice in backward
    widths = 8 * shape.hidden_size + 2 * shape.fc1_width
    report(times * rest, times * timed.compute_floor_ms(3 * 2 * timed.tokens * widths))


def test_the_gradient_of_tied_embeddings(timed, report):
    """Of the words that went in: a whole matrix of zeros, to which each token's row is added, and its sum with the loss's."""
    shape, batch = timed.plan.shape, timed.plan.args.training.micro_batch_size
    table = timed.draw(shape.padded_vocab_size, shape.hidden_size)
    tokens = torch.randint(shape.padded_vocab_size, (batch, shape.seq_length), device=DEVICE)
    total = torch.zeros_like(table)
    result = torch.nn.functional.embedding(tokens, table)
    gradient = torch.ones_like(result)

    def add():
        total.add_(torch.autograd.grad(result, table, gradient, retain_graph=True)[0])

    ms = measure_ms(add)
    moved = 2 * (table.numel() * (1 + 3) + 3 * result.numel())
    report(timed.micro_batches * ms, timed.micro_batches * timed.compute_floor_ms(moved))


def test_the_update(timed, report):
    """Unscale, clip, AdamW and writing back."""
    gradients = [
        torch.full_like(p, 1e-4, dtype=torch.float32 if timed.plan.fp32_gradients else p.dtype)
        for p in timed.replica.parameters
    ]
    update = lambda: timed.optimizer.step(gradients, 16, lambda phase: contextlib.nullcontext())
    ms = measure_ms(update)
    assert not bool(update().skipped)
    # docs/decisions/035: bytes per parameter of what is done, and of what one fused pass would move
    report(ms, timed.compute_floor_ms((42 if timed.plan.fp32_gradients else 46) * timed.parameters))


def test_waiting_for_the_console_line(tmp_path, record_property):
    """Median step of two runs of the trainer: with a line for each step, and for each tenth."""
    medians = {}
    for interval in WAITS:
        size = f"--train-iters {40 if ON_GPU else 12} --torch-compile none --log-interval {interval}"
        train(flags(MODEL, size), tmp_path / str(interval), HERE)
        medians[interval] = statistics.median(step["ms"] for step in steps(tmp_path / str(interval))[5:])
        record_property(f"ms, --log-interval {interval}", round(medians[interval], 3))
    assert all(ms > 0 for ms in medians.values())


def measure_products_ms(timed: Timed, width_in: int, width_out: int) -> float:
    """The three products of a linear map in training: forward, and the gradients of its input and its weights."""
    x, weight = timed.draw(timed.tokens, width_in, learns=False), timed.draw(width_out, width_in, learns=False)
    gradient = timed.draw(timed.tokens, width_out, learns=False)
    return sum(
        measure_ms(product) for product in (lambda: x @ weight.t(), lambda: gradient @ weight, lambda: gradient.t() @ x)
    )
