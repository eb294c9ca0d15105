"""One folded step (unscale, clip, AdamW or SGD, schedule) against the same thing done plainly; loss scales against their rules."""

import contextlib
import math
import random

import pytest
import torch
from support.launch import flags, plan_of, same
from support.optimizer_rules import Rules
from torch import nn

from megatron_lite.optim.optimizer import DynamicLossScale, LossScale, Optimizer, make_loss_scale

CPU = torch.device("cpu")
SAMPLES = 4
SHAPES = [(8, 6), (6,), (5, 3, 2), (1,)]
NAMES = [f"weight {number}" for number in range(len(SHAPES))]


def no_phase(name):
    return contextlib.nullcontext()


def gradients(step: int, scale: float, dtype=torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [(torch.randn(shape, generator=generator) * scale).to(dtype) for shape in SHAPES]


def parameters(dtype=torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(numbers) for numbers in gradients(-97, 1.0, dtype)]


class Plainly:
    """Host-side float64-free reference: scaler like torch's GradScaler, clip_grad_norm_, plain torch optimizer."""

    def __init__(self, weights, make, clip, lr_of, decay_of=None):
        self.weights = [nn.Parameter(w.detach().float().clone()) for w in weights]
        matrices = [w for w in self.weights if w.ndim > 1]
        vectors = [w for w in self.weights if w.ndim <= 1]
        self.engine = make([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}])
        self.clip, self.lr_of, self.decay_of, self.good = clip, lr_of, decay_of, 0

    def step(self, grads, scale) -> tuple[float, bool]:
        for weight, grad in zip(self.weights, grads):
            weight.grad = grad.float() / scale
        norm = math.sqrt(sum(float(w.grad.double().square().sum()) for w in self.weights))
        if not math.isfinite(norm):
            return norm, True
        if self.clip:
            torch.nn.utils.clip_grad_norm_(self.weights, self.clip)
        for group in self.engine.param_groups:
            group["lr"] = self.lr_of(self.good)
        if self.decay_of:
            self.engine.param_groups[0]["weight_decay"] = self.decay_of(self.good)
        self.engine.step()
        self.good += SAMPLES
        return norm, False


def compare(plan, reference, infs=(), dtype=torch.float32, steps=20) -> tuple[float, Optimizer]:
    """Largest difference of the weights over the steps; norms and skips are compared on the way."""
    weights = parameters(dtype)
    optimizer = Optimizer(plan, weights, CPU)
    worst = 0.0
    for step in range(steps):
        scale = optimizer.loss_scale.item()
        grads = gradients(step, scale * 0.3, dtype)
        if step in infs:
            grads[step % len(grads)].view(-1)[0] = infs[step]
        norm, skip = reference.step([g.clone() for g in grads], scale)
        update = optimizer.step([g.clone() for g in grads], SAMPLES, no_phase)
        assert bool(update.skipped) is skip and float(update.loss_scale) == scale
        assert float(update.next_loss_scale) == optimizer.loss_scale.item()
        if not skip:
            assert float(update.grad_norm) == pytest.approx(norm, rel=1e-5)
        assert int(optimizer.good_samples) == reference.good
        pairs = zip(optimizer.weights.masters, reference.weights)
        worst = max(worst, *((mine - plain).abs().max().item() for mine, plain in pairs))
    return worst, optimizer


def linear_lr(good, peak=1e-2, iterations=20):
    return peak * (1 - good / (iterations * SAMPLES))


def adamw(groups, decay=0.1):
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=decay)


ADAM = "--train-iters 20 --weight-decay 0.1 --adam-beta2 0.95"
INFS = {0: math.inf, 1: -math.inf, 6: math.nan, 7: math.inf, 13: math.inf}


HALF = ("--fp16 --initial-loss-scale 64", torch.float16)
CLIPPED = [
    (f"--fp16 --initial-loss-scale 64 --loss-scale-window 3 --clip-grad {clip}", dtype, clip)
    for clip in (1.0, 0.01, 0.0)
    for dtype in (torch.float16, torch.float32)  # of the gradients; fp32 as with --accumulate-allreduce-grads-in-fp32
]
OTHERS = [("", torch.float32, 1.0), ("--bf16", torch.bfloat16, 1.0), ("--fp16 --loss-scale 128", torch.float16, 1.0)]


@pytest.mark.parametrize(("words", "dtype", "clip"), CLIPPED + OTHERS)
def test_an_adamw_step_is_the_plain_one(words, dtype, clip):
    infs = INFS if "--initial" in words else {}
    reference = Plainly(parameters(dtype), adamw, clip, linear_lr)
    worst, optimizer = compare(plan_of(flags(ADAM, words)), reference, infs, dtype)
    assert worst < 1e-6 and (not infs or optimizer.loss_scale.item() != 64)
    for model, master in zip(optimizer.weights.model, optimizer.weights.masters):
        assert torch.equal(model, master.to(model.dtype)), "the model is the rounded masters"


def test_a_skipped_step_changes_nothing_but_the_scale():
    plan = plan_of(flags(ADAM, "--fp16 --initial-loss-scale 64 --hysteresis 1"))
    optimizer = Optimizer(plan, parameters(torch.float16), CPU)
    for step in range(3):
        optimizer.step(gradients(step, 10, torch.float16), SAMPLES, no_phase)
    before = [p.detach().clone() for p in optimizer.weights.model]
    state = copied(optimizer)
    bad = gradients(3, 10, torch.float16)
    bad[1][2] = math.inf
    update = optimizer.step(bad, SAMPLES, no_phase)
    assert update.skipped and optimizer.loss_scale.item() == 32
    after = optimizer.tensors(NAMES)
    assert {name.partition(".")[0] for name in after} == {"optimizer", "loss_scale"}
    for name in after:
        assert name.startswith("loss_scale.") or same(state[name], after[name]), name
    assert same(before, [p.detach() for p in optimizer.weights.model])


def copied(optimizer: Optimizer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in optimizer.tensors(NAMES).items()}


@pytest.mark.parametrize("words", ["", "--bf16"])
def test_nan_stops_all_further_steps_unless_told_not_to(words):
    bad = gradients(0, 1.0)
    bad[0][0, 0] = math.nan
    careful = Optimizer(plan_of(flags(ADAM, words)), parameters(), CPU)
    before = [p.detach().clone() for p in careful.weights.model]
    for grads in (bad, gradients(1, 1.0)):
        assert careful.step([g.clone() for g in grads], SAMPLES, no_phase).skipped
    assert same(before, [p.detach() for p in careful.weights.model])
    careless = Optimizer(plan_of(flags(ADAM, words, "--no-check-for-nan-in-loss-and-grad")), parameters(), CPU)
    assert not careless.step([g.clone() for g in bad], SAMPLES, no_phase).skipped
    assert careless.weights.model[0].isnan().any()


def test_matrices_decay_and_vectors_do_not():
    """With zero gradients AdamW does nothing but decay."""
    plan = plan_of(flags("--train-iters 20 --lr-decay-style constant --lr 0.5 --weight-decay 0.1"))
    weights = parameters()
    before = [w.detach().clone() for w in weights]
    Optimizer(plan, weights, CPU).step([torch.zeros_like(w) for w in weights], SAMPLES, no_phase)
    for old, new in zip(before, weights):
        expected = old * (1 - 0.5 * 0.1) if old.ndim > 1 else old
        assert torch.allclose(new, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("momentum", [0.9, 0.0])
@pytest.mark.parametrize(("words", "dtype"), [("", torch.float32), HALF])
def test_sgd_is_torchs_plain_sgd(momentum, words, dtype):
    def make(groups):
        return torch.optim.SGD(groups, lr=0.0, momentum=momentum, weight_decay=0.1, foreach=False)

    plan = plan_of(flags("--train-iters 20 --optimizer sgd --weight-decay 0.1", f"--sgd-momentum {momentum}", words))
    worst, _ = compare(plan, Plainly(parameters(dtype), make, 1.0, linear_lr), INFS if words else (), dtype)
    assert worst < 1e-6


def growing(style):
    def decay_of(good):
        share = good / (20 * SAMPLES)
        return 0.02 + (0.5 - 0.02) * (share if style == "linear" else 0.5 * (1 + math.cos(math.pi * (1 - share))))

    return decay_of


@pytest.mark.parametrize("style", ["linear", "cosine"])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize(("words", "dtype"), [("", torch.float32), HALF])
def test_a_growing_weight_decay_is_applied(style, optimizer, words, dtype):
    decay = "--train-iters 20 --start-weight-decay 0.02 --end-weight-decay 0.5 --adam-beta2 0.95"
    plan = plan_of(flags(decay, f"--weight-decay-incr-style {style} --optimizer {optimizer}", words))

    def make(groups):
        return adamw(groups) if optimizer == "adam" else torch.optim.SGD(groups, lr=0.0, momentum=0.9, foreach=False)

    reference = Plainly(parameters(dtype), make, 1.0, linear_lr, growing(style))
    worst, _ = compare(plan, reference, INFS if words else (), dtype)
    assert worst < 1e-6
    constant = Plainly(parameters(dtype), make, 1.0, linear_lr, lambda good: 0.02)
    still, _ = compare(plan, constant, INFS if words else (), dtype)
    assert still > 1e-4, "the comparison can tell a growing decay from a constant one"


@pytest.mark.parametrize("name", ["adam", "sgd", "muon"])
@pytest.mark.parametrize("absent", [0, 1, 2])
@pytest.mark.parametrize(("words", "dtype"), [("", torch.float32), ("--bf16", torch.bfloat16)])
def test_a_weight_that_the_losses_do_not_use_stays(words, dtype, absent, name):
    """Also while the weight decay changes, which torch's optimizers do not apply themselves."""
    decay = "--train-iters 20 --start-weight-decay 0.1 --end-weight-decay 0.5 --weight-decay-incr-style linear"
    weights = [weight for weight in parameters(dtype) if weight.ndim < 3]  # which Muon takes
    grads = [gradient for gradient in gradients(1, 1.0, dtype) if gradient.ndim < 3]
    grads[absent] = None
    optimizer = Optimizer(plan_of(flags(decay, f"--optimizer {name}", words)), weights, CPU)
    before = [master.detach().clone() for master in optimizer.weights.masters]
    optimizer.step(grads, SAMPLES, no_phase)
    moved = [not torch.equal(old, new) for old, new in zip(before, optimizer.weights.masters)]
    assert moved == [place != absent for place in range(len(weights))]


def test_zeros_are_counted_exactly_beyond_what_fp32_adds_up():
    weights = [nn.Parameter(torch.ones(1)) for _ in range(5)]
    many = torch.zeros(1).expand(2**24)
    few = torch.zeros(1)
    zeros = Optimizer(plan_of(flags(ADAM)), weights, CPU).count_zeros([many, few, few, few, few])
    assert zeros.item() == 2**24 + 4


def test_skipped_steps_do_not_advance_the_schedule():
    plan = plan_of(flags("--train-iters 20 --fp16 --initial-loss-scale 64 --lr-warmup-iters 4 --lr-decay-iters 20"))
    optimizer = Optimizer(plan, parameters(torch.float16), CPU)
    rates = []
    for step in range(8):
        grads = gradients(step, 1.0, torch.float16)
        if step in (1, 2, 5):
            grads[0][0, 0] = math.inf
        rates.append(round(optimizer.lr.item(), 6))
        optimizer.step(grads, SAMPLES, no_phase)
    assert rates == [0.0, 0.0025, 0.0025, 0.0025, 0.005, 0.0075, 0.0075, 0.01]


def test_a_state_goes_on_bitwise():
    for words, dtype in (HALF, ("", torch.float32), ("--optimizer sgd", torch.float32)):
        plan = plan_of(flags(ADAM, words))
        one = Optimizer(plan, parameters(dtype), CPU)
        for step in range(4):
            one.step(gradients(step, 10, dtype), SAMPLES, no_phase)
        weights = [nn.Parameter(p.detach().clone()) for p in one.weights.model]
        other = Optimizer(plan, weights, CPU)
        for name, tensor in other.tensors(NAMES).items():
            tensor.copy_(one.tensors(NAMES)[name])
        other.resume()
        for step in range(4, 8):
            for optimizer in (one, other):
                optimizer.step(gradients(step, 10, dtype), SAMPLES, no_phase)
        assert same(copied(one), copied(other)) and same(one.weights.model, other.weights.model)


@pytest.mark.parametrize("batch", [4, 8])
def test_rates_are_those_of_the_exact_sample_count(batch):
    """A run of another global batch size has left a count that is no multiple of this one's."""
    decay = "--start-weight-decay 0 --end-weight-decay 0.5 --weight-decay-incr-style linear"
    plan = plan_of(flags(f"--global-batch-size {batch} --train-iters 10 --lr-decay-style cosine", decay))
    weights = [nn.Parameter(torch.ones(2, 2))]
    optimizer = Optimizer(plan, weights, CPU)
    optimizer.tensors(["weight"])["optimizer.good_samples"].fill_(20)
    optimizer.resume()
    total, good, kept = 10 * batch, 20, 1.0
    for step in range(2):
        rate = 1e-2 * 0.5 * (1 + math.cos(math.pi * min(good / total, 1)))
        kept *= 1 - rate * 0.5 * min(good / total, 1)
        good += batch
        update = optimizer.step([torch.zeros(2, 2)], batch, no_phase)
        after = 1e-2 * 0.5 * (1 + math.cos(math.pi * min(good / total, 1)))
        assert weights[0][0, 0].item() == pytest.approx(kept, rel=1e-6, abs=0), f"step {step}"
        assert update.next_lr.item() == pytest.approx(after, rel=1e-12)
        assert optimizer.lr.item() == pytest.approx(update.next_lr.item(), rel=1e-7), "what is reported is applied next"


# --- the dynamic loss scale against the rules written down as plain Python


@pytest.mark.parametrize("seed", range(6))
def test_thousands_of_random_updates(seed):
    draw = random.Random(seed)
    settings = 2.0**10, draw.choice([1.0, 0.25, 64.0]), draw.choice([1, 2, 5, 20]), draw.choice([1, 2, 3, 7])
    rules, ours = Rules(*settings), DynamicLossScale(*settings, CPU)
    for _ in range(1000):
        # always while the scale is high, so that it does not grow into inf
        overflow = rules.scale > 2**20 or draw.random() < (0.02 if rules.scale < 2**6 else 0.2)
        ours.update(torch.tensor(overflow))
        rules.update(overflow)
        found = [tensor.item() for tensor in ours.tensors().values()]
        assert found == [rules.scale, rules.clean, rules.left]


@pytest.mark.parametrize(
    ("given", "overflows", "scales"),
    [
        ((2.0**32, 1.0, 1000, 2), [True] * 17, [2.0 ** (33 - max(n, 1)) for n in range(1, 18)]),  # to 2**16
        # a clean step restores nothing
        ((16.0, 1.0, 100, 2), [n % 4 == 0 for n in range(9)], [16] * 4 + [8] * 4 + [4]),
        ((8.0, 4.0, 100, 1), [True] * 5, [4.0] * 5),  # never below the minimum
    ],
)
def test_known_sequences(given, overflows, scales):
    ours, found = DynamicLossScale(*given, CPU), []
    for overflow in overflows:
        ours.update(torch.tensor(overflow))
        found.append(ours.scale.item())
    assert found == scales


def test_a_saved_scale_goes_on_where_it_was():
    one, other = (DynamicLossScale(1024.0, 1.0, 4, 3, CPU) for _ in range(2))
    for overflow in (True, False, False, True, False):
        one.update(torch.tensor(overflow))
    for name, tensor in other.tensors().items():
        tensor.copy_(one.tensors()[name])
    for overflow in (True, False, False, False, False, True) * 3:
        one.update(torch.tensor(overflow))
        other.update(torch.tensor(overflow))
        assert one.tensors() == other.tensors()


@pytest.mark.parametrize(
    "words, kind, scale",
    [
        ("--fp16", DynamicLossScale, 2.0**32),
        ("--fp16 --initial-loss-scale 4096", DynamicLossScale, 4096.0),
        ("--fp16 --loss-scale 64", LossScale, 64.0),
        ("--fp16 --loss-scale 0", DynamicLossScale, 2.0**32),
        ("--bf16 --loss-scale 8", LossScale, 8.0),
        ("--bf16", type(None), None),
        ("", type(None), None),
    ],
)
def test_which_precision_has_which_scale(words, kind, scale):
    plan = plan_of(flags(words))
    made = make_loss_scale(plan.precision, plan.args.precision, CPU)
    assert type(made) is kind and (made is None or made.scale.item() == scale)
    assert kind is not LossScale or made.tensors() == {}, "a fixed one has nothing to be saved"
