"""A mixture of experts: MLPs of which each token passes a few, which a router chooses for it.

What ranks exchange so that each has some of the experts is put on from outside (parallel/expert_parallel.py).

Letters: B sequences, T positions, M tokens (B * T), H hidden, E experts, L experts of this rank, K experts of a token,
A assignments of a token to an expert (M * K, less what is dropped), F width of an expert, I columns and O rows of its
matrix.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron_lite.config.shape import GLOBAL_AUX_LOSS, ExpertShape, ModelShape
from megatron_lite.model.attached_loss import attach_loss
from megatron_lite.model.mlp import ACTIVATIONS, MLP

ROUTER_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
Z_LOSS = "z_loss"
# names of losses in Megatron-LM's log
LOSS_NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
    Z_LOSS: Z_LOSS,
}
SINKHORN_TOLERANCE = 1e-4
SINKHORN_EPSILON = 1e-8
SUM_EPSILON = 1e-20  # beside sums of scores that divide


def sinkhorn(costs_ME: Tensor) -> Tensor:
    """Scale exp(costs) so that tokens and experts have about equal sums (Sinkhorn and Knopp 1967).

    As in Megatron-Core, it ends when the factors of experts change by less than SINKHORN_TOLERANCE.
    """
    weights_ME = costs_ME.exp()
    tokens, experts = weights_ME.shape
    factors_E = weights_ME.new_ones(experts)
    factors_M = weights_ME.new_ones(tokens)
    change = math.inf
    while change > SINKHORN_TOLERANCE:
        sums_M = (factors_E * weights_ME).sum(dim=1)
        factors_M = 1 / tokens / (sums_M + SINKHORN_EPSILON)
        before_E = factors_E
        sums_E = (factors_M[:, None] * weights_ME).sum(dim=0)
        factors_E = 1 / experts / (sums_E + SINKHORN_EPSILON)
        moved_E = (before_E - factors_E).abs()
        change = float(moved_E.mean())
    return factors_E * weights_ME * factors_M[:, None]


def select_kept(order_A: Tensor, kept_A: Tensor) -> Tensor:
    """The assignments of `order_A`, by number, that are not dropped. kept_A: bool, by number."""
    return order_A[kept_A[order_A]]


def read_counts(counts: Tensor, total: int) -> list[list[int]]:
    """Read rows of counts of assignments on the host, which waits for the device.

    Args:
        counts: int64, (rows, experts or ranks).
        total: Each row's sum, for a reader that has no data.
    """
    read: list[list[int]] = counts.tolist()
    return read


@dataclass(frozen=True)
class RouteReader:
    """Functions of tokens' routes that depend on numbers, not on shapes only: a walk without data has others."""

    read_counts: Callable[[Tensor, int], list[list[int]]] = read_counts
    select_kept: Callable[[Tensor, Tensor], Tensor] = select_kept
    balance: Callable[[Tensor], Tensor] = sinkhorn


class Routes(NamedTuple):
    """The experts of each token."""

    experts_MK: Tensor
    shares_MK: Tensor  # the weight of each expert's output
    kept_MK: Tensor | None  # bool: which are not dropped; None: all
    reader: RouteReader = RouteReader()


class Assignments(NamedTuple):
    """Pairs of a token and one of its experts, sorted by expert, and by token within an expert."""

    tokens_A: Tensor
    shares_A: Tensor
    counts_E: Tensor  # assignments of each expert


@dataclass(frozen=True)
class TokenSharing:
    """How ranks share out the tokens of a micro-batch in a layer of experts.

    Args:
        ranks: Ranks that have some of them each: tensor parallel ones, times context parallel ones.
        tensor: Tensor parallel ranks among those, which have neighboring ranges of tokens.
        tensor_rank: This rank's place among those.
        sum_micro_batch: Sums a tensor over these ranks.
        sum_all: Sums a tensor over all ranks that have this layer, of all micro-batches that run at once.
        all_ranks: How many those are.
    """

    ranks: int = 1
    tensor: int = 1
    tensor_rank: int = 0
    sum_micro_batch: Callable[[Tensor], Tensor] = lambda tensor: tensor
    sum_all: Callable[[Tensor], Tensor] = lambda tensor: tensor
    all_ranks: int = 1


class RouterState:
    """State of a layer's router between micro-batches. Tensors are fp32, on the router's device."""

    def __init__(self, experts: ExpertShape):
        self.experts = experts
        self.bias_E: Tensor | None = None  # added to scores where experts are chosen
        self.tokens_E: Tensor | None = None  # assignments of this rank's tokens in the running step
        self.dropped: Tensor | None = None  # of those that were wanted, how many were dropped
        # sums over the step's micro-batches, by Megatron-LM's names, of this rank's part: all parts of a micro-batch
        # add up to its loss
        self.losses: dict[str, Tensor] = {}
        # of `losses`, by what each is multiplied before backward, as the main loss is: set before each step
        self.loss_scale: Tensor | float = 1.0
        # a sum over tokens is the objective, not a mean
        self.per_token = False
        # of global_aux_loss: tokens of each expert in the step's micro-batches, and their number
        self.global_tokens_E: Tensor | None = None
        self.global_micro_batches = 0

    def prepare(self, device: torch.device) -> None:
        """Make the tensors that a checkpoint may be read into, and that steps add to."""
        if self.tokens_E is not None:
            return
        zeros_E = torch.zeros(self.experts.number, dtype=torch.float32, device=device)
        self.tokens_E = zeros_E
        self.dropped = zeros_E.new_zeros(())
        if self.experts.expert_bias:
            self.bias_E = torch.zeros_like(zeros_E)

    def begin_step(self) -> None:
        """Forget the figures of the step before."""
        if self.tokens_E is not None and self.dropped is not None:
            self.tokens_E.zero_()
            self.dropped.zero_()
        self.losses = {}
        self.global_tokens_E = None
        self.global_micro_batches = 0

    def add(
        self,
        counts_E: Tensor,
        wanted: int,
        losses: dict[str, Tensor],
    ) -> None:
        """Add the figures of one micro-batch.

        Args:
            counts_E: Assignments of each expert.
            wanted: Assignments before any was dropped.
            losses: Losses without their coefficients, by Megatron-LM's names.
        """
        if self.tokens_E is None or self.dropped is None:
            self.prepare(counts_E.device)
        assert self.tokens_E is not None and self.dropped is not None
        self.tokens_E += counts_E
        self.dropped += wanted - counts_E.sum()
        for name, loss in losses.items():
            if name in self.losses:
                self.losses[name] = self.losses[name] + loss
            else:
                self.losses[name] = loss

    def add_global(self, counts_E: Tensor) -> Tensor:
        """The mean of the tokens of each expert over the step's micro-batches so far, this one among them."""
        self.global_micro_batches += 1
        if self.global_tokens_E is not None:
            counts_E = self.global_tokens_E + counts_E
        self.global_tokens_E = counts_E
        return self.global_tokens_E / self.global_micro_batches

    @torch.no_grad()
    def balance(self, tokens_E: Tensor, rate: float) -> None:
        """Move the bias of each expert up if it had fewer tokens than the mean, else down (arXiv 2408.15664).

        Args:
            tokens_E: Assignments of each expert in a whole global batch.
            rate: How much a bias moves.
        """
        if self.bias_E is None:
            return
        missing_E = tokens_E.mean() - tokens_E
        self.bias_E += torch.sign(missing_E) * rate


class Router(nn.Module):
    """Chooses the experts of each token by a product with a matrix of a row per expert."""

    def __init__(self, shape: ModelShape, experts: ExpertShape):
        super().__init__()
        weight_EH = torch.empty(experts.number, shape.hidden_size)
        self.weight = nn.Parameter(weight_EH)
        self.experts = experts
        self.state = RouterState(experts)
        self.sharing = TokenSharing()
        self.reader = RouteReader()

    def forward(self, hidden_BTH: Tensor) -> Routes:
        """Choose the experts of each token of hidden_BTH."""
        e = self.experts
        hidden_MH = hidden_BTH.flatten(0, 1)
        logits_ME = self.compute_logits(hidden_MH)
        watches = self.training and torch.is_grad_enabled()
        losses: dict[str, Tensor] = {}
        if e.z_loss_coeff is not None and watches:
            squares_M = torch.logsumexp(logits_ME, dim=-1).square()
            z_loss = squares_M.mean() / self.sharing.ranks
            logits_ME = self._attach(logits_ME, z_loss, e.z_loss_coeff)
            losses[LOSS_NAMES[Z_LOSS]] = z_loss.detach()
        if e.sinkhorn:
            routes = self._choose_by_sinkhorn(logits_ME)
        else:
            routes = self._choose(logits_ME)
        if e.capacity_factor is not None:
            routes = drop_beyond_capacity(
                routes,
                e.number,
                e.capacity_factor,
                e.drop_policy,
            )
        if not watches:
            return routes
        shares_MK = routes.shares_MK
        if e.balancing:
            positions = hidden_BTH.shape[1]
            shares_MK = self._attach_balancing(shares_MK, logits_ME, positions, losses)
        counts_E = count_assignments(routes, e.number)
        # once for each micro-batch, however often its forward is repeated
        wanted = routes.experts_MK.numel()
        record = partial(self._record, counts_E, wanted, losses)
        if shares_MK.requires_grad:
            shares_MK.register_hook(record)
        return routes._replace(shares_MK=shares_MK)

    def compute_logits(self, hidden_MH: Tensor) -> Tensor:
        """A number of each token for each expert, (M, E)."""
        e = self.experts
        if e.input_jitter is not None and self.training:
            jitter_MH = torch.empty_like(hidden_MH)
            jitter_MH.uniform_(1 - e.input_jitter, 1 + e.input_jitter)
            hidden_MH = hidden_MH * jitter_MH
        dtype = hidden_MH.dtype
        if e.router_dtype is not None:
            dtype = ROUTER_DTYPES[e.router_dtype]
        weight_EH = self.weight.to(dtype)
        logits_ME = F.linear(hidden_MH.to(dtype), weight_EH)
        if e.forced_balance:
            # the logits still get a gradient, of zero
            return logits_ME * 0 + torch.randn_like(logits_ME)
        return logits_ME

    def _choose(self, logits_ME: Tensor) -> Routes:
        e = self.experts
        if e.score_function == "sigmoid":
            experts_MK, shares_MK = self._choose_by_sigmoid(logits_ME)
        elif e.pre_softmax:
            scores_ME = softmax_in_fp32(logits_ME)
            experts_MK = find_topk(scores_ME, e)
            shares_MK = scores_ME.gather(1, experts_MK)
        else:
            experts_MK = find_topk(logits_ME, e)
            chosen_MK = logits_ME.gather(1, experts_MK)
            shares_MK = softmax_in_fp32(chosen_MK)
        if e.scaling_factor is not None:
            shares_MK = shares_MK * e.scaling_factor
        return Routes(experts_MK, shares_MK, None, self.reader)

    def _choose_by_sigmoid(self, logits_ME: Tensor) -> tuple[Tensor, Tensor]:
        """Choose (experts_MK, shares_MK). Biases that balance experts count in the choice, and in no share."""
        e = self.experts
        scores_ME = torch.sigmoid(logits_ME.float()).type_as(logits_ME)
        ranked_ME = scores_ME
        if self.state.bias_E is not None:
            ranked_ME = scores_ME + self.state.bias_E
        experts_MK = find_topk(ranked_ME, e)
        chosen_MK = scores_ME.gather(1, experts_MK)
        if e.topk == 1:
            return experts_MK, chosen_MK
        sums_M1 = chosen_MK.sum(dim=-1, keepdim=True)
        return experts_MK, chosen_MK / (sums_M1 + SUM_EPSILON)

    def _choose_by_sinkhorn(self, logits_ME: Tensor) -> Routes:
        """Choose so that experts get about as many tokens each; in evaluation by the scores alone."""
        topk = self.experts.topk
        if topk == 1:
            scores_ME = torch.sigmoid(logits_ME)
        else:
            scores_ME = softmax_in_fp32(logits_ME)
        ranked_ME = scores_ME
        if self.training:
            with torch.no_grad():
                ranked_ME = self.reader.balance(logits_ME.float())
        experts_MK = ranked_ME.topk(topk, dim=-1).indices
        shares_MK = scores_ME.gather(1, experts_MK)
        return Routes(experts_MK, shares_MK, None, self.reader)

    def _attach_balancing(
        self,
        shares_MK: Tensor,
        logits_ME: Tensor,
        positions: int,
        losses: dict[str, Tensor],
    ) -> Tensor:
        """Attach the losses that balance experts, and note them in `losses`.

        Each is E * sum over experts of (its share of assignments) * (mean of its scores), of Switch Transformers
        (arXiv 2101.03961, equations 4 to 6). Ranks that share out the tokens of a micro-batch have a part of the sum.

        Args:
            shares_MK: The weight of each expert's output.
            logits_ME: A number of each token for each expert.
            positions: Positions of each sequence on this rank.
            losses: Losses without their coefficients, by Megatron-LM's names.

        Returns:
            shares_MK, whose backward begins that of the losses.
        """
        e = self.experts
        sharing = self.sharing
        if e.score_function == "sigmoid":
            scores_ME = torch.sigmoid(logits_ME)
            sums_M1 = scores_ME.sum(dim=-1, keepdim=True)
            scores_ME = scores_ME / (sums_M1 + SUM_EPSILON)
        else:
            scores_ME = torch.softmax(logits_ME, dim=-1, dtype=torch.float32)
        chosen_MK = scores_ME.topk(e.topk, dim=-1).indices
        chosen_ME = torch.zeros_like(scores_ME).scatter(1, chosen_MK, 1.0)
        for kind, coeff in e.balancing:
            if kind == "seq_aux_loss":
                loss = self._balance_sequences(scores_ME, chosen_ME, positions)
            elif kind == "aux_loss":
                counts_E = sharing.sum_micro_batch(chosen_ME.sum(dim=0))
                loss = self._balance(scores_ME, counts_E, sharing.ranks)
            else:  # GLOBAL_AUX_LOSS
                whole_E = sharing.sum_all(chosen_ME.sum(dim=0))
                counts_E = self.state.add_global(whole_E)
                loss = self._balance(scores_ME, counts_E, sharing.all_ranks)
            shares_MK = self._attach(shares_MK, loss, coeff)
            # parts of one sum over more ranks than those of a micro-batch
            parts = 1
            if kind == GLOBAL_AUX_LOSS:
                parts = sharing.all_ranks // sharing.ranks
            losses[LOSS_NAMES[kind]] = loss.detach() * parts
        return shares_MK

    def _balance(self, scores_ME: Tensor, counts_E: Tensor, ranks: int) -> Tensor:
        """Compute this rank's part of the loss over the tokens of some ranks.

        Args:
            scores_ME: Scores of this rank's tokens.
            counts_E: Assignments of each expert, of all these ranks' tokens.
            ranks: How many they are.
        """
        e = self.experts
        scores_E = scores_ME.sum(dim=0)
        factor = compute_balance_factor(e, len(scores_ME) * ranks)
        return (scores_E * counts_E).sum() * factor

    def _balance_sequences(self, scores_ME: Tensor, chosen_ME: Tensor, positions: int) -> Tensor:
        """The same of each sequence by itself, averaged over the sequences of the micro-batch."""
        e = self.experts
        sharing = self.sharing
        own = len(scores_ME)
        length = positions * sharing.tensor  # of a sequence on all tensor parallel ranks
        sequences = own * sharing.tensor // length
        first = own * sharing.tensor_rank
        places_M = torch.arange(first, first + own, device=scores_ME.device)
        sequences_M = places_M.div(length, rounding_mode="floor")
        zeros_BE = scores_ME.new_zeros(sequences, e.number)
        scores_BE = zeros_BE.index_add(0, sequences_M, scores_ME)
        chosen_BE = zeros_BE.index_add(0, sequences_M, chosen_ME)
        counts_BE = sharing.sum_micro_batch(chosen_BE)
        tokens = own * sharing.ranks // sequences
        factor = compute_balance_factor(e, tokens)
        return (scores_BE * counts_BE).sum() * factor / sequences

    def _attach(self, carrier: Tensor, loss: Tensor, coeff: float) -> Tensor:
        scaled = loss * coeff
        if self.state.per_token:
            tokens = len(carrier) * self.sharing.ranks
            scaled = scaled * tokens
        return attach_loss(carrier, scaled, self.state)

    def _record(
        self,
        counts_E: Tensor,
        wanted: int,
        losses: dict[str, Tensor],
        gradient: Tensor,
    ) -> None:
        """The backward of a micro-batch has come here."""
        self.state.add(counts_E, wanted, losses)


def compute_balance_factor(experts: ExpertShape, tokens: int) -> float:
    """Compute the factor that makes a mean of sums over tokens of scores and of assignments.

    Even ones then give a loss of 1.
    """
    assignments = experts.topk * tokens
    return experts.number / (assignments * tokens)


def softmax_in_fp32(logits_ME: Tensor) -> Tensor:
    """Compute the softmax over the last dimension in fp32, and give it the format of the logits."""
    scores_ME = torch.softmax(logits_ME, dim=-1, dtype=torch.float32)
    return scores_ME.type_as(logits_ME)


def find_topk(ranked_ME: Tensor, experts: ExpertShape) -> Tensor:
    """The K experts of each token that rank highest, (M, K); of the best groups only, where there are groups."""
    groups = experts.groups
    chosen = experts.group_topk
    if groups is None or chosen is None:
        return ranked_ME.topk(experts.topk, dim=-1).indices
    grouped_MGE = ranked_ME.unflatten(-1, (groups, -1))  # G groups, E experts of one
    # a group counts by its best experts, as many as a token would have of each
    each = experts.topk // chosen
    best_MGK = grouped_MGE.topk(each, dim=-1).values
    groups_MG = best_MGK.sum(dim=-1)
    places = groups_MG.topk(chosen, dim=-1, sorted=False).indices
    is_out_MG = torch.ones_like(groups_MG, dtype=torch.bool)
    is_out_MG = is_out_MG.scatter(1, places, False)
    masked_MGE = grouped_MGE.masked_fill(is_out_MG[..., None], -math.inf)
    masked_ME = masked_MGE.flatten(1)
    found_MK: Tensor = masked_ME.topk(experts.topk, dim=-1).indices
    return found_MK


def drop_beyond_capacity(
    routes: Routes,
    number: int,
    factor: float,
    policy: str,
) -> Routes:
    """Leave an expert at most `factor` times its even share of this rank's assignments.

    Args:
        routes: The experts of each token.
        number: How many experts there are.
        factor: The capacity as a multiple of an expert's even share.
        policy: "probs" drops those of the smallest shares, "position" those of the last tokens.
    """
    experts_MK = routes.experts_MK
    tokens, topk = experts_MK.shape
    share = tokens * topk / number
    capacity = math.ceil(share * factor)
    if capacity > tokens:
        return routes
    zeros_ME = torch.zeros(tokens, number, dtype=torch.float32, device=experts_MK.device)
    if policy == "probs":
        shares_MK = routes.shares_MK.detach().float()
        shares_ME = zeros_ME.scatter(1, experts_MK, shares_MK)
        kept = shares_ME.topk(capacity, dim=0, sorted=False).indices
        dropped_ME = torch.zeros_like(zeros_ME, dtype=torch.bool)
        kept_ME = dropped_ME.scatter(0, kept, True)
    else:
        wanted_ME = zeros_ME.scatter(1, experts_MK, 1.0)
        places_ME = wanted_ME.cumsum(dim=0)
        kept_ME = places_ME <= capacity
    kept_MK = kept_ME.gather(1, experts_MK)
    return routes._replace(kept_MK=kept_MK)


def count_assignments(routes: Routes, number: int) -> Tensor:
    """Assignments of each of `number` experts, fp32, without those that are dropped."""
    ones_MK = torch.ones_like(routes.experts_MK, dtype=torch.float32)
    if routes.kept_MK is not None:
        ones_MK = routes.kept_MK.float()
    zeros_E = ones_MK.new_zeros(number)
    experts_A = routes.experts_MK.flatten()
    return zeros_E.scatter_add(0, experts_A, ones_MK.flatten())


def sort_by_expert(routes: Routes, number: int) -> Assignments:
    """The pairs of a token and one of its experts. number: of experts."""
    topk = routes.experts_MK.shape[1]
    experts_A = routes.experts_MK.flatten()
    order = experts_A.argsort(stable=True)
    if routes.kept_MK is not None:
        kept_A = routes.kept_MK.flatten()
        order = routes.reader.select_kept(order, kept_A)
    tokens_A = order.div(topk, rounding_mode="floor")
    shares_A = routes.shares_MK.flatten()
    counts_E = count_assignments(routes, number)
    return Assignments(tokens_A, shares_A.index_select(0, order), counts_E.long())


class _GroupedProduct(torch.autograd.Function):
    """Rows times the transposed matrix of their group. Results and gradients are written in their places: a product of
    each group by itself would be copied once more, and its weight's gradient, too."""

    @staticmethod
    def forward(
        ctx: Any,
        x_AI: Tensor,
        weight_LOI: Tensor,
        counts: list[int],
    ) -> Tensor:
        ctx.save_for_backward(x_AI, weight_LOI)
        ctx.counts = counts
        outputs = weight_LOI.shape[1]
        out_AO = x_AI.new_empty(len(x_AI), outputs)
        groups = zip(x_AI.split(counts), weight_LOI, out_AO.split(counts))
        for x, weight_OI, out in groups:
            torch.mm(x, weight_OI.t(), out=out)
        return out_AO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_AO: Tensor) -> tuple[Tensor, Tensor, None]:
        x_AI, weight_LOI = ctx.saved_tensors
        of_x_AI = torch.empty_like(x_AI)
        of_weight_LOI = torch.empty_like(weight_LOI)
        gradients = gradient_AO.split(ctx.counts)
        groups = zip(gradients, weight_LOI, of_x_AI.split(ctx.counts))
        for gradient, weight_OI, of_x in groups:
            torch.mm(gradient, weight_OI, out=of_x)
        groups = zip(gradients, x_AI.split(ctx.counts), of_weight_LOI)
        for gradient, x, of_weight_OI in groups:
            torch.mm(gradient.t(), x, out=of_weight_OI)
        return of_x_AI, of_weight_LOI, None


def multiply_groups(
    x_AI: Tensor,
    weight_LOI: Tensor,
    counts: list[int],
) -> Tensor:
    """Multiply each group of rows by its matrix, transposed: (A, O).

    On GPUs in bf16 that is one kernel of torch's for all groups, elsewhere a product of each.

    Args:
        x_AI: Rows, group after group.
        weight_LOI: A matrix for each group.
        counts: How many rows each group has.
    """
    if x_AI.is_cuda and x_AI.dtype == torch.bfloat16:
        ends_L = torch.tensor(list(accumulate(counts)), dtype=torch.int32)
        weight_LIO = weight_LOI.transpose(1, 2)
        # copied without waiting for what the GPU computes until now
        return F.grouped_mm(x_AI, weight_LIO, offs=ends_L.to(x_AI.device, non_blocking=True))
    out_AO: Tensor = _GroupedProduct.apply(x_AI, weight_LOI, counts)  # type: ignore[no-untyped-call]
    return out_AO


class ExpertLinear(nn.Module):
    """A linear map of each expert, without biases; the matrices lie one below the other, (L * O, I)."""

    def __init__(self, experts: int, inputs: int, outputs: int):
        """
        Args:
            experts: Number of experts.
            inputs: Columns of each expert's matrix.
            outputs: Rows of each expert's matrix.
        """
        super().__init__()
        self.experts = experts
        self.weight = nn.Parameter(torch.empty(experts * outputs, inputs))

    def forward(self, x_AI: Tensor, counts: list[int]) -> Tensor:
        """Multiply the first counts[0] rows by the first expert's matrix, and so on: (A, O)."""
        weight_LOI = self.weight.unflatten(0, (self.experts, -1))
        return multiply_groups(x_AI, weight_LOI, counts)


class _SumRows(torch.autograd.Function):
    """Rows added up in their places. torch's index_add would keep the rows, of which backward needs the places only."""

    @staticmethod
    def forward(ctx: Any, rows_AH: Tensor, places_A: Tensor, number: int) -> Tensor:
        ctx.save_for_backward(places_A)
        sums_MH = rows_AH.new_zeros(number, rows_AH.shape[1])
        return sums_MH.index_add_(0, places_A, rows_AH)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_MH: Tensor) -> tuple[Tensor, None, None]:
        (places_A,) = ctx.saved_tensors
        return gradient_MH.index_select(0, places_A), None, None


def sum_rows(rows_AH: Tensor, places_A: Tensor, number: int) -> Tensor:
    """Add up rows in their places, (number, H).

    Args:
        rows_AH: Rows.
        places_A: The place of each row, from 0 to number - 1.
        number: How many places there are.
    """
    sums_MH: Tensor = _SumRows.apply(rows_AH, places_A, number)  # type: ignore[no-untyped-call]
    return sums_MH


class Experts(nn.Module):
    """Experts of this rank, each an MLP."""

    def __init__(self, shape: ModelShape, experts: ExpertShape):
        super().__init__()
        number = experts.local_number
        width = experts.ffn_hidden_size
        self.linear_fc1 = ExpertLinear(number, shape.hidden_size, shape.count_fc1_rows(width))
        self.linear_fc2 = ExpertLinear(number, width, shape.hidden_size)
        self.activation: Callable[[Tensor], Tensor] = ACTIVATIONS[shape.activation]
        self.probs_on_input = experts.probs_on_input
        self.reader = RouteReader()
        self.compute: ComputeExperts = compute_all_experts

    def forward(
        self,
        x_MH: Tensor,
        places_A: Tensor,
        shares_A: Tensor,
        counts_L: Tensor,
    ) -> Tensor:
        """The sum of what experts give for each token, (M, H).

        Args:
            x_MH: Tokens.
            places_A: The token of each assignment, sorted by expert.
            shares_A: The weight of each assignment.
            counts_L: Assignments of each expert.
        """
        number = len(places_A)
        (counts,) = self.reader.read_counts(counts_L[None], number)
        return self.compute(self, x_MH, places_A, shares_A, counts)

    def enter(self, x_AH: Tensor, shares_A: Tensor) -> Tensor:
        """The input of the first matrix, (A, H): weighed here where shares apply to inputs."""
        return weigh(x_AH, shares_A) if self.probs_on_input else x_AH

    def activate(self, inner_AI: Tensor, shares_A: Tensor) -> Tensor:
        """The input of the second matrix, (A, F): weighed here in all other cases."""
        active_AF = self.activation(inner_AI)
        return active_AF if self.probs_on_input else weigh(active_AF, shares_A)


# (experts, tokens, the token of each assignment, its share, assignments of each expert) -> sums, (M, H)
ComputeExperts = Callable[[Experts, Tensor, Tensor, Tensor, list[int]], Tensor]


def weigh(x_AI: Tensor, shares_A: Tensor) -> Tensor:
    """Rows times their shares, in the rows' format, whatever that of the shares is."""
    weighed_AI = x_AI * shares_A[:, None]
    return weighed_AI.to(x_AI.dtype)


def compute_all_experts(
    experts: Experts,
    x_MH: Tensor,
    places_A: Tensor,
    shares_A: Tensor,
    counts: list[int],
) -> Tensor:
    """Each operation for the assignments of all experts at once. Arguments are those of Experts.forward."""
    x_AH = x_MH.index_select(0, places_A)
    entered_AH = experts.enter(x_AH, shares_A)
    inner_AI = experts.linear_fc1(entered_AH, counts)
    active_AF = experts.activate(inner_AI, shares_A)
    out_AH = experts.linear_fc2(active_AF, counts)
    return sum_rows(out_AH, places_A, len(x_MH))


# (tokens, their routes, this rank's experts) -> what all of each token's experts gave, (M, H)
Exchange = Callable[[Tensor, Routes, Experts], Tensor]


def pass_local_experts(x_MH: Tensor, routes: Routes, experts: Experts) -> Tensor:
    """Pass tokens through their experts, where this rank has all: an Exchange.

    Args:
        x_MH: Tokens.
        routes: The experts of each token.
        experts: All experts.
    """
    assigned = sort_by_expert(routes, experts.linear_fc1.experts)
    sums_MH: Tensor = experts(
        x_MH,
        assigned.tokens_A,
        assigned.shares_A,
        assigned.counts_E,
    )
    return sums_MH


class SharedExpert(MLP):
    """An MLP that all tokens pass, BTH -> BTH; with a gate, weighed by a sigmoid of each token."""

    def __init__(self, shape: ModelShape, experts: ExpertShape):
        super().__init__(shape, experts.shared_ffn_hidden_size)
        self.gate_weight: nn.Parameter | None = None
        if experts.shared_gate:
            weight_1H = torch.empty(1, shape.hidden_size)
            self.gate_weight = nn.Parameter(weight_1H)

    def forward(self, hidden_BTH: Tensor) -> Tensor:
        out_BTH: Tensor = super().forward(hidden_BTH)
        if self.gate_weight is None:
            return out_BTH
        logits_BT1 = F.linear(hidden_BTH, self.gate_weight)
        return out_BTH * torch.sigmoid(logits_BT1)


class MixtureOfExperts(nn.Module):
    """Mixture of experts, hidden_BTH -> BTH: the sum of what each token's experts give, and of the expert that all
    tokens pass if there is one."""

    def __init__(self, shape: ModelShape, experts: ExpertShape):
        super().__init__()
        self.router = Router(shape, experts)
        self.experts = Experts(shape, experts)
        self.shared_experts = SharedExpert(shape, experts) if experts.shared_ffn_hidden_size else None
        self.exchange: Exchange = pass_local_experts

    def read_routes_by(self, reader: RouteReader) -> None:
        """Have routes read by another reader than that of data."""
        self.router.reader = reader
        self.experts.reader = reader

    def forward(self, hidden_BTH: Tensor) -> Tensor:
        routes = self.router(hidden_BTH)
        hidden_MH = hidden_BTH.flatten(0, 1)
        out_MH = self.exchange(hidden_MH, routes, self.experts)
        out_BTH = out_MH.view_as(hidden_BTH)
        if self.shared_experts is not None:
            out_BTH = out_BTH + self.shared_experts(hidden_BTH)
        return out_BTH


def list_mixtures(model: nn.Module) -> Iterator[tuple[str, MixtureOfExperts]]:
    """List (name, mixture) of each layer of a model that has experts."""
    for name, module in model.named_modules():
        if isinstance(module, MixtureOfExperts):
            yield name, module


def list_expert_biases(
    mixtures: Iterable[tuple[str, MixtureOfExperts]],
    device: torch.device | str,
) -> dict[str, Tensor]:
    """List the biases by which routers balance experts, {name: tensor}; they are fp32, and no parameters.

    Args:
        mixtures: (name, mixture), as list_mixtures yields them.
        device: Where biases are made that do not exist yet.
    """
    biases = {}
    for name, mixture in mixtures:
        mixture.router.state.prepare(torch.device(device))
        bias = mixture.router.state.bias_E
        if bias is not None:
            biases[f"{name}.router.expert_bias"] = bias
    return biases
