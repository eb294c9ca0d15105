"""The layouts that `megatron-lite plan --search` found, as sections: a verdict with flags to paste, the fastest ones,
time against memory."""

from collections import defaultdict
from collections.abc import Iterator

from megatron_lite.config.plan import Plan
from megatron_lite.mesh_axes import CONTEXT, CONTEXT_HEADS, CONTEXT_POSITIONS, DATA, EXPERT, PIPELINE, TENSOR
from megatron_lite.planner.search import Candidate, Search
from megatron_lite.planner.step_time import BUBBLE, LAYER_GROUPS
from megatron_lite.report.section import Lines, Section, Table, limit_rows
from megatron_lite.report.text import milliseconds, percent, share
from megatron_lite.units import count, size

MAX_ROWS = 10
# columns with their alignment
COLUMNS = {
    "tp": "r",
    "cp": "r",
    "pp": "r",
    "dp": "r",
    "chunks": "r",
    "state": "l",
    "batch": "r",
    "recompute": "l",
    "peak": "r",
    "at best": "r",
    "tensor": "r",
    "context": "r",
    "bubble": "r",
}
# rows of a step's time that are of one dimension
LAYER_ROWS = {
    TENSOR: (LAYER_GROUPS[TENSOR],),
    CONTEXT: (LAYER_GROUPS[CONTEXT], LAYER_GROUPS[CONTEXT_HEADS], LAYER_GROUPS[CONTEXT_POSITIONS]),
    EXPERT: (LAYER_GROUPS[EXPERT],),
}
EXPERT_COLUMNS = {"ep": "r", "etp": "r", "expert": "r"}  # before those, of a model with experts


def judge_search(found: Search) -> list[str]:
    """Judge a search: describe the fastest layout that fits and its flags, or how far the least one is from fitting."""
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
    layout = name_layout(best.plan)
    micro_batch = f"micro-batch {best.plan.args.training.micro_batch_size}"
    memory = f"peak {size(best.peak_bytes)} of {room}"
    step = f"{milliseconds(best.step_ms)} ms per step"
    rate = f"{count(best.time.tokens_per_s)} tokens/s"
    fastest = f"fastest that fits: {layout}, {micro_batch}: {memory}; at best {step}, {rate}"
    flags = best.changed.words or "as they are"
    return [fastest, f"flags: {flags}"]


def name_layout(plan: Plan) -> str:
    """Name the sizes of a layout: 'TP 2, PP 4, DP 8'."""
    names = []
    for name, number in zip(("TP", "CP", "PP", "DP", "EP", "ETP"), plan.layout.sizes):
        if number > 1:
            names.append(f"{name} {number}")
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
    table = _build_table(layouts, everything)
    subtitle = f"{len(layouts)} layouts fit, {count(found.tried)} variants tried"
    yield Section("layouts", "Fastest of each layout", subtitle, [table, Lines(reasons, quiet=True)])
    table = _build_table(found.front, everything)
    yield Section("front", "Time against memory", "no other layout is as fast with less memory", [table])


def _build_table(candidates: list[Candidate], everything: bool) -> Table:
    """Build a row per layout, in the order that is given."""
    shown, hidden = limit_rows(candidates, MAX_ROWS, everything)
    has_experts = any(one.plan.shape.experts is not None for one in shown)
    columns = {**EXPERT_COLUMNS, **COLUMNS} if has_experts else COLUMNS
    rows = []
    for one in shown:
        cells = _list_cells(one)
        if has_experts:
            cells = [*_list_expert_cells(one), *cells]
        rows.append(cells)
    return Table(rows, "".join(columns.values()), list(columns), hidden=hidden)


def _list_expert_cells(one: Candidate) -> list[str]:
    """Write how ranks have experts, and the share of the step that exchanging tokens takes; '' for what it has not."""
    layout = one.plan.layout
    return [
        _write_size(layout.expert),
        _write_size(layout.expert_tensor),
        _write_share(one, LAYER_ROWS[EXPERT]),
    ]


def _list_cells(one: Candidate) -> list[str]:
    """Write a layout: sizes, state, batch, recomputation, memory, time, and shares of the step; '' for what it has
    not."""
    plan = one.plan
    layout = plan.layout
    return [
        _write_size(layout.tensor),
        _write_size(layout.context),
        _write_size(layout.pipeline),
        _write_size(layout.data),
        _write_size(len(plan.stage.chunks)),
        _name_sharding(plan),
        str(plan.args.training.micro_batch_size),
        _name_recomputation(plan),
        size(one.peak_bytes),
        f"{milliseconds(one.step_ms)} ms",
        _write_share(one, LAYER_ROWS[TENSOR]),
        _write_share(one, LAYER_ROWS[CONTEXT]),
        _write_share(one, (BUBBLE,)),
    ]


def _write_size(number: int) -> str:
    """Write into how many parts a dimension splits; '' for a dimension that splits nothing."""
    return str(number) if number > 1 else ""


def _write_share(one: Candidate, rows: tuple[str, ...]) -> str:
    """Write the share of the step that these rows take; '' where they take nothing."""
    ms = one.sum_rows(*rows)
    return percent(share(ms, one.step_ms)) if ms else ""


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
        cost = _describe_exchange(one, TENSOR)
        yield f"TP {layout.tensor}: {cost} for exchange within layers"
    if layout.context > 1:
        cost = _describe_exchange(one, CONTEXT)
        yield f"CP {layout.context}: {cost} for attention's exchange"
    if layout.expert_block > 1:
        cost = _describe_exchange(one, EXPERT)
        split = f", {layout.expert_tensor} split each expert" if layout.expert_tensor > 1 else ""
        yield f"EP {layout.expert}{split}: {cost} for tokens to experts and back"
    if layout.pipeline > 1:
        links = _describe_links(one, PIPELINE)
        yield f"PP {layout.pipeline}: {_describe_bubble(one)}; {links}"
    if plan.sharding:
        state = "weights and state" if plan.sharding.gathers_twice else "state"
        links = _describe_links(one, DATA)
        yield f"{state} sharded over {plan.sharding.ranks} ranks; {links}"


def _describe_exchange(one: Candidate, group: str) -> str:
    """Describe over which links a dimension of the layers exchanges, and the share of the step that this takes."""
    links = _describe_links(one, group)
    ms = one.sum_rows(*LAYER_ROWS[group])
    return f"{links}; {percent(share(ms, one.step_ms))}"


def _describe_links(one: Candidate, group: str) -> str:
    """Describe over which links the traffic of a dimension goes."""
    nodes = one.count_nodes(group)
    if nodes > 1:
        return f"its traffic goes over the network between {nodes} nodes"
    return "its traffic stays within a node"


def _describe_bubble(one: Candidate) -> str:
    """Describe the share of the step in which a stage waits, and the schedule that makes it wait."""
    schedule = f"{one.plan.final_micro_batches} micro-batches"
    chunks = len(one.plan.stage.chunks)
    if chunks > 1:
        schedule += f", {chunks} chunks each"
    bubble = percent(share(one.sum_rows(BUBBLE), one.step_ms))
    return f"a bubble of {bubble} with {schedule}"


def _compare(layouts: list[Candidate]) -> Iterator[str]:
    """Describe what makes the second layout slower than the first."""
    if len(layouts) < 2:
        return
    first, second = layouts[:2]
    if not first.time or not second.time:
        return
    more_ms_by_row: dict[str, float] = defaultdict(float)
    for row in first.time.rows:
        more_ms_by_row[row.name] = -row.ms
    for row in second.time.rows:
        more_ms_by_row[row.name] += row.ms
    name, more_ms = max(more_ms_by_row.items(), key=lambda named: named[1])
    if more_ms > 0:
        layout = name_layout(second.plan)
        slower = milliseconds(second.step_ms - first.step_ms)
        yield f"{layout} takes {slower} ms longer: {milliseconds(more_ms)} ms more for {name}"
