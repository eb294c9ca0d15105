"""How fast a training step can be at best: what a named GPU's arithmetic, memory and link allow.

A bound, not a forecast. Each part takes at least the time in which the hardware could do it at its peak, and parts run
one after another, as kernels of one stream do. Not in it: launches and the host, the data loader, clocks other than the
boost clock, products that miss the peak (the best reach four fifths of it), logging, evaluation and checkpoints.

Bytes are counted as if all neighboring operations were one kernel: a tensor is written once, and read once by each
later kernel, except by the one right behind its producer, which may find it in the cache. (A model so small that the
cache holds a whole micro-batch can do with less; launches are its limit.) What products and fused attention read and
write goes on under their arithmetic, and is left out.

In fp8 (config/fp8.py), which is planned on paper, the products of linear layers are at the peak of that format, and
what these read is written and gathered in it; attention and the output layer stay in 16 bits.

Letters: N parameters, h hidden, e bytes of one activation.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import msgspec

from megatron_lite.config.args import OptimizerArgs
from megatron_lite.config.fp8 import MXFP8
from megatron_lite.config.layout import count_keys
from megatron_lite.config.model_size import (
    FORWARD_AND_BACKWARD,
    attention_flops,
    count_attention_weights,
    count_expert_layers,
    count_linear_flops,
    count_output_flops,
    count_parameters,
    count_scored_width,
    list_attention_matrices,
    step_flops,
)
from megatron_lite.config.plan import Plan, list_stage_kinds
from megatron_lite.config.shape import ModelShape, RankShape
from megatron_lite.formats.hardware import Processor, get_peak_tflops
from megatron_lite.formats.run_record import TimePrediction, TimeRow
from megatron_lite.mesh_axes import (
    CONTEXT,
    CONTEXT_HEADS,
    CONTEXT_POSITIONS,
    DATA,
    EXPERT,
    EXPERT_DATA,
    PIPELINE,
    TENSOR,
)
from megatron_lite.planner.attention_kernel import FUSED, predict_attention_kernel
from megatron_lite.planner.expert_load import (
    ExpertLoad,
    count_recomputed_experts,
    plan_expert_load,
)
from megatron_lite.planner.state_size import FP32, element_bytes, gradient_bytes, group_parameters
from megatron_lite.planner.traffic import (
    GATHER,
    REDUCE,
    SEND,
    Exchange,
    Members,
    Route,
    find_members,
    find_route,
    list_exchanges,
)
from megatron_lite.units import count

COMPUTE = "compute"
MEMORY = "memory"
LINK = "link"
WAIT = "wait"
FP8 = "fp8"  # computed at that format's peak; rows call it COMPUTE
UPDATE = "gradients' norm, optimizer"
BUBBLE = "pipeline bubble"
TIED = "tied embedding's gradients"
GATHERING = "weight gathering, not overlapped"
EXPERT_REDUCTION = "reduction of experts' gradients"
# in each layer
LAYER_GROUPS = {
    TENSOR: "tensor parallel exchange",
    CONTEXT: "context parallel exchange",
    CONTEXT_HEADS: "context parallel exchange of heads",
    CONTEXT_POSITIONS: "context parallel exchange of positions",
    EXPERT: "expert parallel exchange",
}
# Times forward's work. FlashAttention's backward pass has five products, of which one repeats forward's, where forward
# has two (Dao 2023, FlashAttention-2, algorithm 2); with scores that are kept it has four.
FUSED_ATTENTION = 3.5
STORED_SCORES = 3


@dataclass(frozen=True)
class StepPart:
    """Work of one rank in a step, of one kind."""

    name: str
    bound: str  # COMPUTE or FP8: amount is FLOPs; MEMORY: bytes
    amount: float
    formula: str  # of the amount, with its numbers
    in_backward: float  # share of it that is backward's


def predict_time(plan: Plan, processor: Processor) -> TimePrediction:
    """Predict the shortest step of one rank of `plan` on `processor`, at the final global batch.

    Of a pipeline it is the slowest stage's. A row whose limit the table of processors does not hold is
    missing, and a note says so; peak_tflops is then 0.
    """
    if plan.layout.pipeline == 1:
        return predict_stage_time(plan, processor)
    kinds = list_stage_kinds(plan)
    found = [(predict_stage_time(one, processor), times) for one, times in kinds]
    slowest = max((time for time, _ in found), key=lambda one: one.step_ms)
    others_ms = 0.0
    for time, times in found:
        others = times - 1 if time is slowest else times
        others_ms += sum_micro_batches(time) * others
    bubble = _describe_bubble(plan, others_ms)
    members = find_members(PIPELINE, plan.layout, plan.sharding, plan.world)
    crossings = _cross_stages(list_exchanges(plan), members, processor)
    return msgspec.structs.replace(slowest, rows=(*slowest.rows, bubble, *crossings))


def _describe_bubble(plan: Plan, others_ms: float) -> TimeRow:
    """How long a stage of a pipeline waits at best.

    Args:
        plan: Of any stage.
        others_ms: What all other stages take for all micro-batches.
    """
    passes = plan.final_micro_batches
    stages = plan.layout.pipeline
    chunks = len(plan.stage.chunks)
    formula = f"forward and backward of one of {passes} micro-batches on the other {stages - 1} of {stages} stages"
    if chunks > 1:
        formula += f", of one of {chunks} chunks"
    wait_ms = others_ms / passes / chunks
    if plan.stage.splits_backward:
        # forward, gradients of inputs and of weights take as long each at best, and weights fill what two of them
        # would wait
        wait_ms /= 3
        formula += ", of which gradients of weights fill two thirds"
    return TimeRow(
        name=BUBBLE,
        ms=wait_ms,
        bound=WAIT,
        formula=formula,
    )


def sum_micro_batches(time: TimePrediction) -> float:
    """Milliseconds of a stage that are spent per micro-batch, not once per step."""
    ms = 0.0
    for row in time.rows:
        is_computed = row.bound != LINK and row.name != UPDATE
        if is_computed or row.name in LAYER_GROUPS.values():
            ms += row.ms
    return ms


def _cross_stages(exchanges: list[Exchange], members: Members, processor: Processor) -> Iterator[TimeRow]:
    """The way of one micro-batch's hidden states to the last stage, and of gradients back: what nothing can hide."""
    sent = next((one for one in exchanges if one.kind == SEND), None)
    if sent is None:
        return
    ms = 0.0
    words = []
    # there and back: from node to node, and within them
    between_nodes = 2 * (members.nodes - 1)
    within_nodes = 2 * (members.ranks - members.nodes)
    for hops, near in ((between_nodes, 1), (within_nodes, 2)):
        if not hops:
            continue
        route = find_route(SEND, Members(ranks=2, near=near), processor)
        if route is not None:
            ms += hops * route.milliseconds(sent.num_bytes)
            words.append(f"{hops} x {sent.num_bytes / 1e6:,.1f} MB {route.words}")
    if words:
        yield TimeRow(
            name="way through the stages",
            ms=ms,
            bound=LINK,
            formula="; ".join(words),
        )


def predict_stage_time(plan: Plan, processor: Processor) -> TimePrediction:
    """The shortest step of one rank of this stage, if it never waits for another stage."""
    plan = replace(plan, device="cuda")  # whatever the machine that plans
    rates = _find_rates(plan, processor)
    peak = rates[FP8 if plan.fp8_layers else COMPUTE] / 1e12
    parts = _list_step(plan)
    computed = _time_parts(parts, rates)
    exchanges = list_exchanges(plan)
    groups = dict.fromkeys(one.group for one in exchanges)
    members = {group: find_members(group, plan.layout, plan.sharding, plan.world) for group in groups}
    rows = list(computed.rows)
    rows += _time_layer_exchanges(exchanges, members, processor, rates)
    rows += _time_state(plan, processor, exchanges, computed.forward_ms, computed.backward_ms)
    rows += _time_tied_embedding(exchanges, members, processor)
    notes = [
        *_list_unknown_rates(plan, processor, parts, rates),
        *_list_unknown_links(exchanges, members, processor),
    ]
    if plan.batch.start and plan.batch.start != plan.batch.final:
        flag = "--step-batch-size-schedule" if plan.batch.steps else "--rampup-batch-size"
        notes.append(f"{flag}: the bound is for the final global batch of {count(plan.batch.final)}")
    sharing = plan.layout.tensor * plan.layout.context * plan.layout.pipeline  # ranks that share a sequence's work
    sequences = _count_sequences(plan)
    return TimePrediction(
        gpu=processor.name,
        rows=tuple(rows),
        tokens=plan.batch.final * plan.shape.seq_length,
        flops_causal=step_flops(plan.shape, sequences, causal=True) // sharing,
        flops_full=step_flops(plan.shape, sequences, causal=False) // sharing,
        peak_tflops=peak,
        notes=tuple(notes),
    )


def _find_rates(plan: Plan, processor: Processor) -> dict[str, float]:
    """FLOP/s and bytes/s by bound; 0 where unknown, or where the GPU does not know the scales of the plan's recipe."""
    tflops = {COMPUTE: get_peak_tflops(processor, plan.precision), FP8: get_peak_tflops(processor, "fp8")}
    of_small_blocks = plan.fp8 is not None and plan.fp8.fp8_recipe == MXFP8
    if of_small_blocks and not processor.multiplies_any_fp8_layout:
        tflops[FP8] = None
    rates = {bound: (peak or 0.0) * 1e12 for bound, peak in tflops.items()}
    return rates | {MEMORY: (processor.memory_gb_s or 0.0) * 1e9}


def _count_sequences(plan: Plan) -> int:
    """Sequences of one rank in a step."""
    return plan.batch.final // plan.layout.data


def _list_step(plan: Plan) -> list[StepPart]:
    """All parts of a rank's step that there are."""
    parts = [part for part in _list_parts(_Work(plan, _count_sequences(plan))) if part.amount]
    updated = sum(-(-group.number // group.ranks) for group in group_parameters(plan))
    each = gradient_bytes(plan.precision, plan.fp32_gradients)
    parts.append(_update_weights(updated, plan.precision, each, plan.args.optimizer))
    if plan.args.optimizer.optimizer == "muon":
        parts.append(_orthogonalize(plan))
    return parts


def _orthogonalize(plan: Plan) -> StepPart:
    """Muon's Newton-Schulz steps (optim/muon.py).

    In each of them an m x n matrix, m <= n, has products of m x m x n, m x m x m and m x m x n. Ranks that share out a
    matrix's rows all compute it whole.
    """
    steps = plan.args.optimizer.muon_num_ns_steps
    flops = 0
    for number, rows, columns in _list_matrices(plan):
        m = min(rows, columns)
        n = max(rows, columns)
        flops += number * 2 * m * m * (2 * n + m)
    formula = f"{len(plan.stage.layers)} layers, {steps} steps x {count(flops)} FLOPs"
    return StepPart(
        name="Newton-Schulz steps of muon",
        bound=COMPUTE,
        amount=steps * flops,
        formula=formula,
        in_backward=0.0,
    )


def _list_matrices(plan: Plan) -> Iterator[tuple[int, int, int]]:
    """List (how many, rows, columns) of the matrices of a stage's layers that Muon makes orthogonal."""
    shape = plan.rank_shape
    hidden = shape.hidden_size
    layers = len(plan.stage.layers)
    for rows, columns in list_attention_matrices(shape, plan.args.optimizer.muon_split_qkv):
        yield layers, rows, columns
    with_experts = count_expert_layers(shape, plan.stage)
    yield layers - with_experts, shape.fc1_width, hidden
    yield layers - with_experts, hidden, shape.ffn_hidden_size
    e = shape.experts
    if e is None:
        return
    yield with_experts, e.number, hidden
    yield with_experts * e.local_number, shape.count_fc1_rows(e.ffn_hidden_size), hidden
    yield with_experts * e.local_number, hidden, e.ffn_hidden_size
    if e.shared_ffn_hidden_size:
        yield with_experts, shape.count_fc1_rows(e.shared_ffn_hidden_size), hidden
        yield with_experts, hidden, e.shared_ffn_hidden_size


@dataclass(frozen=True)
class _ComputedRows:
    """The parts whose rate is known.

    The sums are infinite where one is not: then there is no telling what computation hides.
    """

    rows: tuple[TimeRow, ...]
    forward_ms: float  # of all micro-batches, without the update
    backward_ms: float


def _time_parts(parts: list[StepPart], rates: dict[str, float]) -> _ComputedRows:
    """How long a rank computes. rates: FLOP/s and bytes/s; 0 where unknown."""
    rows = []
    forward_ms = 0.0
    backward_ms = 0.0
    for part in parts:
        rate = rates[part.bound]
        if not rate:
            forward_ms = backward_ms = float("inf")
            continue
        is_memory = part.bound == MEMORY
        limit = f"{rate / 1e9:,.0f} GB/s" if is_memory else f"{rate / 1e12:g} TFLOP/s"
        bound = MEMORY if is_memory else COMPUTE
        rows.append(
            TimeRow(
                name=part.name,
                ms=1000 * part.amount / rate,
                bound=bound,
                formula=f"{part.formula} at {limit}",
            )
        )
        backward_ms += 1000 * part.amount * part.in_backward / rate
        if part.name != UPDATE:
            forward_ms += 1000 * part.amount * (1 - part.in_backward) / rate
    return _ComputedRows(tuple(rows), forward_ms, backward_ms)


def _list_unknown_rates(
    plan: Plan, processor: Processor, parts: list[StepPart], rates: dict[str, float]
) -> Iterator[str]:
    """A line for each rate that the table of processors lacks."""
    instead = " (--fp16 has one)" if plan.precision == "bf16" and not processor.bf16 else ""
    in_fp8 = f"peak in fp8 with {plan.fp8.fp8_recipe} scales" if plan.fp8 else ""
    limits = {COMPUTE: f"peak in {plan.precision}{instead}", FP8: in_fp8, MEMORY: "memory bandwidth"}
    for bound, unknown in limits.items():
        names = [part.name for part in parts if part.bound == bound]
        if names and not rates[bound]:
            yield f"{processor.name}: no known {unknown}; not in the bound: {', '.join(names)}"


# --- what one rank has to do at least, on any hardware: operations, and bytes to and from memory


@dataclass(frozen=True)
class _Work:
    """Numbers that the parts of a rank's step have in common."""

    plan: Plan
    sequences: int

    @cached_property
    def shape(self) -> RankShape:
        """Sizes of this rank's part of the model."""
        return self.plan.rank_shape

    @property
    def layers(self) -> int:
        """Number of the stage's layers, those of multi-token prediction among them."""
        return len(self.plan.stage.layers) + self.plan.further_layers

    @property
    def recomputed(self) -> int:
        """Layers of all chunks whose forward is computed again."""
        return self.plan.recomputed_layers + self.plan.recomputed_further_layers

    @property
    def outputs(self) -> int:
        """How often the stage makes logits of each token: once for each token that is predicted of it."""
        return 1 + self.plan.further_layers if self.plan.stage.is_last else 0

    @property
    def tokens(self) -> int:
        """Tokens of a step that this rank computes."""
        return self.sequences * self.shape.seq_length

    @property
    def joined_tokens(self) -> int:
        """Tokens whose hidden states this rank joins with embeddings: its own, where ranks share out the tokens."""
        return self.tokens * self.stream // self.shape.hidden_size

    @property
    def element_bytes(self) -> int:
        """Bytes of one activation."""
        return element_bytes(self.plan.precision)

    @property
    def stream(self) -> int:
        """Elements of hidden states, for each token, that this rank has between attention and MLP."""
        return self.shape.hidden_size // (self.plan.layout.tensor if self.plan.layout.sequence_parallel else 1)

    @cached_property
    def writes_scores(self) -> bool:
        """Whether attention writes its scores down: it was told to, or no fused kernel fits."""
        args = self.plan.args
        kernel, _ = predict_attention_kernel(
            self.plan.attention_shape,
            self.plan.precision,
            self.plan.device,
            args.model.attention_backend,
            self.plan.masks_attention,
        )
        return kernel != FUSED

    @property
    def attention_flops(self) -> int:
        """FLOPs of the two products with the matrix of scores in one layer's forward.

        A context parallel rank's queries meet the keys of whole sequences.
        """
        return self.plan.layout.context * attention_flops(self.shape, self.sequences, causal=not self.writes_scores)

    @property
    def attention_formula(self) -> str:
        """The formula of attention_flops. A fused kernel leaves out the half that the mask hides."""
        half = "" if self.writes_scores else "/2"
        context = self.plan.layout.context
        ranks = f" / {context} ranks" if context > 1 else ""
        squared = f"{count(self.plan.shape.seq_length)}^2{half}"
        channels = f"4 x {squared} x {count(self.shape.attention_width)}"
        if self.shape.latent is not None:
            channels = f"2 x {squared} x {count(count_scored_width(self.shape))}"
        return f"{count(self.sequences)} sequences x {channels}{ranks}"

    @property
    def score_bytes(self) -> int:
        """Bytes, for each token of one layer's forward, of scores that are written down.

        The softmax reads them and writes probabilities.
        """
        # heads that ranks share out have as many more positions
        plan = self.plan
        keys = count_keys(plan.attention_shape.seq_length, plan.layout.context // plan.min_head_ranks)
        return 2 * self.element_bytes * self.shape.num_attention_heads * keys

    @property
    def mask_bytes(self) -> int:
        """Bytes, for each token of one layer, of two dropouts' masks: a byte for each element.

        torch.compile draws them again instead.
        """
        if self.plan.compilation.layers or not self.shape.hidden_dropout:
            return 0
        return 2 * self.stream

    @cached_property
    def load(self) -> ExpertLoad | None:
        """Rows that this rank's experts compute; None of a dense model."""
        return plan_expert_load(self.plan)

    @cached_property
    def expert_layers(self) -> int:
        """Layers that have experts in the place of an MLP."""
        return count_expert_layers(self.shape, self.plan.stage) + self.plan.further_expert_layers

    @property
    def linear_flops(self) -> int:
        """Forward of the linear maps of a layer without experts."""
        return count_linear_flops(self.shape, self.sequences)

    @cached_property
    def expert_flops(self) -> int:
        """FLOPs of the linear maps of a layer with experts in forward.

        Rows count that pass this rank's experts, whosever tokens they are.
        """
        shape = self.shape
        e = self.shape.experts
        load = self.load
        if e is None or load is None:
            return 0
        shared = shape.count_fc1_rows(e.shared_ffn_hidden_size) + e.shared_ffn_hidden_size
        routed = self.expert_rows * (shape.count_fc1_rows(e.ffn_hidden_size) + e.ffn_hidden_size)
        return int(2 * self.tokens * (count_attention_weights(shape) + shape.hidden_size * (shared + routed)))

    @cached_property
    def fp8_flops(self) -> int:
        """Forward of the linear maps of all layers whose linear layers multiply in fp8."""
        flops = 0
        for layer in self.plan.fp8_layers:
            flops += self.expert_flops if self.shape.has_experts(layer) else self.linear_flops
        return flops

    @cached_property
    def fp8_share(self) -> float:
        """Share of this stage's layers whose linear layers multiply in fp8."""
        return len(self.plan.fp8_layers) / max(self.layers, 1)

    @property
    def input_bytes(self) -> float:
        """Bytes of one number that is written for a linear layer alone: of its input or its result's gradient."""
        return self.element_bytes - self.fp8_share * (self.element_bytes - 1)

    @property
    def expert_rows(self) -> float:
        """Rows that pass this rank's experts, for each token of its micro-batches."""
        if self.load is None:
            return 0.0
        return self.load.rows / (self.plan.layout.tensor if self.plan.layout.sequence_parallel else 1)

    def average_inner(self, of_mlp: int, of_expert: int) -> int:
        """Elements for each token on average over layers, some of which have experts.

        Args:
            of_mlp: That an MLP moves for each token.
            of_expert: That an expert moves for each of its rows, and an expert that all pass for each token.
        """
        e = self.shape.experts
        if e is None or not self.expert_layers:
            return of_mlp
        routed = self.expert_rows * (of_expert * e.ffn_hidden_size + 2 * self.shape.hidden_size)
        in_experts = self.expert_layers * (routed + of_expert * e.shared_ffn_hidden_size)
        return int(((self.layers - self.expert_layers) * of_mlp + in_experts) / self.layers)

    @property
    def forward_bytes(self) -> int:
        """Bytes, for each token of one layer's forward, beside products and attention.

        The residual sum with its norm writes the sum and the norm's result and reads the sum before, 3*h*e, twice; the
        activation function writes its result; masks are written. Tokens are written in the order of experts, and what
        these give is read.
        """
        inner = self.average_inner(self.shape.ffn_hidden_size, 1)
        # the norm's and the activation function's results are inputs of linear layers
        inputs = 2 * self.stream + inner
        return int(self.element_bytes * 2 * 2 * self.stream + self.input_bytes * inputs) + self.mask_bytes

    @property
    def backward_bytes(self) -> int:
        """Bytes, for each token of one layer's backward, as forward_bytes counts them.

        Backward reads the saved sum and its gradient, and writes the new gradient, twice; reads the activation
        function's saved input and writes its gradient; and reads the masks.
        """
        inner = self.average_inner(2 * self.shape.fc1_width, 2 * self.shape.count_fc1_rows(1))
        # half of it is the gradient of a linear layer's result
        of_inner = inner * (self.element_bytes + self.input_bytes) / 2
        return int(self.element_bytes * 2 * 3 * self.stream + of_inner) + self.mask_bytes


def _list_parts(work: _Work) -> Iterator[StepPart]:
    """Forward and backward of layers and loss, in the order of a step, and what is computed again."""
    yield from _list_products(work)
    yield from _list_attention(work)
    name = "norms, activations, dropout"
    per_token = work.forward_bytes + work.backward_bytes
    yield _move(name, work, work.layers, per_token, 1 - work.forward_bytes / per_token)
    if work.outputs:
        yield _move_logits(work)
    yield from _list_recomputed(work)


def _list_products(work: _Work) -> Iterator[StepPart]:
    """The linear layers' products, and the output layer's; those in fp8 by themselves."""
    output = work.outputs * count_output_flops(work.shape, work.sequences)
    # what joins a hidden state and an embedding is like a part of the output
    output += work.plan.further_layers * 2 * work.joined_tokens * 2 * work.shape.hidden_size**2
    of_layers = (work.layers - work.expert_layers) * work.linear_flops + work.expert_layers * work.expert_flops
    products = FORWARD_AND_BACKWARD * (of_layers + output)
    in_backward = 2 / 3
    fp8 = work.plan.fp8
    if fp8 is not None and work.fp8_flops:
        times = FORWARD_AND_BACKWARD if fp8.multiplies_for_weights else FORWARD_AND_BACKWARD - 1
        weights = work.fp8_flops // (2 * work.tokens)
        formula = f"{2 * times} x {count(work.tokens)} tokens x {count(weights)} weights"
        yield StepPart(
            name="products in fp8",
            bound=FP8,
            amount=times * work.fp8_flops,
            formula=formula,
            in_backward=1 - 1 / times,
        )
        # of what is left all but forward's is backward's
        forward = of_layers + output - work.fp8_flops
        products -= times * work.fp8_flops
        in_backward = 1 - forward / max(products, 1)
    formula = f"6 x {count(work.tokens)} tokens x {count(products // (6 * work.tokens))} weights"
    yield StepPart(
        name="matrix products",
        bound=COMPUTE,
        amount=products,
        formula=formula,
        in_backward=in_backward,
    )


def _list_attention(work: _Work) -> Iterator[StepPart]:
    """The products with the matrix of scores, and the scores where they are written down."""
    times = STORED_SCORES if work.writes_scores else FUSED_ATTENTION
    formula = f"{times} x {work.layers} layers x {work.attention_formula}"
    yield StepPart(
        name="attention",
        bound=COMPUTE,
        amount=times * work.layers * work.attention_flops,
        formula=formula,
        in_backward=1 - 1 / times,
    )
    if work.writes_scores:
        # beside forward, backward reads the probabilities and their gradients, and writes those of the scores
        yield _move("attention's scores", work, work.layers, work.score_bytes * 5 // 2, 3 / 5)


def _move_logits(work: _Work) -> StepPart:
    """Forward reads the logits that the product has written; backward reads them again and writes their gradients."""
    num_bytes = 3 * work.outputs * work.element_bytes * work.shape.padded_vocab_size
    formula = f"{count(work.tokens)} tokens x {count(num_bytes)} bytes"
    return StepPart(
        name="loss",
        bound=MEMORY,
        amount=work.tokens * num_bytes,
        formula=formula,
        in_backward=2 / 3,
    )


def _list_recomputed(work: _Work) -> Iterator[StepPart]:
    """List what is computed again, which takes time, but is no part of the FLOPs by which utilization is counted."""
    again = work.recomputed
    selective = work.writes_scores and work.plan.args.model.recompute_granularity == "selective"
    attended = work.layers if selective else again
    # torch.utils.checkpoint stops when it has what backward needs: fc2's result only if a dropout follows
    linear = work.linear_flops
    if not work.shape.hidden_dropout:
        linear -= 2 * work.tokens * work.shape.ffn_hidden_size * work.shape.hidden_size
    further_again = min(work.plan.further_expert_layers, work.plan.recomputed_further_layers)
    with_experts = count_recomputed_experts(work.plan) + further_again
    # of experts backward needs the result, too
    flops = (again - with_experts) * linear + with_experts * work.expert_flops
    weights = flops // max(again, 1) // (2 * work.tokens)
    formula = f"{again} layers x 2 x {count(work.tokens)} tokens x {count(weights)} weights"
    # with a few layers in 16 bits, which of them are computed again makes no difference worth a row
    yield StepPart(
        name="recomputed products",
        bound=FP8 if work.fp8_share else COMPUTE,
        amount=flops,
        formula=formula,
        in_backward=1.0,
    )
    formula = f"{attended} layers x {work.attention_formula}"
    yield StepPart(
        name="recomputed attention",
        bound=COMPUTE,
        amount=attended * work.attention_flops,
        formula=formula,
        in_backward=1.0,
    )
    if work.writes_scores:
        yield _move("recomputed scores", work, attended, work.score_bytes, 1.0)
    yield _move("recomputed norms, activations, dropout", work, again, work.forward_bytes, 1.0)


def _move(name: str, work: _Work, layers: int, num_bytes: int, in_backward: float) -> StepPart:
    """A part that memory bounds. num_bytes: for each token of one layer."""
    formula = f"{layers} layers x {count(work.tokens)} tokens x {count(num_bytes)} bytes"
    return StepPart(
        name=name,
        bound=MEMORY,
        amount=layers * work.tokens * num_bytes,
        formula=formula,
        in_backward=in_backward,
    )


def _update_weights(parameters: int, precision: str, gradient_bytes: int, optimizer: OptimizerArgs) -> StepPart:
    """Build the part of the update: a pass over the gradients for their norm, and one over the weights.

    The update reads and writes masters and moments and writes 16-bit weights: Adam in fp32 4 + 28, in fp16 2 + 28, in
    bf16 with fp32 gradients 4 + 30.
    """
    # Muon has one of matrices, which are nearly all
    moments = {"adam": 2, "muon": 1}.get(optimizer.optimizer, 1 if optimizer.sgd_momentum else 0)
    num_bytes = 2 * gradient_bytes + 2 * FP32 * (1 + moments)
    if precision != "fp32":
        num_bytes += 2
    formula = f"{count(parameters)} parameters x {count(num_bytes)} bytes"
    return StepPart(
        name=UPDATE,
        bound=MEMORY,
        amount=parameters * num_bytes,
        formula=formula,
        in_backward=0.0,
    )


# --- how long ranks need at least for what they exchange, and what of it computation cannot hide


def _time_layer_exchanges(
    exchanges: list[Exchange], members: dict[str, Members], processor: Processor, rates: dict[str, float]
) -> Iterator[TimeRow]:
    """A row for each group. Within a layer only the product that a rank computes meanwhile can hide an exchange."""
    for group, name in LAYER_GROUPS.items():
        ms = 0.0
        words = []
        for one in exchanges:
            if one.group != group:
                continue
            route = find_route(one.kind, members[group], processor)
            flop_s = rates[FP8 if one.in_fp8 else COMPUTE]
            if route is None or (one.hidden_flops and not flop_s):
                continue
            hidden_ms = 1000 * one.hidden_flops / flop_s if one.hidden_flops else 0.0
            exposed_ms = max(route.milliseconds(one.num_bytes) - hidden_ms, 0.0)
            ms += one.times * exposed_ms
            behind = f", each overlapped with a product of {hidden_ms:.2f} ms" if hidden_ms else ""
            words.append(f"{one.formula}, {route.words}{behind}")
        if words:
            yield TimeRow(
                name=name,
                ms=ms,
                bound=LINK,
                formula="; ".join(words),
            )


def _time_tied_embedding(
    exchanges: list[Exchange], members: dict[str, Members], processor: Processor
) -> Iterator[TimeRow]:
    """The sum of gradients of an embedding that the first and the last stage of a pipeline have."""
    for one in exchanges:
        if one.group != PIPELINE or one.kind != REDUCE:
            continue
        is_in_node = members[PIPELINE].nodes == 1
        ends = Members(ranks=2, near=2 if is_in_node else 1)
        route = find_route(REDUCE, ends, processor)
        if route is not None:
            yield TimeRow(
                name=TIED,
                ms=route.milliseconds(one.num_bytes),
                bound=LINK,
                formula=f"{one.formula}, {route.words}",
            )


def _time_state(
    plan: Plan, processor: Processor, exchanges: list[Exchange], forward_ms: float, backward_ms: float
) -> Iterator[TimeRow]:
    """Time what data and context parallel ranks exchange of gradients and weights.

    They do so for every micro-batch, or at the end of a step. Where ranks shard the model, each gets the sums of its
    share only, half of an all-reduce; forward hides the gathering at best. The word embedding's gradient is complete
    only when backward ends (tied or not): nothing is left to hide its reduction.
    """
    timed = _time_state_exchanges(plan, processor, exchanges)
    gradients = [one for one in timed if one.exchange.what in ("gradients", "gradients of experts")]
    if not gradients:
        return
    if plan.sharding is None:
        # experts' are averaged when backward has ended
        for one in gradients:
            if one.exchange.group == EXPERT_DATA:
                yield TimeRow(
                    name=EXPERT_REDUCTION,
                    ms=one.milliseconds,
                    bound=LINK,
                    formula=one.words,
                )
        gradients = [one for one in gradients if one.exchange.group == DATA]
    passes = plan.final_micro_batches
    gathered = [one for one in timed if one.exchange.kind == GATHER]
    if gathered and plan.sharding and plan.sharding.gathers_twice:
        yield _gather_each_pass(gathered, gradients, passes, forward_ms + backward_ms)
    elif gathered:
        yield from _gather_once(gathered, forward_ms / passes)
    if gradients:
        yield _reduce_gradients(plan, gradients, backward_ms / passes)


@dataclass(frozen=True)
class _TimedExchange:
    """An exchange of gradients or weights with its way."""

    exchange: Exchange
    route: Route

    @property
    def milliseconds(self) -> float:
        """Least time of one of these exchanges."""
        return self.route.milliseconds(self.exchange.num_bytes)

    @property
    def words(self) -> str:
        """The exchange in words, and the links that it goes over."""
        return f"{self.exchange.formula}, {self.route.words}"


def _time_state_exchanges(plan: Plan, processor: Processor, exchanges: list[Exchange]) -> list[_TimedExchange]:
    """The exchanges of gradients and weights whose way is known."""
    found = []
    for one in exchanges:
        if one.group not in (DATA, EXPERT_DATA):
            continue
        members = find_members(one.group, plan.layout, plan.sharding, plan.world)
        route = find_route(one.kind, members, processor)
        if route is not None:
            found.append(_TimedExchange(one, route))
    return found


def _gather_each_pass(
    gathered: list[_TimedExchange], gradients: list[_TimedExchange], passes: int, computed_ms: float
) -> TimeRow:
    """Weights that are gathered for every micro-batch, and gradients of all micro-batches but the last.

    Args:
        passes: Micro-batches.
        computed_ms: Forward and backward of all micro-batches.
    """
    ms = sum(one.exchange.times * one.milliseconds for one in gathered)
    ms += (passes - 1) * sum(one.milliseconds for one in gradients)
    what = "; ".join(one.exchange.formula for one in [*gathered, *gradients])
    formula = f"{what}: {ms:.2f} ms, forward and backward overlap {min(computed_ms, ms):.2f}"
    return TimeRow(
        name=GATHERING,
        ms=max(ms - computed_ms, 0.0),
        bound=LINK,
        formula=formula,
    )


def _gather_once(gathered: list[_TimedExchange], pass_ms: float) -> Iterator[TimeRow]:
    """Weights that are gathered once a step, which forward of one micro-batch hides, in `pass_ms` at best."""
    ms = sum(one.milliseconds for one in gathered)
    if ms > pass_ms:
        sent = "; ".join(one.words for one in gathered)
        formula = f"{sent}: {ms:.2f} ms; forward of one micro-batch takes {pass_ms:.2f} ms at best"
        yield TimeRow(
            name=GATHERING,
            ms=ms - pass_ms,
            bound=LINK,
            formula=formula,
        )


def _reduce_gradients(plan: Plan, gradients: list[_TimedExchange], pass_ms: float) -> TimeRow:
    """The reduction of gradients, which the last micro-batch's backward hides, in `pass_ms` at best."""
    each = gradient_bytes(plan.precision, plan.fp32_gradients) if plan.stage.is_first else 0
    embedding_bytes = each * plan.rank_shape.padded_vocab_size * plan.rank_shape.hidden_size
    whole_ms = sum(one.milliseconds for one in gradients)
    first = gradients[0]
    # where only experts have replicas, nobody reduces the embedding's
    embedding_ms = first.route.milliseconds(embedding_bytes) if first.exchange.group == DATA else 0.0
    if embedding_ms >= whole_ms - pass_ms:
        why = f"the word embedding's {embedding_bytes / 1e6:,.0f} MB are complete only when backward ends"
    else:
        why = f"backward of one micro-batch takes {pass_ms:.2f} ms at best"
    pieces = [f"{one.exchange.num_bytes / 1e9:.2f} GB of {one.exchange.what}, {one.route.words}" for one in gradients]
    in_all = f"{'; '.join(pieces)}: {whole_ms:.2f} ms"
    exposed_ms = max(embedding_ms, whole_ms - pass_ms)
    return TimeRow(
        name=f"{first.exchange.kind}, not overlapped",
        ms=exposed_ms,
        bound=LINK,
        formula=f"{in_all}; {why}",
    )


def _list_unknown_links(exchanges: list[Exchange], members: dict[str, Members], processor: Processor) -> Iterator[str]:
    """A line for each group whose exchange is not in the bound."""
    kinds = dict.fromkeys((one.group, one.kind) for one in exchanges)
    unknown = dict.fromkeys(group for group, kind in kinds if find_route(kind, members[group], processor) is None)
    for group in unknown:
        near = members[group].near
        nodes = members[group].nodes
        what = f"what {group} parallel ranks exchange"
        if group in (DATA, EXPERT_DATA):
            what = "the gradients" if group == DATA else "the gradients of experts"
        if nodes == 1 or near > 1 and find_route(SEND, Members(near, near), processor) is None:
            yield f"{processor.name}: no known speed between GPUs; not in the bound: {what}"
        else:
            yield f"{nodes} nodes: no known network of {processor.name}, --network N names it; not in the bound: {what}"


# --- how long training to a number of tokens takes, and how much arithmetic that is


@dataclass(frozen=True)
class Duration:
    """Length of a whole training, without evaluation, checkpoints and restarts."""

    tokens: int
    gpus: int
    tokens_per_s: float  # of all ranks: a prediction's bound, or what was measured
    flops_causal: int  # of all ranks; conventions as in step_flops
    flops_full: int
    flops_6nd: int  # 6 x parameters x tokens, all parameters counted (Hoffmann et al. 2022, Chinchilla, appendix F)

    @property
    def seconds(self) -> float:
        """Wall time in seconds."""
        return self.tokens / self.tokens_per_s

    @property
    def days(self) -> float:
        """Wall time in days."""
        return self.seconds / 3600 / 24

    @property
    def gpu_hours(self) -> float:
        """Wall time times GPUs, which clouds charge for."""
        return self.gpus * self.seconds / 3600


def compute_duration(shape: ModelShape, tokens: int, gpus: int, tokens_per_s: float) -> Duration:
    """Compute length and arithmetic of a training to so many tokens.

    Args:
        shape: The model.
        tokens: To train on.
        gpus: Of the whole job.
        tokens_per_s: Of all GPUs together.
    """
    return Duration(
        tokens=tokens,
        gpus=gpus,
        tokens_per_s=tokens_per_s,
        flops_causal=tokens * step_flops(shape, 1, causal=True) // shape.seq_length,
        flops_full=tokens * step_flops(shape, 1, causal=False) // shape.seq_length,
        flops_6nd=6 * count_parameters(shape) * tokens,
    )
