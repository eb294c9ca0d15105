"""The kernels of a plan's attention and loss on a device, and its number formats."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from megatron_lite.config.plan import Plan
from megatron_lite.model.attention import Attend
from megatron_lite.model.attention_choice import Probe, Race, choose_attention, fastest
from megatron_lite.model.gpt import DTYPES
from megatron_lite.model.kernel_choice import explicit_is_faster, rows_at_once, skips_future_scores
from megatron_lite.model.loss import Pieces, fused_token_losses, take_rows_apart, token_losses
from megatron_lite.parallel.layers import compiled, recomputed
from megatron_lite.parallel.tensor_parallel import TensorGroup, make_losses
from megatron_lite.units import significant


def choose_plan_attention(plan: Plan, device: torch.device, pick: Callable[..., Race] | None = None) -> Attend:
    """The kernel that the plan's flags and tensors lead to on the device, recomputed in backward if they say so. pick: as of
    choose_attention."""
    m, masked = plan.args.model, plan.args.data.reset_attention_mask
    shape = plan.rank_shape
    # context parallel ranks' attention asks explicit kernels by masks
    given = shape, plan.precision, plan.device, masked or plan.layout.context > 1
    # torch.compile keeps no layer in its cache that computes a gradient in Python
    skip_future = skips_future_scores(*given) and not plan.compiles_layers
    attend = choose_attention(
        m.attention_backend,
        shape,
        batch=plan.args.training.micro_batch_size,
        device=device,
        dtype=DTYPES[plan.precision],
        masked=masked,
        explain=m.explain_attention,
        prefer_explicit=explicit_is_faster(*given) and (skip_future or plan.precision == "bf16"),
        skip_future=skip_future,
        pick=pick,
    )
    if attend.name == "explicit" and m.recompute_granularity == "selective":
        return replace(attend, function=recomputed(attend.function))
    return attend


def make_race(plan: Plan, device: torch.device) -> Callable[..., Race] | None:
    """A race of attention kernels that the first rank runs for all, who must not differ; None where none is to be run."""
    if device.type == "cpu" or plan.args.training.deterministic_mode:
        return None

    def pick(probe: Probe, able: tuple[str, ...], own: str | None) -> Race:
        found = [fastest(probe, able, own) if plan.world.is_first else None]
        dist.broadcast_object_list(found, src=0)
        return found[0]

    return pick


def choose_eager_losses(plan: Plan, among: TensorGroup | None = None) -> Callable[..., torch.Tensor]:
    """The model's loss as it runs eagerly, with as many logits in fp32 at a time as suit the plan's device.

    among: the ranks that have a part of the vocabulary each.
    """
    words = plan.rank_shape.padded_vocab_size
    rows = rows_at_once(words, plan.world.threads if plan.device == "cpu" else 0)
    if among is None:
        return partial(token_losses, rows_at_once=rows)
    return make_losses(among, words, take_rows_apart(rows))


def choose_losses(plan: Plan, among: TensorGroup | None = None) -> Callable[..., torch.Tensor]:
    """The same, compiled where the plan says so."""
    if not plan.compilation.loss:
        return choose_eager_losses(plan, among)
    pieces = Pieces(*(compiled(plan, piece) for piece in Pieces()))
    if among is None:
        return partial(fused_token_losses, pieces=pieces)
    return make_losses(among, plan.rank_shape.padded_vocab_size, pieces)


def describe_precision(plan: Plan) -> str:
    """'fp16 weights, fp32 masters, gradients summed in fp16, dynamic loss scale from 4294967296'."""
    if plan.precision == "fp32":
        return "fp32 weights and gradients"
    sums = "fp32" if plan.fp32_gradients else plan.precision
    p = plan.args.precision
    scale = f", dynamic loss scale from {p.initial_loss_scale:.0f}" if plan.precision == "fp16" else ""
    scale = f", loss scale {significant(p.loss_scale, 6)}" if p.loss_scale else scale
    return f"{plan.precision} weights, fp32 masters and moments, gradients summed in {sums}{scale}"
