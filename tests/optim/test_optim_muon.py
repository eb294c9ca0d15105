"""--optimizer muon: momentum, scales, split queries and AdamW for the rest are Megatron-LM's."""

import math
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from support.launch import build_bare, flags, losses, on_ranks, plan_of, quietly, train

from megatron_lite.config.parameter_groups import ORTHOGONAL, find_group
from megatron_lite.config.world import World
from megatron_lite.errors import ConfigError
from megatron_lite.optim.muon import COEFFICIENTS, compute_scale, orthogonalize
from megatron_lite.optim.optimizer import Optimizer

pytestmark = pytest.mark.usefixtures("process_group")

CPU = torch.device("cpu")
MUON = "--optimizer muon --weight-decay 0.1 --lr 1e-2 --lr-decay-style constant --clip-grad 0"
ZERO1 = "--use-distributed-optimizer"
EXACT = "--muon-fp32-matmul-prec high"
GROUPED = "--group-query-attention --num-query-groups 2"


def no_phase(name):
    return nullcontext()


# --- the reference: one matrix at a time, by singular values in float64


def plain_orthogonal(matrix: torch.Tensor, kind: str, steps: int) -> torch.Tensor:
    """Newton-Schulz keeps singular vectors: only the singular values go through the polynomials."""
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.norm()
    for step in range(steps):
        a, b, c = COEFFICIENTS[kind][step % len(COEFFICIENTS[kind])]
        s = a * s + b * s**3 + c * s**5
    return u * s @ vh


class Plainly:
    """Muon as its paper and Megatron-LM's flags say, in float64."""

    def __init__(self, model, args):
        self.named, self.o, self.args = dict(model.named_parameters()), args.optimizer, args
        self.momenta = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in self.named.items()}
        others = [p for name, p in self.named.items() if not self.is_matrix(name, p)]
        decaying = [p for p in others if p.ndim > 1]
        vectors = [p for p in others if p.ndim == 1]
        groups = [{"params": decaying, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        self.adam = torch.optim.AdamW([g for g in groups if g["params"]], lr=1e-2, betas=(0.9, 0.999), eps=1e-8)

    def is_matrix(self, name, parameter):
        return parameter.ndim == 2 and "word_embeddings" not in name and "output_layer" not in name

    def step(self):
        for name, p in self.named.items():
            if not self.is_matrix(name, p):
                continue
            mu, buffer = self.o.muon_momentum, self.momenta[name]
            buffer.mul_(mu).add_(p.grad.double(), alpha=1 - mu)
            direction = (1 - mu) * p.grad.double() + mu * buffer if self.o.muon_nesterov else buffer
            update = self.make_update(name, direction)
            with torch.no_grad():
                p.copy_(p.double() * (1 - 1e-2 * 0.1) - 1e-2 * update)
        self.adam.step()

    def make_update(self, name, direction):
        if "linear_qkv" not in name or not self.o.muon_split_qkv:
            return self.scale(direction)
        m = self.args.model
        heads, width = m.num_attention_heads // m.num_query_groups, m.hidden_size // m.num_attention_heads
        rows = [heads * width, width, width]
        groups = direction.view(m.num_query_groups, sum(rows), -1)
        parts = [self.scale(part.reshape(-1, direction.shape[1])) for part in groups.split(rows, dim=1)]
        parts = [part.view(m.num_query_groups, -1, direction.shape[1]) for part in parts]
        return torch.cat(parts, dim=1).view_as(direction)

    def scale(self, matrix):
        rows, columns = matrix.shape
        scales = {
            "spectral": math.sqrt(max(rows, columns)),
            "unit_rms_norm": math.sqrt(rows / columns),
            "shape_scaling": math.sqrt(max(1, rows / columns)),
        }
        orthogonal = plain_orthogonal(matrix, self.o.muon_coefficient_type, self.o.muon_num_ns_steps)
        return orthogonal * scales[self.o.muon_scale_mode] * self.o.muon_extra_scale_factor


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--muon-nesterov --muon-momentum 0.8",
        "--muon-no-split-qkv --muon-scale-mode unit_rms_norm",
        "--muon-scale-mode shape_scaling --muon-coefficient-type simple --muon-num-ns-steps 3",
        "--muon-extra-scale-factor 0.2 --muon-coefficient-type aol --swiglu --untie-embeddings-and-output-weights",
    ],
)
def test_twenty_steps_are_the_plain_ones(words):
    plan = plan_of(flags(MUON, EXACT, GROUPED, words))
    ours, theirs = build_bare(plan), build_bare(plan)
    names = [name for name, _ in ours.named_parameters()]
    optimizer, reference = Optimizer(plan, list(ours.parameters()), CPU, names=names), Plainly(theirs, plan.args)
    for step in range(20):
        inputs = torch.randint(128, (2, 16), generator=torch.Generator().manual_seed(step))
        theirs.zero_grad()
        theirs(inputs, inputs.roll(-1, 1)).mean().backward()
        # the same gradients: small differences of weights would grow by way of the polynomials
        optimizer.step([p.grad.clone() for p in theirs.parameters()], 4, no_phase)
        reference.step()
        for name, mine, plain in zip(names, ours.parameters(), theirs.parameters()):
            torch.testing.assert_close(mine, plain, rtol=1e-4, atol=2e-5, msg=f"step {step}, {name}")


def test_products_of_bf16_are_about_as_orthogonal():
    matrix = torch.randn(24, 40, generator=torch.Generator().manual_seed(0))
    for kind in COEFFICIENTS:
        exact, rounded = (orthogonalize(matrix, 5, kind, in_bf16) for in_bf16 in (False, True))
        assert (exact - rounded).abs().max() < 0.05 and rounded.dtype == torch.float32
        assert 0.5 < torch.linalg.svdvals(exact).min() and torch.linalg.svdvals(exact).max() < 1.4
    torch.testing.assert_close(
        orthogonalize(matrix.T, 5, "quintic", False), orthogonalize(matrix, 5, "quintic", False).T
    )
    assert (compute_scale(4, 16, "spectral"), compute_scale(4, 16, "unit_rms_norm")) == (4, 0.5)
    assert (compute_scale(4, 16, "shape_scaling"), compute_scale(16, 4, "shape_scaling")) == (1, 2)


def test_matrices_are_those_of_layers_and_positions():
    o = plan_of(flags(MUON)).args.optimizer
    names = ("decoder.layers.0.mlp.linear_fc1.weight", "embedding.position_embeddings.weight")
    assert all(find_group(name, 2, o) == ORTHOGONAL for name in names)
    others = (("embedding.word_embeddings.weight", 2), ("output_layer.weight", 2), ("final_layernorm.weight", 1))
    assert not any(find_group(name, dimensions, o).is_orthogonal for name, dimensions in others)


def test_an_overflow_changes_nothing():
    plan = plan_of(flags(MUON, "--bf16 --loss-scale 64"))
    model = build_bare(plan)
    names = [name for name, _ in model.named_parameters()]
    optimizer = Optimizer(plan, list(model.parameters()), CPU, names=names)
    good = [torch.ones_like(p) for p in model.parameters()]
    optimizer.step([g.clone() for g in good], 4, no_phase)
    before = {name: tensor.clone() for name, tensor in optimizer.tensors(names).items()}
    bad = [torch.full_like(g, math.inf) for g in good]
    assert bool(optimizer.step(bad, 4, no_phase).skipped)
    for name, tensor in optimizer.tensors(names).items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize(
    "words", ["", "--bf16 --weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 0.1"]
)
def test_a_resumed_run_is_an_uninterrupted_one(words, tmp_path):
    common = flags(MUON, words, "--train-iters 4 --save-interval 2", "--save", tmp_path / "save")
    quietly(common, tmp_path / "whole")
    quietly([*common, "--load", str(tmp_path / "save"), "--ckpt-step", "2"], tmp_path / "rest")
    assert losses(tmp_path / "rest") == losses(tmp_path / "whole")[2:]
    assert losses(tmp_path / "whole")[-1] < losses(tmp_path / "whole")[0]


def test_ranks_are_one_rank(tmp_path):
    words = flags(MUON, EXACT, "--train-iters 3")
    quietly(words, tmp_path / "one")
    on_ranks(train_layouts, tmp_path / "two", *words)
    for name in LAYOUTS:
        assert losses(tmp_path / "two" / name) == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


LAYOUTS = {
    "replicas": "",
    "rows": ZERO1,
    "stages": "--pipeline-model-parallel-size 2",
    "positions": "--context-parallel-size 2",
}


def train_layouts(world, *argv: str):
    for name, words in LAYOUTS.items():
        train([*argv, *words.split()], Path(name), world)


# --- mixtures: each expert's matrices are orthogonal by themselves, wherever they are

EXPERTS = (
    "--num-experts 4 --disable-bias-linear --swiglu --moe-ffn-hidden-size 32 --moe-router-topk 2 "
    "--moe-shared-expert-intermediate-size 32 --moe-shared-expert-gate "
)
EP2 = "--expert-model-parallel-size 2"
EXPERT_LAYOUTS = {
    "replicas": "",
    "rows": ZERO1,
    "ep2": EP2,
    "ep2, rows": f"{EP2} {ZERO1} --no-use-layer-wise-param-layout",
    "ep2, stages": "--pipeline-model-parallel-size 2",
}


def train_expert_layouts(world, saved: str, *argv: str):
    for name, words in EXPERT_LAYOUTS.items():
        train([*argv, "--save", f"saved/{name}", *words.split()], Path(name), world)
    words = [*EP2.split(), ZERO1, "--load", saved, "--ckpt-step", "2"]
    train([*argv, *words], Path("resumed"), world)


@pytest.mark.slow
def test_experts_on_ranks_are_those_of_one_rank(tmp_path):
    """Whole trainings, and those that go on from a checkpoint of the other layout."""
    words = flags(MUON, EXACT, EXPERTS, "--train-iters 4 --save-interval 2")
    one = tmp_path / "one"
    quietly([*words, "--save", str(tmp_path / "save")], one)
    on_ranks(train_expert_layouts, tmp_path / "two", str(tmp_path / "save"), *words)
    for name in EXPERT_LAYOUTS:
        assert losses(tmp_path / "two" / name) == pytest.approx(losses(one), rel=1e-5), name
    assert losses(tmp_path / "two/resumed") == pytest.approx(losses(one)[2:], rel=1e-5)
    quietly([*words, "--load", str(tmp_path / "two/saved/ep2, rows"), "--ckpt-step", "2"], tmp_path / "back")
    assert losses(tmp_path / "back") == pytest.approx(losses(one)[2:], rel=1e-5)


def test_an_experts_matrices_are_orthogonal_by_themselves():
    plan = plan_of(flags(MUON, EXACT, EXPERTS))
    model = build_bare(plan)
    names = [name for name, _ in model.named_parameters()]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = Optimizer(plan, list(model.parameters()), CPU, names=names)
    generator = torch.Generator().manual_seed(0)
    # the first expert's gradient is far larger: taken together, it would leave nothing of the others' updates
    gradients = {name: torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}
    of_experts = [name for name in names if ".mlp.experts." in name]
    assert len(of_experts) == 2 * plan.shape.num_layers
    for name in of_experts:
        gradients[name].unflatten(0, (4, -1))[0] *= 1e4
    optimizer.step(list(gradients.values()), 4, no_phase)
    model_after = dict(model.named_parameters())
    for name in of_experts:
        changes = (model_after[name] - before[name] * (1 - 1e-2 * 0.1)).unflatten(0, (4, -1))
        for change, gradient in zip(changes, gradients[name].unflatten(0, (4, -1))):
            orthogonal = plain_orthogonal(0.1 * gradient, "quintic", 5) * math.sqrt(max(gradient.shape))
            torch.testing.assert_close(change.double(), -1e-2 * orthogonal, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--fp16", "--fp16"),
        ("--tensor-model-parallel-size 2", "--tensor-model-parallel-size 2 splits"),
        ("--use-torch-fsdp2", "--use-torch-fsdp2"),
        ("--use-megatron-fsdp", "--use-megatron-fsdp"),
        (f"{EXPERTS} --expert-tensor-parallel-size 2", "--expert-tensor-parallel-size 2 splits"),
        ("--ckpt-format torch --save x", "--ckpt-format torch"),
    ],
)
def test_layouts_that_have_no_whole_matrices_are_refused_in_one_line(words, said):
    with pytest.raises(ConfigError) as caught:
        plan_of(flags(MUON, words), World(size=2))
    assert (
        len(caught.value.lines) == 1
        and caught.value.lines[0].startswith("--optimizer muon")
        and said in str(caught.value)
    )


def test_parts_of_tensor_parallel_ranks_are_matrices_where_the_flag_says_so():
    assert plan_of(flags(MUON, "--tensor-model-parallel-size 2 --muon-tp-mode blockwise"), World(size=2))
