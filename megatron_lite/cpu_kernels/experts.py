"""The experts of a layer, one after the other: the rows of one stay in a processor's cache between its products.

Backward lets go of what each expert has kept when its turn is over, so that the gradients of all experts' weights take
the place of that.

Letters: M tokens, H hidden, L experts, A assignments of a token to an expert, F width of an expert, I rows of its
first matrix. A letter in lower case is of one expert.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lite.model.experts import Experts
from megatron_lite.model.mlp import swiglu


def compute_one_by_one(experts: Experts, x_MH: Tensor, places_A: Tensor, shares_A: Tensor, counts: list[int]) -> Tensor:
    """The sum of what experts give for each token, (M, H).

    Args:
        experts: The experts of this rank.
        x_MH: Tokens.
        places_A: The token of each assignment, sorted by expert.
        shares_A: The weight of each assignment.
        counts: Assignments of each expert.
    """
    number = experts.linear_fc1.experts
    first_LIH = experts.linear_fc1.weight.unflatten(0, (number, -1))
    second_LHF = experts.linear_fc2.weight.unflatten(0, (number, -1))
    sums_MH: Tensor = _OneByOne.apply(  # type: ignore[no-untyped-call]
        experts, counts, x_MH, places_A, shares_A, first_LIH, second_LHF
    )
    return sums_MH


class _OneByOne(torch.autograd.Function):
    # what is kept can go before backward ends
    clear_saved_tensors_on_access = True

    @staticmethod
    def forward(
        ctx: Any,
        experts: Experts,
        counts: list[int],
        x_MH: Tensor,
        places_A: Tensor,
        shares_A: Tensor,
        first_LIH: Tensor,
        second_LHF: Tensor,
    ) -> Tensor:
        sums_MH = torch.zeros_like(x_MH)
        kept: list[Tensor] = []
        rows = zip(places_A.split(counts), shares_A.split(counts))
        for (places_a, shares_a), first_IH, second_HF in zip(rows, first_LIH, second_LHF):
            entered_aH = experts.enter(x_MH.index_select(0, places_a), shares_a)
            inner_aI = entered_aH @ first_IH.t()
            active_aF = experts.activate(inner_aI, shares_a)
            sums_MH.index_add_(0, places_a, active_aF @ second_HF.t())
            kept += [inner_aI, active_aF]
        ctx.experts = experts
        ctx.counts = counts
        ctx.save_for_backward(x_MH, places_A, shares_A, first_LIH, second_LHF, *kept)
        return sums_MH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_MH: Tensor) -> tuple[Tensor | None, ...]:
        experts = ctx.experts
        x_MH, places_A, shares_A, first_LIH, second_LHF, *kept = ctx.saved_tensors
        inner = kept[0::2]
        active = kept[1::2]
        del kept
        inner.reverse()
        places = places_A.split(ctx.counts)
        of_x_MH = torch.zeros_like(x_MH)
        of_shares_A = torch.zeros_like(shares_A)
        of_first_LIH = torch.empty_like(first_LIH)
        rows = zip(places, shares_A.split(ctx.counts), of_shares_A.split(ctx.counts))
        for number, (places_a, shares_a, of_shares_a) in enumerate(rows):
            gradient_aH = gradient_MH.index_select(0, places_a)
            of_active_aF = gradient_aH @ second_LHF[number]
            of_inner_aI = _differentiate_inner(
                experts,
                inner.pop(),
                shares_a,
                of_active_aF,
                of_shares_a,
            )
            x_aH = x_MH.index_select(0, places_a)
            entered_aH = experts.enter(x_aH, shares_a)
            torch.mm(of_inner_aI.t(), entered_aH, out=of_first_LIH[number])
            of_x_aH = of_inner_aI @ first_LIH[number]
            if experts.probs_on_input:
                of_x_aH = _differentiate_weighing(x_aH, shares_a, of_x_aH, of_shares_a)
            of_x_MH.index_add_(0, places_a, of_x_aH)
            del gradient_aH, of_active_aF, of_inner_aI, x_aH, entered_aH, of_x_aH  # nothing stays for the next one
        # last, when what the first matrices gave is gone
        of_second_LHF = torch.empty_like(second_LHF)
        for places_a, active_aF, of_second_HF in zip(places, active, of_second_LHF):
            gradient_aH = gradient_MH.index_select(0, places_a)
            torch.mm(gradient_aH.t(), active_aF, out=of_second_HF)
            del gradient_aH
        return None, None, of_x_MH, None, of_shares_A, of_first_LIH, of_second_LHF


def _differentiate_inner(
    experts: Experts, inner_aI: Tensor, shares_a: Tensor, of_active_aF: Tensor, of_shares_a: Tensor
) -> Tensor:
    """Compute the gradient of what an expert's first matrix gave.

    Args:
        experts: The experts of this rank.
        inner_aI: What the first matrix gave.
        shares_a: The weight of each assignment.
        of_active_aF: The gradient of the second matrix' input.
        of_shares_a: The sum to which the gradient of the shares is added, if they apply here.

    Returns:
        of_inner_aI.
    """
    active_aF, differentiate = _activate_again(experts.activation, inner_aI)
    if experts.probs_on_input:
        return differentiate(of_active_aF)
    of_result_aF = _differentiate_weighing(active_aF, shares_a, of_active_aF, of_shares_a)
    return differentiate(of_result_aF)


def _differentiate_weighing(x_aI: Tensor, shares_a: Tensor, of_weighed_aI: Tensor, of_shares_a: Tensor) -> Tensor:
    """Compute the gradient of rows that were weighed by shares, and add that of the shares to of_shares_a."""
    dtype = torch.promote_types(x_aI.dtype, shares_a.dtype)
    of_weighed_aI = of_weighed_aI.to(dtype)
    of_shares_aI = of_weighed_aI * x_aI
    of_shares_a += of_shares_aI.sum(dim=-1)
    of_x_aI = of_weighed_aI * shares_a[:, None]
    return of_x_aI.to(x_aI.dtype)


def _activate_again(
    activation: Callable[[Tensor], Tensor], inner_aI: Tensor
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Compute an activation function's result again.

    Args:
        activation: The function.
        inner_aI: The function's input.

    Returns:
        The result, and a function from its gradient to that of the input.
    """
    if activation is swiglu:
        gate_aF, value_aF = inner_aI.chunk(2, dim=-1)
        silu_aF = F.silu(gate_aF)
        return silu_aF * value_aF, partial(_differentiate_swiglu, gate_aF, value_aF, silu_aF)
    leaf_aI = inner_aI.detach().requires_grad_()
    with torch.enable_grad():
        active_aF = activation(leaf_aI)
    return active_aF.detach(), lambda of_active_aF: torch.autograd.grad(active_aF, leaf_aI, of_active_aF)[0]


def _differentiate_swiglu(gate_aF: Tensor, value_aF: Tensor, silu_aF: Tensor, of_active_aF: Tensor) -> Tensor:
    """The gradient of both halves, (a, 2F). silu_aF: of the gate."""
    width = gate_aF.shape[-1]
    of_inner_aI = gate_aF.new_empty(len(gate_aF), 2 * width)
    of_gate_aF, of_value_aF = of_inner_aI.split(width, dim=-1)
    torch.mul(of_active_aF, silu_aF, out=of_value_aF)
    of_silu_aF = of_active_aF * value_aF
    torch.ops.aten.silu_backward.grad_input(of_silu_aF, gate_aF, grad_input=of_gate_aF)
    return of_inner_aI
