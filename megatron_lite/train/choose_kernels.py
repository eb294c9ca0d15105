"""Chooses the kernels of a plan's attention and loss on a device, and describes its number formats."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from megatron_lite.config.args import PrecisionArgs
from megatron_lite.config.plan import Plan
from megatron_lite.model.attention import Attend
from megatron_lite.model.attention_choice import Probe, Race, choose_attention, fastest
from megatron_lite.model.gpt import DTYPES
from megatron_lite.model.kernel_choice import explicit_is_faster, rows_at_once, skips_future_scores
from megatron_lite.model.loss import Pieces, fused_token_losses, take_rows_apart, token_losses
from megatron_lite.model.products import is_widened
from megatron_lite.parallel.layers import compile_function, recomputed
from megatron_lite.parallel.tensor_parallel import TensorGroup, make_losses
from megatron_lite.units import significant


def choose_plan_attention(plan: Plan, device: torch.device, pick: Callable[..., Race] | None = None) -> Attend:
    """The attention kernel for a plan on a device, recomputed in backward if the flags ask for it. pick: see choose_attention."""
    m, masked = plan.args.model, plan.args.data.reset_attention_mask
    shape = plan.rank_shape
    # context parallel ranks pass masks to explicit kernels
    given = shape, plan.precision, plan.device, masked or plan.layout.context > 1
    # torch.compile does not cache layers that compute a gradient in Python
    skip_future = skips_future_scores(*given) and not plan.compilation.layers
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
    explicit = attend.name == "explicit"
    # torch's own attention with dropout converts to fp32 by itself
    in_fp32 = is_widened(DTYPES[plan.precision], plan.device) and (explicit or not shape.attention_dropout)
    function = partial(_attend_in_fp32, attend.function) if in_fp32 else attend.function
    # in fp32: rather than keeping queries, keys and values in fp32
    if in_fp32 or explicit and m.recompute_granularity == "selective":
        return replace(attend, function=recomputed(function))
    return attend


def _attend_in_fp32(function: Callable[..., torch.Tensor], q, k, v, *others) -> torch.Tensor:
    """Attention of 16-bit numbers, computed in fp32 and rounded once; arguments after `function` as in Attend."""
    return function(q.float(), k.float(), v.float(), *others).to(q.dtype)


def make_race(device: torch.device, deterministic: bool, is_first: bool) -> Callable[..., Race] | None:
    """A function that times attention kernels on the first rank and tells all ranks the winner.

    None on CPUs, and where a run must be deterministic.
    """
    if device.type == "cpu" or deterministic:
        return None

    def pick(probe: Probe, able: tuple[str, ...], own: str | None) -> Race:
        found = [fastest(probe, able, own) if is_first else None]
        dist.broadcast_object_list(found, src=0)
        return found[0]

    return pick


def choose_losses(plan: Plan, among: TensorGroup | None = None, eager: bool = False) -> Callable[..., torch.Tensor]:
    """The function that computes the model's loss, compiled where the plan says so.

    Args:
        among: The ranks that each have a part of the vocabulary.
        eager: Compile nothing. An eager loss holds as many rows of logits in fp32 at a time as suit the device.
    """
    words = plan.rank_shape.padded_vocab_size
    if plan.compilation.loss and not eager:
        pieces = Pieces(*(compile_function(piece, plan.args.training.torch_compile_backend) for piece in Pieces()))
        return make_losses(among, words, pieces) if among else partial(fused_token_losses, pieces=pieces)
    rows = rows_at_once(words, plan.world.threads if plan.device == "cpu" else 0)
    return make_losses(among, words, take_rows_apart(rows)) if among else partial(token_losses, rows_at_once=rows)


def describe_precision(precision: str, fp32_gradients: bool, p: PrecisionArgs) -> str:
    """'fp16 weights, fp32 masters, gradients summed in fp16, dynamic loss scale from 4294967296'."""
    if precision == "fp32":
        return "fp32 weights and gradients"
    sums = "fp32" if fp32_gradients else precision
    scale = f", dynamic loss scale from {p.initial_loss_scale:.0f}" if precision == "fp16" else ""
    scale = f", loss scale {significant(p.loss_scale, 6)}" if p.loss_scale else scale
    return f"{precision} weights, fp32 masters and moments, gradients summed in {sums}{scale}"
