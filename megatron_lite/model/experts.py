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


def sinkhorn(costs_ME: Tensor) -> Tensor:
    """exp(costs), scaled so that tokens and experts have equal sums, about (Sinkhorn and Knopp 1967).

    As in Megatron-Core, it ends when the factors of experts change by less than SINKHORN_TOLERANCE.
    """
    weights_ME = costs_ME.exp()
    tokens, experts = weights_ME.shape
    of_experts = weights_ME.new_ones(experts)
    change = math.inf
    of_tokens = weights_ME.new_ones(tokens)
    while change > SINKHORN_TOLERANCE:
        of_tokens = 1 / tokens / ((of_experts * weights_ME).sum(dim=1) + SINKHORN_EPSILON)
        before = of_experts
        of_experts = 1 / experts / ((of_tokens[:, None] * weights_ME).sum(dim=0) + SINKHORN_EPSILON)
        change = float((before - of_experts).abs().mean())
    return of_experts * weights_ME * of_tokens[:, None]


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
    """What of tokens' routes depends on numbers, and not on shapes only: a walk without data has another."""

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
        ranks: That have some of them each: tensor parallel ones, times context parallel ones.
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
    """What a layer's router keeps from one micro-batch to the next. Tensors are fp32, on the router's device."""

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
        self.tokens_E = torch.zeros(self.experts.number, dtype=torch.float32, device=device)
        self.dropped = torch.zeros((), dtype=torch.float32, device=device)
        if self.experts.expert_bias:
            self.bias_E = torch.zeros(self.experts.number, dtype=torch.float32, device=device)

    def begin_step(self) -> None:
        """Forget the figures of the step before."""
        if self.tokens_E is not None and self.dropped is not None:
            self.tokens_E.zero_()
            self.dropped.zero_()
        self.losses = {}
        self.global_tokens_E = None
        self.global_micro_batches = 0

    def add(self, counts_E: Tensor, wanted: int, losses: dict[str, Tensor]) -> None:
        """Add the figures of one micro-batch.

        Args:
            counts_E: Assignments of each expert.
            wanted: Assignments before any was dropped.
            losses: Without their coefficients.
        """
        if self.tokens_E is None or self.dropped is None:
            self.prepare(counts_E.device)
        assert self.tokens_E is not None and self.dropped is not None
        self.tokens_E += counts_E
        self.dropped += wanted - counts_E.sum()
        for name, loss in losses.items():
            before = self.losses.get(name)
            self.losses[name] = loss if before is None else before + loss

    def add_global(self, counts_E: Tensor) -> Tensor:
        """The mean of the tokens of each expert over the step's micro-batches so far, this one among them."""
        before = self.global_tokens_E
        self.global_tokens_E = counts_E if before is None else before + counts_E
        self.global_micro_batches += 1
        return self.global_tokens_E / self.global_micro_batches

    @torch.no_grad()
    def balance(self, tokens_E: Tensor, rate: float) -> None:
        """Move the bias of each expert up if it had fewer tokens than the mean, else down (arXiv 2408.15664).

        Args:
            tokens_E: Of a whole global batch.
            rate: By how much.
        """
        if self.bias_E is not None:
            self.bias_E += torch.sign(tokens_E.mean() - tokens_E) * rate


class Router(nn.Module):
    """Chooses the experts of each token by a product with a matrix of a row per expert."""

    def __init__(self, shape: ModelShape, experts: ExpertShape):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts.number, shape.hidden_size))
        self.experts = experts
        self.state = RouterState(experts)
        self.sharing = TokenSharing()
        self.reader = RouteReader()

    def forward(self, hidden_BTH: Tensor) -> Routes:
        """Choose the experts of each token of hidden_BTH."""
        e = self.experts
        logits_ME = self.compute_logits(hidden_BTH.flatten(0, 1))
        watches = self.training and torch.is_grad_enabled()
        losses: dict[str, Tensor] = {}
        if e.z_loss_coeff is not None and watches:
            z_loss = torch.logsumexp(logits_ME, dim=-1).square().mean() / self.sharing.ranks
            logits_ME = self._attach(logits_ME, z_loss, e.z_loss_coeff)
            losses[LOSS_NAMES[Z_LOSS]] = z_loss.detach()
        if e.sinkhorn:
            routes = self._choose_by_sinkhorn(logits_ME)
        else:
            routes = self._choose(logits_ME)
        if e.capacity_factor is not None:
            routes = drop_beyond_capacity(routes, e.number, e.capacity_factor, e.drop_policy)
        if not watches:
            return routes
        shares_MK = routes.shares_MK
        if e.balancing:
            shares_MK = self._attach_balancing(shares_MK, logits_ME, hidden_BTH.shape[1], losses)
        counts_E = count_assignments(routes, e.number)
        # once for each micro-batch, however often its forward is repeated
        record = partial(self._record, counts_E, routes.experts_MK.numel(), losses)
        if shares_MK.requires_grad:
            shares_MK.register_hook(record)
        return routes._replace(shares_MK=shares_MK)

    def compute_logits(self, hidden_MH: Tensor) -> Tensor:
        """A number of each token for each expert, (M, E)."""
        e = self.experts
        if e.input_jitter is not None and self.training:
            hidden_MH = hidden_MH * torch.empty_like(hidden_MH).uniform_(1 - e.input_jitter, 1 + e.input_jitter)
        dtype = hidden_MH.dtype if e.router_dtype is None else ROUTER_DTYPES[e.router_dtype]
        logits_ME = F.linear(hidden_MH.to(dtype), self.weight.to(dtype))
        if e.forced_balance:
            return logits_ME * 0 + torch.randn_like(logits_ME)
        return logits_ME

    def _choose(self, logits_ME: Tensor) -> Routes:
        e = self.experts
        if e.score_function == "sigmoid":
            scores_ME = torch.sigmoid(logits_ME.float()).type_as(logits_ME)
            ranked_ME = scores_ME if self.state.bias_E is None else scores_ME + self.state.bias_E
            experts_MK = find_topk(ranked_ME, e)
            chosen_MK = scores_ME.gather(1, experts_MK)
            shares_MK = chosen_MK
            if e.topk > 1:
                shares_MK = chosen_MK / (chosen_MK.sum(dim=-1, keepdim=True) + 1e-20)
        elif e.pre_softmax:
            scores_ME = torch.softmax(logits_ME, dim=-1, dtype=torch.float32).type_as(logits_ME)
            experts_MK = find_topk(scores_ME, e)
            shares_MK = scores_ME.gather(1, experts_MK)
        else:
            experts_MK = find_topk(logits_ME, e)
            chosen_MK = logits_ME.gather(1, experts_MK)
            shares_MK = torch.softmax(chosen_MK, dim=-1, dtype=torch.float32).type_as(logits_ME)
        if e.scaling_factor is not None:
            shares_MK = shares_MK * e.scaling_factor
        return Routes(experts_MK, shares_MK, None, self.reader)

    def _choose_by_sinkhorn(self, logits_ME: Tensor) -> Routes:
        """Choose so that experts get about as many tokens each; in evaluation by the scores alone."""
        topk = self.experts.topk
        if topk == 1:
            scores_ME = torch.sigmoid(logits_ME)
        else:
            scores_ME = torch.softmax(logits_ME, dim=-1, dtype=torch.float32).type_as(logits_ME)
        ranked_ME = scores_ME
        if self.training:
            with torch.no_grad():
                ranked_ME = self.reader.balance(logits_ME.float())
        experts_MK = ranked_ME.topk(topk, dim=-1).indices
        return Routes(experts_MK, scores_ME.gather(1, experts_MK), None, self.reader)

    def _attach_balancing(
        self, shares_MK: Tensor, logits_ME: Tensor, positions: int, losses: dict[str, Tensor]
    ) -> Tensor:
        """Attach the losses that balance experts, and note them in `losses`.

        Each is E * sum over experts of (its share of assignments) * (mean of its scores), of Switch Transformers
        (arXiv 2101.03961, equations 4 to 6). Ranks that share out the tokens of a micro-batch have a part of the sum.

        Args:
            positions: Of each sequence on this rank.
        """
        e, sharing = self.experts, self.sharing
        if e.score_function == "sigmoid":
            scores_ME = torch.sigmoid(logits_ME)
            scores_ME = scores_ME / (scores_ME.sum(dim=-1, keepdim=True) + 1e-20)
        else:
            scores_ME = torch.softmax(logits_ME, dim=-1, dtype=torch.float32)
        chosen_MK = scores_ME.topk(e.topk, dim=-1).indices
        chosen_ME = torch.zeros_like(scores_ME).scatter(1, chosen_MK, 1.0)
        tokens = len(scores_ME) * sharing.ranks
        for kind, coeff in e.balancing:
            if kind == "seq_aux_loss":
                loss = self._balance_sequences(scores_ME, chosen_ME, positions)
            elif kind == "aux_loss":
                counts_E = sharing.sum_micro_batch(chosen_ME.sum(dim=0))
                loss = (scores_ME.sum(dim=0) * counts_E).sum() * (e.number / (e.topk * tokens**2))
            else:  # GLOBAL_AUX_LOSS
                everyone = len(scores_ME) * sharing.all_ranks
                counts_E = self.state.add_global(sharing.sum_all(chosen_ME.sum(dim=0)))
                loss = (scores_ME.sum(dim=0) * counts_E).sum() * (e.number / (e.topk * everyone**2))
            shares_MK = self._attach(shares_MK, loss, coeff)
            # parts of one sum over more ranks than those of a micro-batch
            parts = sharing.all_ranks // sharing.ranks if kind == GLOBAL_AUX_LOSS else 1
            losses[LOSS_NAMES[kind]] = loss.detach() * parts
        return shares_MK

    def _balance_sequences(self, scores_ME: Tensor, chosen_ME: Tensor, positions: int) -> Tensor:
        """The same of each sequence by itself, averaged over the sequences of the micro-batch."""
        e, sharing = self.experts, self.sharing
        length = positions * sharing.tensor  # of a sequence on all tensor parallel ranks
        sequences = len(scores_ME) * sharing.tensor // length
        first = len(scores_ME) * sharing.tensor_rank
        places_M = torch.arange(first, first + len(scores_ME), device=scores_ME.device)
        sequences_M = places_M.div(length, rounding_mode="floor")
        scores_BE = scores_ME.new_zeros(sequences, e.number).index_add(0, sequences_M, scores_ME)
        chosen_BE = chosen_ME.new_zeros(sequences, e.number).index_add(0, sequences_M, chosen_ME)
        counts_BE = sharing.sum_micro_batch(chosen_BE)
        tokens = len(scores_ME) * sharing.ranks // sequences
        return (scores_BE * counts_BE).sum() * (e.number / (e.topk * tokens**2)) / sequences

    def _attach(self, carrier: Tensor, loss: Tensor, coeff: float) -> Tensor:
        scaled = loss * coeff
        if self.state.per_token:
            scaled = scaled * (len(carrier) * self.sharing.ranks)
        return attach_loss(carrier, scaled, self.state)

    def _record(self, counts_E: Tensor, wanted: int, losses: dict[str, Tensor], gradient: Tensor) -> None:
        """The backward of a micro-batch has come here."""
        self.state.add(counts_E, wanted, losses)


def find_topk(ranked_ME: Tensor, experts: ExpertShape) -> Tensor:
    """The K experts of each token that rank highest, (M, K); of the best groups only, where there are groups."""
    groups, chosen = experts.groups, experts.group_topk
    if groups is None or chosen is None:
        return ranked_ME.topk(experts.topk, dim=-1).indices
    grouped_MGE = ranked_ME.unflatten(-1, (groups, -1))
    # a group counts by its best experts, as many as a token would have of each
    groups_MG = grouped_MGE.topk(experts.topk // chosen, dim=-1).values.sum(dim=-1)
    best = groups_MG.topk(chosen, dim=-1, sorted=False).indices
    is_best_MG = torch.zeros_like(groups_MG, dtype=torch.bool).scatter(1, best, True)
    masked_MGE = grouped_MGE.masked_fill(~is_best_MG[..., None], -math.inf)
    found_MK: Tensor = masked_MGE.flatten(1).topk(experts.topk, dim=-1).indices
    return found_MK


def drop_beyond_capacity(routes: Routes, number: int, factor: float, policy: str) -> Routes:
    """Leave an expert at most `factor` times its even share of this rank's assignments.

    Args:
        number: Of experts.
        policy: Which are dropped: "probs", those of the smallest shares, or "position", those of the last tokens.
    """
    tokens, topk = routes.experts_MK.shape
    capacity = math.ceil(tokens * topk / number * factor)
    if capacity > tokens:
        return routes
    wanted_ME = torch.zeros(tokens, number, dtype=torch.float32, device=routes.experts_MK.device)
    if policy == "probs":
        shares_ME = wanted_ME.scatter(1, routes.experts_MK, routes.shares_MK.detach().float())
        kept = shares_ME.topk(capacity, dim=0, sorted=False).indices
        kept_ME = torch.zeros_like(wanted_ME, dtype=torch.bool).scatter(0, kept, True)
    else:
        places_ME = wanted_ME.scatter(1, routes.experts_MK, 1.0).cumsum(dim=0)
        kept_ME = places_ME <= capacity
    return routes._replace(kept_MK=kept_ME.gather(1, routes.experts_MK))


def count_assignments(routes: Routes, number: int) -> Tensor:
    """Assignments of each of `number` experts, fp32, without those that are dropped."""
    ones_MK = torch.ones_like(routes.experts_MK, dtype=torch.float32)
    if routes.kept_MK is not None:
        ones_MK = routes.kept_MK.float()
    counts_E = ones_MK.new_zeros(number)
    return counts_E.scatter_add(0, routes.experts_MK.flatten(), ones_MK.flatten())


def sort_by_expert(routes: Routes, number: int) -> Assignments:
    """The pairs of a token and one of its experts. number: of experts."""
    topk = routes.experts_MK.shape[1]
    experts_A = routes.experts_MK.flatten()
    order = experts_A.argsort(stable=True)
    if routes.kept_MK is not None:
        order = routes.reader.select_kept(order, routes.kept_MK.flatten())
    shares_A = routes.shares_MK.flatten().index_select(0, order)
    counts_E = count_assignments(routes, number).long()
    return Assignments(order.div(topk, rounding_mode="floor"), shares_A, counts_E)


class _GroupedProduct(torch.autograd.Function):
    """Rows times the transposed matrix of their group. Results and gradients are written in their places: a product of
    each group by itself would be copied once more, and its weight's gradient, too."""

    @staticmethod
    def forward(ctx: Any, x_AI: Tensor, weight_LOI: Tensor, counts: list[int]) -> Tensor:
        ctx.save_for_backward(x_AI, weight_LOI)
        ctx.counts = counts
        out_AO = x_AI.new_empty(len(x_AI), weight_LOI.shape[1])
        for x, weight_OI, out in zip(x_AI.split(counts), weight_LOI, out_AO.split(counts)):
            torch.mm(x, weight_OI.t(), out=out)
        return out_AO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_AO: Tensor) -> tuple[Tensor, Tensor, None]:
        x_AI, weight_LOI = ctx.saved_tensors
        of_x_AI = torch.empty_like(x_AI)
        of_weight_LOI = torch.empty_like(weight_LOI)
        rows = gradient_AO.split(ctx.counts)
        for gradient, weight_OI, of_x in zip(rows, weight_LOI, of_x_AI.split(ctx.counts)):
            torch.mm(gradient, weight_OI, out=of_x)
        for gradient, x, of_weight_OI in zip(rows, x_AI.split(ctx.counts), of_weight_LOI):
            torch.mm(gradient.t(), x, out=of_weight_OI)
        return of_x_AI, of_weight_LOI, None


def multiply_groups(x_AI: Tensor, weight_LOI: Tensor, counts: list[int]) -> Tensor:
    """(A, O): the first counts[0] rows of x times the first matrix, transposed, and so on.

    On GPUs in bf16 that is one kernel of torch's for all groups, elsewhere a product of each.
    """
    if x_AI.is_cuda and x_AI.dtype == torch.bfloat16:
        ends = torch.tensor(counts, device=x_AI.device).cumsum(0, dtype=torch.int32)
        return F.grouped_mm(x_AI, weight_LOI.transpose(1, 2), offs=ends)
    out_AO: Tensor = _GroupedProduct.apply(x_AI, weight_LOI, counts)  # type: ignore[no-untyped-call]
    return out_AO


class ExpertLinear(nn.Module):
    """A linear map of each expert, without biases; the matrices lie one below the other, (L * O, I)."""

    def __init__(self, experts: int, inputs: int, outputs: int):
        super().__init__()
        self.experts = experts
        self.weight = nn.Parameter(torch.empty(experts * outputs, inputs))

    def forward(self, x_AI: Tensor, counts: list[int]) -> Tensor:
        """(A, O): the first counts[0] rows by the first expert's matrix, and so on."""
        return multiply_groups(x_AI, self.weight.unflatten(0, (self.experts, -1)), counts)


class Experts(nn.Module):
    """This rank's experts, each an MLP: tokens sorted by expert -> (A, H), weighed by their shares."""

    def __init__(self, shape: ModelShape, experts: ExpertShape):
        super().__init__()
        number, width = experts.local_number, experts.ffn_hidden_size
        self.linear_fc1 = ExpertLinear(number, shape.hidden_size, shape.count_fc1_rows(width))
        self.linear_fc2 = ExpertLinear(number, width, shape.hidden_size)
        self.activation: Callable[[Tensor], Tensor] = ACTIVATIONS[shape.activation]
        self.probs_on_input = experts.probs_on_input
        self.reader = RouteReader()

    def forward(self, x_AH: Tensor, shares_A: Tensor, counts_L: Tensor) -> Tensor:
        """
        Args:
            x_AH: Tokens, sorted by expert.
            shares_A: The weight of each expert's output.
            counts_L: Tokens of each expert.
        """
        (counts,) = self.reader.read_counts(counts_L[None], len(x_AH))
        if self.probs_on_input:
            x_AH = (x_AH * shares_A[:, None]).to(x_AH.dtype)
        inner_AF = self.activation(self.linear_fc1(x_AH, counts))
        if not self.probs_on_input:
            inner_AF = (inner_AF * shares_A[:, None]).to(inner_AF.dtype)
        out_AH: Tensor = self.linear_fc2(inner_AF, counts)
        return out_AH


# (tokens, their routes, this rank's experts) -> what all of each token's experts gave, (M, H)
Exchange = Callable[[Tensor, Routes, Experts], Tensor]


def pass_local_experts(x_MH: Tensor, routes: Routes, experts: Experts) -> Tensor:
    """The Exchange of a rank that has all experts."""
    number = experts.linear_fc1.experts
    assigned = sort_by_expert(routes, number)
    out_AH = experts(x_MH.index_select(0, assigned.tokens_A), assigned.shares_A, assigned.counts_E)
    return torch.zeros_like(x_MH).index_add(0, assigned.tokens_A, out_AH)


class SharedExpert(MLP):
    """An MLP that all tokens pass, BTH -> BTH; with a gate, weighed by a sigmoid of each token."""

    def __init__(self, shape: ModelShape, experts: ExpertShape):
        super().__init__(shape, experts.shared_ffn_hidden_size)
        self.gate_weight = nn.Parameter(torch.empty(1, shape.hidden_size)) if experts.shared_gate else None

    def forward(self, hidden_BTH: Tensor) -> Tensor:
        out_BTH: Tensor = super().forward(hidden_BTH)
        if self.gate_weight is None:
            return out_BTH
        gate_BT1 = torch.sigmoid(F.linear(hidden_BTH, self.gate_weight))
        return out_BTH * gate_BT1


class MixtureOfExperts(nn.Module):
    """hidden_BTH -> BTH: the sum of what each token's experts give, and of the expert that all pass if there is one."""

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
        out_BTH = self.exchange(hidden_BTH.flatten(0, 1), routes, self.experts).view_as(hidden_BTH)
        if self.shared_experts is not None:
            out_BTH = out_BTH + self.shared_experts(hidden_BTH)
        return out_BTH


def list_mixtures(model: nn.Module) -> Iterator[tuple[str, MixtureOfExperts]]:
    """(name, mixture) of each layer of a model that has experts."""
    for name, module in model.named_modules():
        if isinstance(module, MixtureOfExperts):
            yield name, module


def list_expert_biases(
    mixtures: Iterable[tuple[str, MixtureOfExperts]], device: torch.device | str
) -> dict[str, Tensor]:
    """{name: tensor} of the biases by which routers balance experts, which are no parameters; fp32.

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
