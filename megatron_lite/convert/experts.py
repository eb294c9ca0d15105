"""Mixtures of experts in both worlds: their tensors, and their part of config.json.

There each expert has tensors of its own; here one tensor holds all experts' matrices, one below the other.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from megatron_lite.config.shape import ExpertShape
from megatron_lite.convert.config_file import ConfigFile
from megatron_lite.convert.mappings import GATED_HALVES, SAME, Link, lay_out_stack

# values of ExpertKeys.layers
EVERY_LAYER = "every layer"
BY_PATTERN = "by a pattern"
LATE_LAYERS = "late layers"
# values of ExpertKeys.shares
OF_CHOSEN = "a softmax over a token's experts (no --moe-router-pre-softmax)"
OF_ALL = "--moe-router-pre-softmax"
EITHER_SOFTMAX = "a softmax"
SIGMOID = "--moe-router-score-function sigmoid"
AUX_LOSS = "aux_loss"
SEQ_AUX_LOSS = "seq_aux_loss"
SHARED_GATE = "--moe-shared-expert-gate"


@dataclass(frozen=True)
class ExpertKeys:
    """Names and limits of experts in one architecture; numbers are of keys that config.json leaves out."""

    number: int
    topk: int
    width: int
    number_key: str = "num_experts"
    width_key: str = "moe_intermediate_size"
    layers: str = BY_PATTERN  # which have experts
    shares: str = EITHER_SOFTMAX  # of which scores a token's experts are weighed by
    shared: str | None = None  # module of the expert that all tokens pass; None: there is none
    shared_has_gate: bool = False
    scales: bool = False  # shares may be multiplied by a factor
    group_scores: int | None = None  # experts by whose scores a group is ranked; None: there are no groups
    has_bias: bool = False  # scores have a bias where experts are chosen
    router_dtype: str | None = None  # in which it computes; None: that of the weights
    block: str = "mlp"  # module of a layer
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")  # of one expert


MIXTRAL = ExpertKeys(
    number=8,
    topk=2,
    width=14336,
    number_key="num_local_experts",
    width_key="intermediate_size",
    layers=EVERY_LAYER,
    shares=OF_CHOSEN,
    block="block_sparse_moe",
    projections=("w1", "w3", "w2"),
)
QWEN3 = ExpertKeys(number=128, topk=8, width=768)
QWEN2 = ExpertKeys(number=60, topk=4, width=1408, shared="shared_expert", shared_has_gate=True)
DEEPSEEK_V2 = ExpertKeys(
    number=64,
    topk=6,
    width=1407,
    number_key="n_routed_experts",
    layers=LATE_LAYERS,
    shares=OF_ALL,
    shared="shared_experts",
    scales=True,
    group_scores=1,
    router_dtype="fp32",
)
DEEPSEEK_V3 = replace(
    DEEPSEEK_V2, number=256, topk=8, width=2048, shares=SIGMOID, group_scores=2, has_bias=True
)  # fmt: skip


# --- ours to theirs


def list_objections(e: ExpertShape, keys: ExpertKeys) -> Iterator[tuple[str, str]]:
    """List what experts of an architecture cannot be: a flag, and what they have instead.

    Args:
        e: The model's experts.
        keys: Keys of their architecture.
    """
    if keys.layers == EVERY_LAYER and not all(e.layers):
        yield "--moe-layer-freq", "experts in every layer"
    if keys.layers == LATE_LAYERS and list(e.layers) != sorted(e.layers):
        yield "--moe-layer-freq", "experts in each layer from one on"
    found = _describe_shares(e)
    if found != keys.shares and not (keys.shares == EITHER_SOFTMAX and found != SIGMOID):
        yield found, keys.shares
    if e.scaling_factor not in (None, 1.0) and not keys.scales:
        yield f"--moe-router-topk-scaling-factor {e.scaling_factor:g}", "shares that are not multiplied"
    if e.groups is not None and e.group_topk is not None and e.topk // e.group_topk != keys.group_scores:
        ranked = f"groups that are ranked by their best {keys.group_scores} of experts, --moe-router-topk / this"
        yield f"--moe-router-group-topk {e.group_topk}", "no groups" if keys.group_scores is None else ranked
    if e.expert_bias and not keys.has_bias:
        yield "--moe-router-enable-expert-bias", "no such bias"
    yield from _list_shared_objections(e, keys)
    if e.capacity_factor is not None:
        yield f"--moe-expert-capacity-factor {e.capacity_factor:g}", "experts that drop no token"
    if e.sinkhorn:
        yield "--moe-router-load-balancing-type sinkhorn", "experts that scores choose"
    if e.forced_balance:
        yield "--moe-router-force-load-balancing", "experts that scores choose"
    if e.probs_on_input:
        yield "--moe-apply-probs-on-input", "experts whose outputs are weighed"


def _describe_shares(e: ExpertShape) -> str:
    """Name the scores that a token's experts are weighed by: a value of ExpertKeys.shares."""
    if e.score_function == "sigmoid":
        return SIGMOID
    return OF_ALL if e.pre_softmax else OF_CHOSEN


def _list_shared_objections(e: ExpertShape, keys: ExpertKeys) -> Iterator[tuple[str, str]]:
    """List what the expert that all tokens pass cannot be.

    Args:
        e: The model's experts.
        keys: Keys of their architecture.
    """
    width = e.shared_ffn_hidden_size
    flag = f"--moe-shared-expert-intermediate-size {width}"
    if not width:
        if keys.shared is not None:
            yield "--num-experts without --moe-shared-expert-intermediate-size", "a shared expert"
    elif keys.shared is None:
        yield flag, "no shared expert"
    elif e.shared_gate != keys.shared_has_gate:
        yield (SHARED_GATE, "none") if e.shared_gate else (f"{flag} without {SHARED_GATE}", "that gate")
    elif not keys.shared_has_gate and width % e.ffn_hidden_size:
        yield flag, f"a multiple of one expert's width, {e.ffn_hidden_size}"


def complete(e: ExpertShape, keys: ExpertKeys) -> ExpertShape:
    """Add all that each expert of an architecture has: a bias, which is zeros where ours has none.

    Args:
        e: The model's experts.
        keys: Keys of their architecture.
    """
    return replace(e, expert_bias=e.expert_bias or keys.has_bias)


def list_notes(e: ExpertShape, keys: ExpertKeys) -> Iterator[str]:
    """Note what config.json does not have, and what matters in training only.

    Args:
        e: The model's experts.
        keys: Keys of their architecture.
    """
    written = _find_loss(e, keys)
    for kind, coeff in e.balancing:
        if (kind, coeff) != written:
            yield f"--moe-aux-loss-coeff {coeff:g} of {kind}: has no place there, and matters in training only"
    if e.z_loss_coeff:
        yield f"--moe-z-loss-coeff {e.z_loss_coeff:g}: has no place there, and matters in training only"
    if e.input_jitter:
        yield f"--moe-input-jitter-eps {e.input_jitter:g}: has no place there, and matters in training only"
    if keys.has_bias and not e.expert_bias:
        yield "--moe-router-enable-expert-bias is not given: they all have that bias; it is written as zeros"
    if e.router_dtype != keys.router_dtype:
        theirs = keys.router_dtype or "the weights' precision"
        yield f"--moe-router-dtype {e.router_dtype or 'left out'}: transformers routes tokens in {theirs}"


def list_links(ours: str, theirs: str, e: ExpertShape, keys: ExpertKeys) -> Iterator[Link]:
    """Parameters of one layer's experts.

    Args:
        ours: What names of the layer's parameters begin with here.
        theirs: Beginning of the layer's names there.
        e: The experts.
        keys: Keys of their architecture.
    """
    ours = f"{ours}mlp."
    theirs = f"{theirs}{keys.block}."
    gate, up, down = keys.projections
    each = [f"{theirs}experts.{number}." for number in range(e.number)]
    gated = tuple(f"{expert}{part}.weight" for expert in each for part in (gate, up))
    yield Link(f"{ours}router.weight", (f"{theirs}gate.weight",), SAME)
    if e.expert_bias:
        bias = (f"{theirs}gate.e_score_correction_bias",)
        yield Link(f"{ours}router.expert_bias", bias, SAME, dtype=torch.float32)
    yield Link(f"{ours}experts.linear_fc1.weight", gated, lay_out_stack(2 * e.number))
    yield Link(
        f"{ours}experts.linear_fc2.weight", tuple(f"{expert}{down}.weight" for expert in each), lay_out_stack(e.number)
    )
    if e.shared_ffn_hidden_size:
        shared = f"{theirs}{keys.shared}."
        halves = (f"{shared}gate_proj.weight", f"{shared}up_proj.weight")
        yield Link(f"{ours}shared_experts.linear_fc1.weight", halves, GATED_HALVES)
        yield Link(f"{ours}shared_experts.linear_fc2.weight", (f"{shared}down_proj.weight",), SAME)
    if e.shared_gate:
        yield Link(f"{ours}shared_experts.gate_weight", (f"{theirs}shared_expert_gate.weight",), SAME)


def build_experts(e: ExpertShape, keys: ExpertKeys) -> dict[str, object]:
    """Make config.json's part on experts.

    Args:
        e: The model's experts.
        keys: Keys of their architecture.
    """
    kind, coeff = _find_loss(e, keys) or (None, 0.0)
    values: dict[str, object] = {
        keys.number_key: e.number,
        "num_experts_per_tok": e.topk,
        keys.width_key: e.ffn_hidden_size,
        "output_router_logits": False,
    }
    if keys.layers == BY_PATTERN:
        values["decoder_sparse_step"] = 1
        values["mlp_only_layers"] = [layer for layer, has_experts in enumerate(e.layers) if not has_experts]
    if keys.layers == EVERY_LAYER:
        values["router_jitter_noise"] = 0.0
    if keys.layers != LATE_LAYERS:
        values["router_aux_loss_coef"] = coeff
    if keys.shares == EITHER_SOFTMAX:
        values["norm_topk_prob"] = not e.pre_softmax
    if keys.shared_has_gate:
        values["shared_expert_intermediate_size"] = e.shared_ffn_hidden_size
    if keys.layers == LATE_LAYERS:
        values |= _build_deepseek(e, keys)
        values |= {"aux_loss_alpha": coeff, "seq_aux": kind != AUX_LOSS}
    return values


def _build_deepseek(e: ExpertShape, keys: ExpertKeys) -> dict[str, object]:
    """Make the part that only DeepSeek's have. Programs other than transformers read scoring_func and topk_method.

    Args:
        e: The model's experts.
        keys: Keys of their architecture.
    """
    is_sigmoid = keys.shares == SIGMOID
    greedy = "greedy" if e.groups is None else "group_limited_greedy"
    return {
        "n_shared_experts": e.shared_ffn_hidden_size // e.ffn_hidden_size,
        "first_k_dense_replace": e.layers.count(False),
        "moe_layer_freq": 1,
        "routed_scaling_factor": 1.0 if e.scaling_factor is None else e.scaling_factor,
        "n_group": e.groups or 1,
        "topk_group": e.group_topk or 1,
        "norm_topk_prob": is_sigmoid and e.topk > 1,
        "scoring_func": "sigmoid" if is_sigmoid else "softmax",
        "topk_method": "noaux_tc" if is_sigmoid else greedy,
    }


def _find_loss(e: ExpertShape, keys: ExpertKeys) -> tuple[str, float] | None:
    """The kind and the coefficient of the one loss that config.json has a place for; None if there is none.

    Args:
        e: The model's experts.
        keys: Keys of their architecture.
    """
    known = (AUX_LOSS, SEQ_AUX_LOSS) if keys.layers == LATE_LAYERS else (AUX_LOSS,)
    return next((loss for loss in e.balancing if loss[0] in known), None)


# --- theirs to ours

# keys that would change what experts compute, and values that do not, of architectures that do not have them
FOREIGN: dict[str, tuple[object, ...]] = {
    "n_group": (None, 1),
    "topk_group": (None, 1),
    "routed_scaling_factor": (None, 1.0),
    "scoring_func": (None, "softmax"),
    "n_shared_experts": (None, 0),
    "first_k_dense_replace": (None, 0),
}


def read_experts(config: ConfigFile, keys: ExpertKeys, num_layers: int) -> ExpertShape | None:
    """Read the experts of a config.json; None if no layer has any.

    Args:
        config: Config of the model.
        keys: Keys of its architecture.
        num_layers: Number of layers of the model.

    Raises:
        CheckpointError: A value does not exist here.
    """
    layers = _read_layers(config, keys, num_layers)
    if not any(layers):
        return None
    # versions of transformers write the one or the other
    number_key = keys.number_key if keys.number_key in config.values else "num_local_experts"
    number = config.whole(number_key, keys.number)
    topk = config.whole("num_experts_per_tok", keys.topk)
    if topk > number:
        raise config.wrong("num_experts_per_tok", topk, f"must be at most {number_key}, which is {number}")
    experts = ExpertShape(
        number=number,
        layers=tuple(layers),
        topk=topk,
        ffn_hidden_size=config.whole(keys.width_key, keys.width),
        router_dtype=keys.router_dtype,
        expert_bias=keys.has_bias,
    )
    # transformers has it in training only, with output_router_logits; here the flag decides that is printed
    config.switch("output_router_logits", False)
    config.refuse_unless("router_jitter_noise", (0.0, None), "tokens are not multiplied by noise here")
    if keys.layers == LATE_LAYERS:
        return _read_deepseek(config, keys, experts)
    for key, allowed in FOREIGN.items():
        config.refuse_unless(key, allowed, "experts of this architecture have no such thing")
    experts = replace(experts, pre_softmax=not _read_normalization(config, keys, topk))
    if keys.shared_has_gate:
        width = config.whole("shared_expert_intermediate_size", 5632)
        experts = replace(experts, shared_ffn_hidden_size=width, shared_gate=True)
    else:
        config.refuse_unless("shared_expert_intermediate_size", (None, 0), "this architecture has no shared expert")
    coeff = config.number("router_aux_loss_coef", 0.001)
    return replace(experts, balancing=((AUX_LOSS, coeff),) if coeff else ())


def _read_layers(config: ConfigFile, keys: ExpertKeys, num_layers: int) -> list[bool]:
    """Whether each layer has experts.

    Args:
        config: Config of the model.
        keys: Keys of its architecture.
        num_layers: Number of layers of the model.

    Raises:
        CheckpointError: The pattern of layers is none that exists here.
    """
    if keys.layers == LATE_LAYERS:
        config.refuse_unless(
            "moe_layer_freq", (1, None), "experts are in each layer from first_k_dense_replace on here"
        )
        first = config.get("first_k_dense_replace", 0)
        if first != 0:
            first = config.whole("first_k_dense_replace")
        return [layer >= first for layer in range(num_layers)]
    if keys.layers == EVERY_LAYER:
        return [True] * num_layers
    step = config.whole("decoder_sparse_step", 1)
    dense = config.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(isinstance(one, bool) or not isinstance(one, int) for one in dense):
        raise config.wrong("mlp_only_layers", dense, "must be a list of layers")
    without = set(dense)
    return [layer not in without and (layer + 1) % step == 0 for layer in range(num_layers)]


def _read_normalization(config: ConfigFile, keys: ExpertKeys, topk: int) -> bool:
    """Whether a token's shares add up to 1.

    Args:
        config: Config of the model.
        keys: Keys of its architecture.
        topk: Experts of a token.

    Raises:
        CheckpointError: A token has one expert, whose share would always be 1, or the architecture does otherwise.
    """
    normalizes = keys.shares == OF_CHOSEN
    if keys.shares == EITHER_SOFTMAX:
        normalizes = config.switch("norm_topk_prob", False)
    else:
        config.refuse_unless("norm_topk_prob", (True, None), "a token's shares always add up to 1 here")
    if normalizes and topk == 1:
        raise config.wrong("num_experts_per_tok", 1, "the one expert's share would always be 1")
    return normalizes


def _read_deepseek(config: ConfigFile, keys: ExpertKeys, experts: ExpertShape) -> ExpertShape:
    """Add what only DeepSeek's have.

    Args:
        config: Config of the model.
        keys: Keys of its architecture.
        experts: What is known so far.

    Raises:
        CheckpointError: A value does not exist here.
    """
    is_sigmoid = keys.shares == SIGMOID
    normalizes = is_sigmoid and experts.topk > 1
    if config.switch("norm_topk_prob", is_sigmoid) != normalizes:
        sums = "shares of several experts add up to 1 here" if is_sigmoid else "shares do not add up to 1 here"
        raise config.wrong("norm_topk_prob", not normalizes, sums)
    config.refuse_unless("scoring_func", ("sigmoid" if is_sigmoid else "softmax", None), "is another architecture's")
    methods = ("noaux_tc",) if is_sigmoid else ("greedy", "group_limited_greedy")
    config.refuse_unless("topk_method", (*methods, None), f"only {', '.join(methods)} exist here")
    groups, chosen = _read_groups(config, keys, experts)
    factor = config.number("routed_scaling_factor", 2.5 if is_sigmoid else 1.0)
    alpha = config.number("aux_loss_alpha", 0.0)
    kind = SEQ_AUX_LOSS if config.switch("seq_aux", True) else AUX_LOSS
    return replace(
        experts,
        score_function="sigmoid" if is_sigmoid else "softmax",
        pre_softmax=not is_sigmoid,
        groups=groups,
        group_topk=chosen,
        scaling_factor=None if factor == 1 else factor,
        shared_ffn_hidden_size=experts.ffn_hidden_size * config.whole("n_shared_experts", 1 if is_sigmoid else 2),
        balancing=((kind, alpha),) if alpha else (),
    )


def _read_groups(config: ConfigFile, keys: ExpertKeys, experts: ExpertShape) -> tuple[int | None, int | None]:
    """The number of groups of experts and of those that a token's come from; None, None where all are in one.

    Args:
        config: Config of the model.
        keys: Keys of its architecture.
        experts: What is known so far.

    Raises:
        CheckpointError: There are no such groups, or they are ranked in another way.
    """
    is_sigmoid = keys.shares == SIGMOID
    if not is_sigmoid and config.get("topk_method", "greedy") in ("greedy", None):
        return None, None
    groups = config.whole("n_group", 8) if is_sigmoid else config.whole("n_group")
    chosen = config.whole("topk_group", 4) if is_sigmoid else config.whole("topk_group")
    if groups == 1 and chosen == 1:
        return None, None
    if experts.number % groups:
        raise config.wrong("n_group", groups, f"must divide n_routed_experts, which is {experts.number}")
    if chosen > groups:
        raise config.wrong("topk_group", chosen, f"must be at most n_group, which is {groups}")
    if experts.topk > chosen * (experts.number // groups) or experts.topk // chosen != keys.group_scores:
        own = "num_experts_per_tok / topk_group"
        ranked = f"groups are ranked by the best {own} here, as in Megatron-Core, there by {keys.group_scores}"
        raise config.wrong("topk_group", chosen, ranked)
    return groups, chosen
