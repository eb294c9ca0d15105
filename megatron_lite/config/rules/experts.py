"""Rules for the flags of a mixture of experts."""

from collections.abc import Iterator

from megatron_lite.config.args import Args, ExpertArgs, ParallelArgs
from megatron_lite.config.expert_layers import parse_expert_layers
from megatron_lite.config.shape import BALANCING_KINDS, GLOBAL_AUX_LOSS, SINKHORN
from megatron_lite.config.world import World
from megatron_lite.pipeline_schedule import ZERO_BUBBLE


def expert_rules(args: Args, world: World) -> Iterator[str]:
    """Mistakes among the flags of experts."""
    e = args.experts
    p = args.parallel
    if e.num_experts is None:
        if p.expert_model_parallel_size > 1:
            size = f"--expert-model-parallel-size {p.expert_model_parallel_size}"
            yield f"{size} needs --num-experts; give it, or drop this."
        return
    yield from _check_model(args)
    yield from _check_router(e)
    yield from _check_balancing(args)
    yield from _check_ranks(args, world)


def _check_model(args: Args) -> Iterator[str]:
    """A model with experts is a GPT without biases, and has layers for them."""
    e = args.experts
    m = args.model
    number = f"--num-experts {e.num_experts}"
    if m.model is not None:
        yield f"--model {m.model} and {number} exclude each other: the latter is of the built-in GPT; drop one of them."
    if m.add_bias_linear:
        yield f"{number}: experts have no biases; add --disable-bias-linear."
    if m.num_layers is not None and m.num_layers > 0:
        try:
            parse_expert_layers(e.moe_layer_freq, m.num_layers)
        except ValueError as error:
            yield f"--moe-layer-freq {e.moe_layer_freq}: {error}; correct it."
    if args.checkpoint.ckpt_format == "torch":
        yield f"--ckpt-format torch and {number} exclude each other: experts are saved as torch_dist; drop the former."
    if e.moe_shared_expert_gate and e.moe_shared_expert_intermediate_size is None:
        yield "--moe-shared-expert-gate needs --moe-shared-expert-intermediate-size; give it, or drop this."
    if args.training.torch_compile == "layers":
        why = "experts' tokens vary in number"
        yield f"--torch-compile layers and {number} exclude each other: {why}; drop the former."


def _check_router(e: ExpertArgs) -> Iterator[str]:
    """Mistakes among what chooses the experts of a token."""
    experts = e.num_experts or 1
    topk = f"--moe-router-topk {e.moe_router_topk}"
    if e.moe_router_topk > experts:
        yield f"{topk}: is more than --num-experts {experts}; lower it."
    is_softmax = e.moe_router_score_function == "softmax"
    has_sinkhorn = SINKHORN in e.moe_router_load_balancing_type
    if e.moe_router_topk == 1 and is_softmax and not (e.moe_router_pre_softmax or has_sinkhorn):
        yield f"{topk}: a softmax over one expert is always 1; add --moe-router-pre-softmax."
    if e.moe_router_enable_expert_bias and is_softmax:
        yield "--moe-router-enable-expert-bias needs --moe-router-score-function sigmoid; give it, or drop this."
    if e.moe_apply_probs_on_input and e.moe_router_topk != 1:
        yield f"--moe-apply-probs-on-input needs --moe-router-topk 1, not {e.moe_router_topk}; change one of them."
    groups = e.moe_router_num_groups
    chosen = e.moe_router_group_topk
    if (groups is None) != (chosen is None):
        given = "--moe-router-num-groups" if chosen is None else "--moe-router-group-topk"
        lacking = "--moe-router-group-topk" if chosen is None else "--moe-router-num-groups"
        yield f"{given} needs {lacking}; give it, or drop this."
    elif groups is not None and chosen is not None:
        yield from _check_groups(e, groups, chosen)


def _check_groups(e: ExpertArgs, groups: int, chosen: int) -> Iterator[str]:
    """Mistakes among groups of experts."""
    experts = e.num_experts or 1
    if groups < 1 or chosen < 1:
        return  # another rule says it
    if experts % groups:
        yield f"--moe-router-num-groups {groups}: does not divide --num-experts {experts}; change one of them."
        return
    if chosen > groups:
        yield f"--moe-router-group-topk {chosen}: is more than --moe-router-num-groups {groups}; lower it."
        return
    if e.moe_router_topk > chosen * (experts // groups) or e.moe_router_topk < chosen:
        held = f"{chosen} groups of {experts // groups} experts do not hold --moe-router-topk {e.moe_router_topk}"
        yield f"--moe-router-group-topk {chosen}: {held}, with one of each at least; change one of them."


def _check_balancing(args: Args) -> Iterator[str]:
    """Mistakes among losses that balance experts."""
    e = args.experts
    kinds = e.moe_router_load_balancing_type
    factors = e.moe_aux_loss_coeff
    unknown = [kind for kind in kinds if kind not in BALANCING_KINDS]
    if unknown:
        known = ", ".join(BALANCING_KINDS)
        yield f"--moe-router-load-balancing-type {unknown[0]} is refused: there are {known}; give one of them."
        return
    if len(factors) != len(kinds):
        yield f"--moe-aux-loss-coeff: has {len(factors)} numbers for {len(kinds)} losses; give one of each."
        return
    negative = [factor for factor in factors if factor < 0]
    if negative:
        yield f"--moe-aux-loss-coeff {negative[0]:g}: must be at least 0."
    if SINKHORN in kinds and (len(kinds) > 1 or any(factors)):
        kind = "--moe-router-load-balancing-type sinkhorn"
        yield f"{kind} has no loss of its own; give it alone, with --moe-aux-loss-coeff 0."
    drops = e.moe_expert_capacity_factor is not None and e.moe_expert_capacity_factor >= 0
    if drops and SINKHORN in kinds:
        kind = "--moe-router-load-balancing-type sinkhorn"
        yield f"--moe-expert-capacity-factor does not go with {kind}; drop one of them."
    if GLOBAL_AUX_LOSS in kinds and args.model.recompute_granularity == "full":
        pair = "--moe-router-load-balancing-type global_aux_loss and --recompute-granularity full"
        why = "a recomputed layer would count its tokens twice"
        yield f"{pair} exclude each other: {why}; drop one of them."


def _check_ranks(args: Args, world: World) -> Iterator[str]:
    """Mistakes among ranks that have some of the experts each."""
    e = args.experts
    p = args.parallel
    experts = e.num_experts or 1
    size = p.expert_model_parallel_size
    name = f"--expert-model-parallel-size {size}"
    tensor = max(p.tensor_model_parallel_size, 1)
    split = p.expert_tensor_parallel_size or tensor
    if size < 1 or split < 1:
        return  # another rule says it
    if experts % size:
        yield f"{name}: does not divide --num-experts {experts}; change one of them."
        return
    if tensor > 1 and not p.sequence_parallel:
        both = f"--num-experts {experts} with --tensor-model-parallel-size {tensor}"
        yield f"{both} needs --sequence-parallel, as in Megatron-LM; add it."
    width = e.moe_ffn_hidden_size or args.model.ffn_hidden_size
    if width and width % split:
        flag = "--moe-ffn-hidden-size" if e.moe_ffn_hidden_size else "--ffn-hidden-size"
        yield f"--expert-tensor-parallel-size {split}: does not divide {flag} {width}; change one of them."
        return
    shared = e.moe_shared_expert_intermediate_size
    if shared and shared % tensor:
        divide = f"does not divide --moe-shared-expert-intermediate-size {shared}"
        yield f"--tensor-model-parallel-size {tensor}: {divide}; change one of them."
    yield from _check_expert_replicas(p, world, split)


def _check_expert_replicas(p: ParallelArgs, world: World, split: int) -> Iterator[str]:
    """Mistakes among the ranks of a stage that replicate and shard experts.

    Args:
        p: Flags of parallelism.
        world: All ranks.
        split: Ranks that split each expert.
    """
    size = p.expert_model_parallel_size
    shown = f"--expert-model-parallel-size {size} times --expert-tensor-parallel-size {split}"
    stages = max(p.pipeline_model_parallel_size, 1)
    in_dense_layers = max(p.tensor_model_parallel_size, 1) * max(p.context_parallel_size, 1)
    if world.size % (stages * in_dense_layers):
        return  # another rule says it
    of_stage = world.size // stages
    if of_stage % (size * split):
        ranks = f"the {of_stage} ranks of a stage" if stages > 1 else f"the number of ranks, {of_stage}"
        yield f"{shown}: does not divide {ranks}; change one of them."
        return
    if p.use_tp_pp_dp_mapping and stages > 1 and size * split != in_dense_layers:
        equal = f"equal --tensor-model-parallel-size times --context-parallel-size, {in_dense_layers}"
        yield f"--use-tp-pp-dp-mapping: {shown} must {equal}; change one, or drop the mapping."
    replicas = of_stage // (size * split)
    instances = p.num_distributed_optimizer_instances
    if p.shards_state and instances > 0 and replicas % instances:
        ranks = f"the {replicas} ranks that hold the same experts"
        yield f"--num-distributed-optimizer-instances {instances}: does not divide {ranks}; lower it."
    if p.pipeline_schedule == ZERO_BUBBLE and stages > 1:
        pair = f"--pipeline-schedule {ZERO_BUBBLE} and --num-experts"
        yield f"{pair} exclude each other: experts' backward is one piece; drop the former."
