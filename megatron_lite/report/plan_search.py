"""The layouts that `megatron-lite plan --search` found, as sections: a verdict with flags to paste, the fastest ones,
time against memory."""

from collections.abc import Iterator

from megatron_lite.config.plan import Plan
from megatron_lite.mesh_axes import CONTEXT, DATA, EXPERT, PIPELINE, TENSOR
from megatron_lite.planner.search import Candidate, Search
from megatron_lite.planner.step_time import BUBBLE, LAYER_GROUPS
from megatron_lite.report.section import Block, Lines, Section, Table, limit_rows
from megatron_lite.report.text import milliseconds, percent, share
from megatron_lite.units import count, size

MAX_ROWS = 10
HEAD = [
    "tp", "cp", "pp", "dp", "chunks", "state", "batch", "recompute", "peak", "at best", "tensor", "context", "bubble",
]  # fmt: skip
EXPERT_HEAD = ["ep", "etp", "expert"]  # before those, of a model with experts


def judge_search(found: Search) -> list[str]:
    """The fastest layout that fits, why, and its flags."""
    room = f"{size(found.budget_bytes)} of one {found.processor.name}, {percent(found.margin)} left free"
    if found.fitting:
        return _describe_fastest(found.fitting[0], room)
    if found.least is None:
        return ["no layout divides this model and these GPUs"]
    flags = found.least.changed.words or "the flags as they are"
    none = f"none of {count(found.tried)} layouts fits into {room}"
    least = f"the least is {size(found.least.peak_bytes)} with {flags}"
    return [f"{none}: {least}; take more GPUs or larger ones"]


def _describe_fastest(best: Candidate, room: str) -> list[str]:
    """Describe the fastest layout, and its flags. `room`: the memory that there is, in words."""
    assert best.time is not None  # a search is of a GPU
    micro_batch = f"micro-batch {best.plan.args.training.micro_batch_size}"
    speed = f"{milliseconds(best.step_ms)} ms per step, {count(best.time.tokens_per_s)} tokens/s"
    memory = f"peak {size(best.peak_bytes)} of {room}"
    fastest = f"fastest that fits: {name_layout(best.plan)}, {micro_batch}: {memory}; at best {speed}"
    return [fastest, f"flags: {best.changed.words or 'as they are'}"]


def name_layout(plan: Plan) -> str:
    """Name the sizes of a layout: 'TP 2, PP 4, DP 8'."""
    sizes = zip(("TP", "CP", "PP", "DP", "EP", "ETP"), plan.layout.sizes)
    names = [f"{name} {number}" for name, number in sizes if number > 1]
    return ", ".join(names) or "one GPU"


def build_search_sections(found: Search, everything: bool) -> Iterator[Section]:
    """Build the sections of what a search found; none where nothing fits."""
    if not found.fitting:
        return
    layouts = found.best_of_layouts
    has_experts = found.fitting[0].plan.shape.experts is not None
    shares = "expert, tensor, context, bubble" if has_experts else "tensor, context, bubble"
    caveat = (
        "bounds, as in Time of a step at best: real steps take longer, small products and many messages most of all; "
        f"{shares}: their share of the step; the same global batch for all"
    )
    reasons = [*_give_reasons(layouts[0]), *_compare(layouts), caveat]
    blocks: list[Block] = [_build_table(layouts, everything), Lines(reasons, quiet=True)]
    of = f"{len(layouts)} layouts fit, {count(found.tried)} variants tried"
    yield Section("layouts", "Fastest of each layout", of, blocks)
    of = "no other layout is as fast with less memory"
    yield Section("front", "Time against memory", of, [_build_table(found.front, everything)])


def _build_table(candidates: list[Candidate], everything: bool) -> Table:
    shown, hidden = limit_rows(candidates, MAX_ROWS, everything)
    if all(one.plan.shape.experts is None for one in shown):
        return Table([_list_cells(one) for one in shown], "rrrrrlrlrrrrr", HEAD, hidden=hidden)
    rows = [[*_list_expert_cells(one), *_list_cells(one)] for one in shown]
    return Table(rows, "rrrrrrrrlrlrrrrr", [*EXPERT_HEAD, *HEAD], hidden=hidden)


def _list_expert_cells(one: Candidate) -> list[str]:
    """Write how ranks have experts, and the share of the step that exchanging tokens takes; '' for what it has not."""
    layout = one.plan.layout
    ms = one.sum_rows(LAYER_GROUPS[EXPERT])
    sizes = [str(number) if number > 1 else "" for number in (layout.expert, layout.expert_tensor)]
    return [*sizes, percent(share(ms, one.step_ms)) if ms else ""]


def _list_cells(one: Candidate) -> list[str]:
    """Write a layout: sizes, state, batch, recomputation, memory, time, and shares of the step; '' for what it has
    not."""
    plan = one.plan
    layout = plan.layout
    sizes = [layout.tensor, layout.context, layout.pipeline, layout.data, len(plan.stage.chunks)]
    shares = []
    for rows in (LAYER_GROUPS[TENSOR], LAYER_GROUPS[CONTEXT], BUBBLE):
        ms = one.sum_rows(rows)
        shares.append(percent(share(ms, one.step_ms)) if ms else "")
    return [
        *(str(number) if number > 1 else "" for number in sizes),
        _name_sharding(plan),
        str(plan.args.training.micro_batch_size),
        _name_recomputation(plan),
        size(one.peak_bytes),
        f"{milliseconds(one.step_ms)} ms",
        *shares,
    ]


def _name_sharding(plan: Plan) -> str:
    """Name what data parallel ranks shard, 'ZeRO-1'; '' for nothing."""
    if plan.sharding is None:
        return ""
    return "ZeRO-3" if plan.sharding.gathers_twice else "ZeRO-1"


def _name_recomputation(plan: Plan) -> str:
    """Name what is computed again for backward: 'selective', 'all layers', '4 of 12'; '' for nothing."""
    granularity = plan.args.model.recompute_granularity
    if granularity != "full":
        return granularity or ""
    if plan.recomputed_layers == len(plan.stage.layers):
        return "all layers"
    return f"{plan.recomputed_layers} of {len(plan.stage.layers)}"


def _give_reasons(one: Candidate) -> Iterator[str]:
    """Describe what each dimension of a layout costs, and over which links."""
    plan = one.plan
    layout = plan.layout
    if layout.tensor > 1:
        cost = _cost(one, LAYER_GROUPS[TENSOR])
        yield f"TP {layout.tensor}: {_place(one, TENSOR)}; {cost} for exchange within layers"
    if layout.context > 1:
        cost = _cost(one, LAYER_GROUPS[CONTEXT])
        yield f"CP {layout.context}: {_place(one, CONTEXT)}; {cost} for keys and values"
    if layout.expert_block > 1:
        cost = _cost(one, LAYER_GROUPS[EXPERT])
        split = f", {layout.expert_tensor} split each expert" if layout.expert_tensor > 1 else ""
        yield f"EP {layout.expert}{split}: {_place(one, EXPERT)}; {cost} for tokens to experts and back"
    if layout.pipeline > 1:
        passes = plan.final_micro_batches
        schedule = f"{passes} micro-batches"
        chunks = len(plan.stage.chunks)
        if chunks > 1:
            schedule += f", {chunks} chunks each"
        bubble = f"a bubble of {_cost(one, BUBBLE)} with {schedule}"
        yield f"PP {layout.pipeline}: {bubble}; {_place(one, PIPELINE)}"
    if plan.sharding:
        state = "weights and state" if plan.sharding.gathers_twice else "state"
        yield f"{state} sharded over {plan.sharding.ranks} ranks; {_place(one, DATA)}"


def _place(one: Candidate, group: str) -> str:
    """Describe over which links the traffic of a dimension goes."""
    nodes = one.count_nodes(group)
    if nodes > 1:
        return f"its traffic goes over the network between {nodes} nodes"
    return "its traffic stays within a node"


def _cost(one: Candidate, rows: str) -> str:
    """Write the share of the step that these rows take."""
    return percent(share(one.sum_rows(rows), one.step_ms))


def _compare(layouts: list[Candidate]) -> Iterator[str]:
    """Describe what makes the second layout slower than the first."""
    if len(layouts) < 2:
        return
    first, second = layouts[:2]
    if not first.time or not second.time:
        return
    more_ms = {row.name: -row.ms for row in first.time.rows}
    for row in second.time.rows:
        more_ms[row.name] = row.ms + more_ms.get(row.name, 0.0)
    name = max(more_ms, key=lambda name: more_ms[name])
    if more_ms[name] > 0:
        slower = milliseconds(second.step_ms - first.step_ms)
        most = f"{milliseconds(more_ms[name])} ms more for {name}"
        yield f"{name_layout(second.plan)} takes {slower} ms longer: {most}"
