"""A GPT and its training in plain PyTorch, for tests to hold the trainer's curves against: whole matrices of scores, whole
logits, GradScaler, clip_grad_norm_, AdamW, one after the other. It shares with the trainer the first weights and the order
of the samples, and no line of what comes after. In 16 bits the whole model is cast anew for each micro-batch, so that
gradients arrive at fp32 weights: rounding as in the trainer, which autocast, with its fp32 residuals, has less of.

Letters: B batch, T positions, H hidden, N heads, D width of a head.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass
class Curve:
    """An entry per step; of a skipped one the loss is None."""

    losses: list[float | None] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)  # of the gradients, before clipping
    scales: list[float] = field(default_factory=list)  # of the loss


@dataclass(frozen=True)
class Recipe:
    """How to train; the defaults of a field that a test changes are what the trainer is told."""

    heads: int
    lr: float
    clip: float
    decay: float
    betas: tuple[float, float]
    eps: float
    micro_batches: int
    precision: str = "fp32"
    first_scale: float = 1.0
    growth_interval: int = 1000
    summed: int | None = None  # micro-batches whose gradients count
    divide_by: float | None = None  # each micro-batch's loss; the number of micro-batches
    decay_all: bool = False  # vectors too


def train_plainly(first_weights: dict[str, Tensor], raws_BT1: Iterator[Tensor], steps: int, recipe: Recipe) -> Curve:
    """`first_weights` by Megatron's names; `raws_BT1` yields micro-batches of T + 1 tokens."""
    weights = {name: nn.Parameter(weight.detach().float().clone()) for name, weight in first_weights.items()}
    matrices, vectors = ([w for w in weights.values() if (w.ndim > 1) == wanted] for wanted in (True, False))
    decays = ((matrices, recipe.decay), (vectors, recipe.decay if recipe.decay_all else 0.0))
    groups = [{"params": parameters, "weight_decay": decay} for parameters, decay in decays]
    optimizer = torch.optim.AdamW(groups, lr=recipe.lr, betas=recipe.betas, eps=recipe.eps)
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=recipe.first_scale, growth_interval=recipe.growth_interval, enabled=recipe.precision == "fp16"
    )
    curve = Curve()
    for _ in range(steps):
        curve.scales.append(scaler.get_scale())
        loss = _gradients(weights, raws_BT1, scaler, recipe)
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(weights.values(), recipe.clip).item()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        skipped = not math.isfinite(norm)
        curve.losses.append(None if skipped else loss)
        curve.norms.append(None if skipped else norm)
    return curve


def _gradients(weights: dict[str, Tensor], raws_BT1: Iterator[Tensor], scaler, recipe: Recipe) -> float:
    """Adds up the gradients of a step's micro-batches; returns the mean of their losses."""
    number, losses = recipe.micro_batches, []
    for index in range(number):
        raw_BT1 = next(raws_BT1)
        cast = {name: weight.to(DTYPES[recipe.precision]) for name, weight in weights.items()}
        loss = mean_loss(cast, raw_BT1[:, :-1], raw_BT1[:, 1:], recipe.heads)
        losses.append(loss.item())
        if index < (recipe.summed or number):
            scaler.scale(loss / (recipe.divide_by or number)).backward()
    return sum(losses) / number


def mean_loss(weights: dict[str, Tensor], tokens_BT: Tensor, labels_BT: Tensor, heads: int) -> Tensor:
    """Cross entropy per token in nats, over all logits at once in fp32."""
    x = weights["embedding.word_embeddings.weight"][tokens_BT]
    x = x + weights["embedding.position_embeddings.weight"][: tokens_BT.shape[1]]
    layers = 1 + max(int(name.split(".")[2]) for name in weights if name.startswith("decoder.layers."))
    for number in range(layers):
        layer = _inside(weights, f"decoder.layers.{number}")
        x = x + _attention(_inside(layer, "self_attention"), _norm(_inside(layer, "input_layernorm"), x), heads)
        wide = _linear(_inside(layer, "mlp.linear_fc1"), _norm(_inside(layer, "pre_mlp_layernorm"), x))
        x = x + _linear(_inside(layer, "mlp.linear_fc2"), F.gelu(wide, approximate="tanh"))
    x = _norm(_inside(weights, "decoder.final_layernorm"), x)
    logits = F.linear(x, weights["embedding.word_embeddings.weight"])
    return F.cross_entropy(logits.float().flatten(0, 1), labels_BT.flatten())


def _attention(weights: dict[str, Tensor], x_BTH: Tensor, heads: int) -> Tensor:
    """The rows of linear_qkv are a head's queries, keys and values, head after head."""
    batch, length, hidden = x_BTH.shape
    qkv = _linear(_inside(weights, "linear_qkv"), x_BTH).view(batch, length, heads, 3, hidden // heads)
    q_BNTD, k_BNTD, v_BNTD = (part.transpose(1, 2) for part in qkv.unbind(3))
    scores = q_BNTD @ k_BNTD.transpose(-1, -2) / math.sqrt(hidden // heads)
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    mixed_BNTD = scores.float().masked_fill(future, -math.inf).softmax(-1).to(v_BNTD.dtype) @ v_BNTD
    return _linear(_inside(weights, "linear_proj"), mixed_BNTD.transpose(1, 2).reshape(batch, length, hidden))


def _norm(weights: dict[str, Tensor], x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weights["weight"], weights["bias"], 1e-5)


def _linear(weights: dict[str, Tensor], x: Tensor) -> Tensor:
    return F.linear(x, weights["weight"], weights["bias"])


def _inside(weights: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    """Those below `name`, without it."""
    return {rest.removeprefix(f"{name}."): weight for rest, weight in weights.items() if rest.startswith(f"{name}.")}
