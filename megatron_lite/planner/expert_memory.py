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
ROUTES = "routes of tokens"
EXPERT_INPUTS = "inputs of experts"
EXPERT_MLP = "experts' activation function"
EXPERT_RESULTS = "results of experts"
SHARED_MLP = "activation function of the shared expert"
EXCHANGED = "tokens on their way to experts and back"
ROUTER_BYTES = {None: 0, "fp32": 4, "fp64": 8}  # of one number, where a router converts its input
# tensors of F that an activation function keeps, without its result: a gated one keeps both halves and silu's result
KEPT_BY_ACTIVATION = {"swiglu": 3, "squared_relu": 1}


def keep_experts(batch: MicroBatch) -> Counter[str]:
    """What a layer of experts keeps in the place of an MLP, its input among it."""
    e, load = _get_experts(batch)
    shape = batch.shape
    each = batch.element_bytes
    held = Counter[str]()
    width = ROUTER_BYTES[e.router_dtype]
    converts = width not in (0, each)
    # a router that converts its input keeps what it converted, and nobody else the input but an expert that all pass
    held["inputs of linear layers"] = 0
    if not converts or e.shared_ffn_hidden_size:
        held["inputs of linear layers"] = batch.input_bytes
    held[ROUTES] = _measure_routes(batch, e, load)
    if converts:
        held[ROUTES] += width * shape.hidden_size // batch.shares
    inputs = 2 if e.probs_on_input else 1
    held[EXPERT_INPUTS] = _measure_rows(batch, inputs * shape.hidden_size)
    held[EXPERT_RESULTS] = _measure_rows(batch, _count_results(load) * shape.hidden_size)
    held[EXPERT_MLP] = _measure_rows(batch, count_inner(batch) * e.ffn_hidden_size)
    held[EXPERT_INPUTS] -= _count_saved_rows(batch, shape.hidden_size)
    held[EXPERT_MLP] -= _count_saved_rows(batch, e.ffn_hidden_size)
    if e.shared_ffn_hidden_size:
        kept = KEPT_BY_ACTIVATION.get(shape.activation, 1) + 1
        held[SHARED_MLP] = each * kept * e.shared_ffn_hidden_size
        if e.shared_gate:
            held[SHARED_MLP] += batch.input_bytes
        held[SHARED_MLP] -= batch.count_fp8_savings(e.shared_ffn_hidden_size)
        # beside the router's
        held["inputs of linear layers"] += batch.count_fp8_copy(shape.hidden_size) // batch.shares
    return held


def _get_experts(batch: MicroBatch) -> tuple[ExpertShape, ExpertLoad]:
    e = batch.shape.experts
    load = batch.load
    assert e is not None and load is not None, "the micro-batch of a model with experts"
    return e, load


def _count_results(load: ExpertLoad) -> int:
    """Tensors of what experts give that are kept: torch keeps what index_add and index_copy put in their places."""
    return 2 if load.sends else 1


def count_inner(batch: MicroBatch) -> int:
    """Tensors of F that an expert keeps.

    They are of its activation function, the result of this, and that result weighed by the expert's share.
    """
    e, _ = _get_experts(batch)
    weighed = 0 if e.probs_on_input else 1
    return KEPT_BY_ACTIVATION.get(batch.shape.activation, 1) + 1 + weighed


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
    """(operation, what the layer holds there, elements of weights whose gradients are new) of a layer's backward.

    Args:
        stream: Bytes of gradients of hidden states.
        kept: What the layer's forward keeps.
    """
    e, load = _get_experts(batch)
    hidden = _measure_rows(batch, batch.shape.hidden_size)
    inner = _measure_rows(batch, e.ffn_hidden_size)
    gathered = _measure_gathered(batch)
    first, second = count_expert_weights(batch)
    # gradients on their way to experts: all ranks' and this rank's rows of them, or rows before and after
    coming = max(gathered + hidden, 2 * hidden)
    yield "combine", _hold(kept, stream + coming), 0
    kept = kept - Counter({EXPERT_RESULTS: kept[EXPERT_RESULTS]})
    quantized = int(batch.count_fp8_gradients(batch.shape.hidden_size) * load.rows) // batch.shares
    yield "experts.linear_fc2", _hold(kept, stream + hidden + inner + quantized), second
    # what linear_fc2 has used is gone
    used = 0 if e.probs_on_input else inner - _count_saved_rows(batch, e.ffn_hidden_size)
    weighed = kept - Counter({EXPERT_MLP: used})
    yield "experts.activation", _hold(weighed, stream + 3 * inner), second
    inputs = kept - Counter({EXPERT_MLP: kept[EXPERT_MLP]})
    rows = _measure_rows(batch, batch.shape.count_fc1_rows(e.ffn_hidden_size))
    yield "experts.linear_fc1", _hold(inputs, stream + hidden + rows), first + second
    if gathered:
        outside = inputs - Counter({EXPERT_INPUTS: kept[EXPERT_INPUTS]})
        yield "dispatch", _hold(outside, stream + gathered + hidden), first + second


def _hold(kept: Counter[str], gradients: int) -> Counter[str]:
    """What a layer holds: what it kept, and bytes of gradients of activations."""
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
        # rows that leave, that have come, and what experts give in the order of ranks
        return 3 * hidden + 2 * batch.input_bytes
    if load.gathered:
        return 2 * _measure_gathered(batch) + batch.input_bytes
    return 2 * batch.input_bytes
