"""Memory of a layer of experts in closed form, if each expert gets as many tokens (expert_load.py).

Sums of the tensors of model/experts.py and parallel/expert_parallel.py. Bytes are for each token of a micro-batch, as
in memory.py: where ranks share out the tokens, a rank routes only its own.

Letters: H hidden, F width of an expert, K experts of a token, E experts.
"""

from collections import Counter
from collections.abc import Iterator

from megatron_lite.config.shape import ExpertShape
from megatron_lite.planner.expert_load import ExpertLoad
from megatron_lite.planner.micro_batch import MicroBatch
from megatron_lite.planner.state_size import FP32, INT64

# rows of a ledger
LINEAR_INPUTS = "inputs of linear layers"
ROUTES = "routes of tokens"
EXPERT_INPUTS = "inputs of experts"
EXPERT_MLP = "experts' activation function"
SHARED_MLP = "activation function of the shared expert"
EXCHANGED = "tokens on their way to experts and back"
ROUTER_BYTES = {None: 0, "fp32": 4, "fp64": 8}  # of one number, where a router converts its input
# tensors of F that an activation function keeps, without its result: a gated one keeps both halves and silu's result
KEPT_BY_ACTIVATION = {"swiglu": 3, "squared_relu": 1}


def keep_experts(batch: MicroBatch) -> Counter[str]:
    """List what a layer of experts keeps in the place of an MLP, its input among it."""
    e, _ = _get_experts(batch)
    inner_bytes = _measure_rows(batch, _count_inner_width(batch, e))
    held = _keep_routes(batch)
    held[EXPERT_INPUTS] = _keep_inputs(batch, e)
    held[EXPERT_MLP] = inner_bytes - _count_saved_rows(batch, e.ffn_hidden_size)
    held.update(_keep_shared_expert(batch))
    return held


def _keep_routes(batch: MicroBatch) -> Counter[str]:
    """List what a router keeps: its input, and which experts take which tokens."""
    e, load = _get_experts(batch)
    width = ROUTER_BYTES[e.router_dtype]
    converts = width not in (0, batch.element_bytes)
    routes = _measure_routes(batch, e, load)
    inputs = batch.input_bytes
    if converts:
        routes += width * batch.shape.hidden_size // batch.shares
        if not e.shared_ffn_hidden_size:
            # the router keeps what it converted, and nobody else its input but an expert that all tokens pass
            inputs = 0
    return Counter({LINEAR_INPUTS: inputs, ROUTES: routes})


def _keep_shared_expert(batch: MicroBatch) -> Counter[str]:
    """List what the expert that all tokens pass keeps beside its input; nothing where there is no such expert."""
    e, _ = _get_experts(batch)
    width = e.shared_ffn_hidden_size
    if not width:
        return Counter()
    kept = KEPT_BY_ACTIVATION.get(batch.shape.activation, 1) + 1
    num_bytes = batch.element_bytes * kept * width
    num_bytes -= batch.count_fp8_savings(width)
    if e.shared_gate:
        num_bytes += batch.input_bytes
    # in fp8, beside the router's input
    input_copy = batch.count_fp8_copy(batch.shape.hidden_size) // batch.shares
    return Counter({SHARED_MLP: num_bytes, LINEAR_INPUTS: input_copy})


def _get_experts(batch: MicroBatch) -> tuple[ExpertShape, ExpertLoad]:
    e = batch.shape.experts
    load = batch.load
    assert e is not None and load is not None, "the micro-batch of a model with experts"
    return e, load


def _keep_inputs(batch: MicroBatch, e: ExpertShape) -> int:
    """Bytes of what experts keep of their inputs.

    A CPU's keep tokens as they came, from other ranks or from the layer; others the row of each assignment.
    """
    hidden = batch.shape.hidden_size
    if batch.on_cpu:
        return _measure_tokens(batch)
    copies = 2 if e.probs_on_input else 1
    return _measure_rows(batch, copies * hidden) - _count_saved_rows(batch, hidden)


def _measure_tokens(batch: MicroBatch) -> int:
    """Bytes of the tokens that experts are given, as they came from other ranks; without any the layer's own."""
    _, load = _get_experts(batch)
    if load.sends:
        return _measure_rows(batch, batch.shape.hidden_size)
    return _measure_gathered(batch) or batch.input_bytes


def _count_inner_width(batch: MicroBatch, e: ExpertShape) -> int:
    """Channels that an expert keeps for each assignment between its matrices.

    A CPU's keep what the first matrix gives and what the second is given. Others keep what their activation function
    does, its result, and that result weighed by the expert's share.
    """
    shape = batch.shape
    width = e.ffn_hidden_size
    if batch.on_cpu:
        return shape.count_fc1_rows(width) + width
    weighed = 0 if e.probs_on_input else 1
    return (KEPT_BY_ACTIVATION.get(shape.activation, 1) + 1 + weighed) * width


def _measure_rows(batch: MicroBatch, width: int) -> int:
    """Bytes of a tensor of this width with a row for each assignment that this rank's experts compute."""
    _, load = _get_experts(batch)
    return int(batch.element_bytes * width * load.rows) // batch.shares


def _count_saved_rows(batch: MicroBatch, width: int) -> int:
    """Bytes by which linear layers of experts keep less of inputs of this width, where they multiply in fp8."""
    _, load = _get_experts(batch)
    return int(batch.count_fp8_savings(width) * load.rows) // batch.shares


def _measure_gathered(batch: MicroBatch) -> int:
    """Bytes of the hidden states of all ranks that have experts, where they are gathered."""
    _, load = _get_experts(batch)
    return int(batch.input_bytes * load.gathered)


def _measure_routes(batch: MicroBatch, e: ExpertShape, load: ExpertLoad) -> int:
    """Scores of each token, and the numbers of tokens and places in the order of experts."""
    width = max(ROUTER_BYTES[e.router_dtype], batch.element_bytes)
    scores = 0
    if e.pre_softmax or e.score_function == "sigmoid":
        scores += FP32 * e.number
    if e.balancing:
        scores += FP32 * e.number
    if e.z_loss_coeff is not None:
        scores += width * e.number
    chosen = (INT64 + FP32 + width) * e.topk
    orders = 3 if load.sends else 2
    return int(scores + chosen + orders * INT64 * load.rows) // batch.shares


def list_expert_peaks(batch: MicroBatch, stream: int, kept: Counter[str]) -> Iterator[tuple[str, Counter[str], int]]:
    """List (operation, what a layer holds there, elements of weights whose gradients are new) of its backward.

    Args:
        stream: Bytes of gradients of hidden states.
        kept: What the layer's forward keeps.
    """
    hidden = _measure_rows(batch, batch.shape.hidden_size)
    gathered = _measure_gathered(batch)
    # gradients on their way to experts: all ranks' and this rank's rows of them, or rows before and after
    coming = max(gathered + hidden, 2 * hidden)
    yield "combine", _hold(kept, stream + coming), 0
    if batch.on_cpu:
        yield from _list_peaks_one_by_one(batch, stream, kept)
    else:
        yield from _list_peaks_at_once(batch, stream, kept)
    if gathered:
        outside = kept - Counter({EXPERT_MLP: kept[EXPERT_MLP], EXPERT_INPUTS: kept[EXPERT_INPUTS]})
        yield "dispatch", _hold(outside, stream + gathered + hidden), sum(count_expert_weights(batch))


def _list_peaks_at_once(batch: MicroBatch, stream: int, kept: Counter[str]) -> Iterator[tuple[str, Counter[str], int]]:
    """List the peaks of experts' operations where each is for all experts at once."""
    e, load = _get_experts(batch)
    hidden = _measure_rows(batch, batch.shape.hidden_size)
    inner = _measure_rows(batch, e.ffn_hidden_size)
    first, second = count_expert_weights(batch)
    quantized = int(batch.count_fp8_gradients(batch.shape.hidden_size) * load.rows) // batch.shares
    yield "experts.linear_fc2", _hold(kept, stream + hidden + inner + quantized), second
    # what linear_fc2 has used is gone
    used = 0 if e.probs_on_input else inner - _count_saved_rows(batch, e.ffn_hidden_size)
    weighed = kept - Counter({EXPERT_MLP: used})
    yield "experts.activation", _hold(weighed, stream + 3 * inner), second
    inputs = kept - Counter({EXPERT_MLP: kept[EXPERT_MLP]})
    rows = _measure_rows(batch, batch.shape.count_fc1_rows(e.ffn_hidden_size))
    yield "experts.linear_fc1", _hold(inputs, stream + hidden + rows), first + second


# tensors of F of one expert at once in backward: gradients, and what is computed again
INNER_ONE_BY_ONE = 8


def _list_peaks_one_by_one(
    batch: MicroBatch, stream: int, kept: Counter[str]
) -> Iterator[tuple[str, Counter[str], int]]:
    """List the peaks where experts come one after the other, and second matrices last (cpu_kernels/experts.py)."""
    e, _ = _get_experts(batch)
    first, second = count_expert_weights(batch)
    inner = _measure_rows(batch, e.ffn_hidden_size)
    of_tokens = _measure_tokens(batch)
    of_one = INNER_ONE_BY_ONE * inner // e.local_number
    yield "experts.linear_fc1", _hold(kept, stream + of_tokens + of_one), first
    rows = _measure_rows(batch, batch.shape.count_fc1_rows(e.ffn_hidden_size))
    left = kept - Counter({EXPERT_MLP: rows})
    yield "experts.linear_fc2", _hold(left, stream + of_tokens), first + second


def _hold(kept: Counter[str], gradients: int) -> Counter[str]:
    """Add to what a layer keeps bytes of gradients of activations."""
    return kept + Counter({"gradients of activations": gradients})


def count_expert_weights(batch: MicroBatch) -> tuple[int, int]:
    """Elements of both matrices of a layer's experts on this rank."""
    e, _ = _get_experts(batch)
    columns = e.local_number * batch.shape.hidden_size
    first = columns * batch.shape.count_fc1_rows(e.ffn_hidden_size)
    second = columns * e.ffn_hidden_size
    return first, second


def measure_exchanged(batch: MicroBatch) -> int:
    """Bytes that a layer's forward holds when experts are done, besides what it keeps.

    They are tokens and results of each way.
    """
    _, load = _get_experts(batch)
    hidden = _measure_rows(batch, batch.shape.hidden_size)
    if load.sends:
        # rows that have come, what experts give for them, and that in the order of ranks
        return 3 * hidden
    if load.gathered:
        return 2 * _measure_gathered(batch) + max(hidden, batch.input_bytes)
    return hidden + batch.input_bytes
