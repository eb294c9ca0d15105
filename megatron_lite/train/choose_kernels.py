"""Chooses the kernels of a plan's attention and loss on a device, and describes its number formats."""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from megatron_lite.config.args import PrecisionArgs
from megatron_lite.config.loss_rows import count_rows
from megatron_lite.config.plan import Plan
from megatron_lite.cpu_kernels.install import choose_cpu_kernels
from megatron_lite.model.attention import EXPLICIT, Attend
from megatron_lite.model.attention_choice import Probe, Race, choose_attention, fastest
from megatron_lite.model.gpt import DTYPES
from megatron_lite.model.kernels import Kernels
from megatron_lite.model.loss import Pieces, fused_token_losses, take_rows_apart, token_losses
from megatron_lite.parallel.layers import compile_function, recompute_attention
from megatron_lite.parallel.tensor_parallel import TensorGroup, make_losses
from megatron_lite.units import significant


def choose_kernels(plan: Plan) -> Kernels:
    """Choose what the plan's model computes with on its device: torch's own operations on a GPU, faster ones on a
    CPU."""
    if plan.device != "cpu":
        return Kernels()
    return choose_cpu_kernels(
        plan.attention_shape,
        plan.precision,
        # queries of two chunks pass masks to explicit kernels
        masked=plan.masks_attention or plan.attends_in_chunks,
        compiled=plan.compilation.layers,
        threads=plan.world.threads,
    )


def choose_plan_attention(
    plan: Plan, device: torch.device, kernels: Kernels, pick: Callable[..., Race] | None = None
) -> Attend:
    """Choose the attention kernel for a plan on a device, recomputed in backward if the flags ask for it.

    Args:
        plan: The rank's plan.
        device: Where the model computes.
        kernels: The kernels that choose_kernels gives for the plan.
        pick: A race of kernels, as choose_attention takes it.
    """
    m = plan.args.model
    attend = choose_attention(
        m.attention_backend,
        plan.attention_shape,
        batch=plan.args.training.micro_batch_size,
        device=device,
        dtype=DTYPES[plan.precision],
        masked=plan.masks_attention,
        on_gpu=plan.device != "cpu",
        explain=m.explain_attention,
        why_explicit=kernels.why_explicit,
        pick=pick,
    )
    attend = kernels.suit_attention(attend)
    if attend.name == EXPLICIT and m.recompute_granularity == "selective":
        return recompute_attention(attend)
    return attend


def make_race(device: torch.device, deterministic: bool, is_first: bool) -> Callable[..., Race] | None:
    """Make a function that times attention kernels on the first rank and tells all ranks the winner.

    Args:
        device: Where the kernels run.
        deterministic: Whether the run must be deterministic.
        is_first: Whether this is the first rank.

    Returns:
        The function; None on CPUs, and where a run must be deterministic.
    """
    if device.type == "cpu" or deterministic:
        return None

    def pick(probe: Probe, able: tuple[str, ...], own: str | None) -> Race:
        found: list[Race | None] = [None]
        if is_first:
            found = [fastest(probe, able, own)]
        dist.broadcast_object_list(found, src=0)
        race = found[0]
        assert race is not None, "the first rank has sent it"
        return race

    return pick


def choose_losses(
    plan: Plan, kernels: Kernels, among: TensorGroup | None = None, eager: bool = False
) -> Callable[..., torch.Tensor]:
    """Choose the function that computes the model's loss, compiled where the plan says so.

    Args:
        plan: The rank's plan.
        kernels: The kernels that choose_kernels gives for the plan.
        among: The ranks that each have a part of the vocabulary.
        eager: Compile nothing. An eager loss holds as many rows of logits in fp32 at a time as suit the device.
    """
    words = plan.rank_shape.padded_vocab_size
    if plan.compilation.loss and not eager:
        backend = plan.args.training.torch_compile_backend
        eager_pieces = Pieces()
        pieces = Pieces(
            measure_logits=compile_function(eager_pieces.measure_logits, backend),
            write_gradients=compile_function(eager_pieces.write_gradients, backend),
        )
        if among:
            return make_losses(among, words, pieces, kernels.products)
        return partial(fused_token_losses, pieces=pieces, project=kernels.products.linear)
    rows = count_rows(words, kernels.max_logits)
    if among:
        return make_losses(among, words, take_rows_apart(rows, kernels), kernels.products)
    return partial(token_losses, rows_at_once=rows, kernels=kernels)


def describe_precision(precision: str, fp32_gradients: bool, p: PrecisionArgs) -> str:
    """Describe the formats of a run's numbers, as in 'fp16 weights, fp32 masters and moments, gradients summed in fp16,
    dynamic loss scale from 4294967296'.

    Args:
        precision: fp32, fp16 or bf16.
        fp32_gradients: Whether gradients are summed in fp32.
        p: The flags of the loss scale.
    """
    if precision == "fp32":
        return "fp32 weights and gradients"
    sums = "fp32" if fp32_gradients else precision
    scale = ""
    if p.loss_scale:
        scale = f", loss scale {significant(p.loss_scale, 6)}"
    elif precision == "fp16":
        scale = f", dynamic loss scale from {p.initial_loss_scale:.0f}"
    return f"{precision} weights, fp32 masters and moments, gradients summed in {sums}{scale}"
