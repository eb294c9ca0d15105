"""The layouts that `megatron-lite plan --search` found, as sections: a verdict with flags to paste, the fastest ones, time against memory."""

from collections.abc import Iterator

from megatron_lite.config.plan import Plan
from megatron_lite.planner.search import Candidate, Search, get_sizes
from megatron_lite.planner.step_time import BUBBLE, LAYER_GROUPS
from megatron_lite.planner.traffic import CONTEXT, DATA, PIPELINE, TENSOR, find_members
from megatron_lite.report.section import Lines, Section, Table, limit_rows
from megatron_lite.report.text import milliseconds, percent, share
from megatron_lite.units import count, size

MAX_ROWS = 10
HEAD = [
    "tp", "cp", "pp", "dp", "chunks", "state", "batch", "recompute", "peak", "at best", "tensor", "context", "bubble",
]  # fmt: skip


def judge_search(found: Search) -> list[str]:
    """The fastest layout that fits, why, and its flags."""
    room = f"{size(found.budget_bytes)} of one {found.processor.name}, {percent(found.margin)} left free"
    if not found.fitting:
        if found.least is None:
            return ["no layout divides this model and these GPUs"]
        needed = f"{size(found.least.peak_bytes)} with {found.least.changed.words or 'the flags as they are'}"
        none = f"none of {count(found.tried)} layouts fits into {room}"
        return [f"{none}: the least is {needed}; take more GPUs or larger ones"]
    best = found.fitting[0]
    assert best.time is not None  # a search is of a GPU
    speed = f"{milliseconds(best.step_ms)} ms per step, {count(best.time.tokens_per_s)} tokens/s"
    layout = f"{name_layout(best.plan)}, micro-batch {best.plan.args.training.micro_batch_size}"
    fastest = f"fastest that fits: {layout}: peak {size(best.peak_bytes)} of {room}; at best {speed}"
    return [fastest, f"flags: {best.changed.words or 'as they are'}"]


def name_layout(plan: Plan) -> str:
    """Name the sizes of a layout: 'TP 2, PP 4, DP 8'."""
    names = ("TP", "CP", "PP", "DP")
    return (
        ", ".join(f"{name} {number}" for name, number in zip(names, get_sizes(plan.layout)) if number > 1) or "one GPU"
    )


def build_search_sections(found: Search, everything: bool) -> Iterator[Section]:
    """Nothing where nothing fits."""
    if not found.fitting:
        return
    layouts = found.best_of_layouts
    table = _build_table(layouts, everything)
    of = f"{len(layouts)} layouts fit, {count(found.tried)} variants tried"
    caveat = (
        "bounds, as in Time of a step at best: real steps take longer, small products and many messages most of all; "
        "tensor, context, bubble: their share of the step; the same global batch for all"
    )
    reasons = [*_give_reasons(layouts[0]), *_compare(layouts), caveat]
    yield Section("layouts", "Fastest of each layout", of, [table, Lines(reasons, quiet=True)])
    of = "no other layout is as fast with less memory"
    yield Section("front", "Time against memory", of, [_build_table(found.front, everything)])


def _build_table(candidates: list[Candidate], everything: bool) -> Table:
    shown, hidden = limit_rows(candidates, MAX_ROWS, everything)
    return Table([_list_cells(one) for one in shown], "rrrrrlrlrrrrr", HEAD, hidden=hidden)


def _list_cells(one: Candidate) -> list[str]:
    plan, step_ms = one.plan, one.step_ms
    chunks, shared, model = len(plan.stage.chunks), plan.sharding, plan.args.model
    kept = "" if shared is None else f"ZeRO-{3 if shared.gathers_twice else 1}"
    again = model.recompute_granularity or ""
    if again == "full":
        some = f"{plan.recomputed_layers} of {plan.stage.chunk_size}"
        again = "all layers" if plan.recomputed_layers == plan.stage.chunk_size else some
    shares = [one.sum_rows(LAYER_GROUPS[TENSOR]), one.sum_rows(LAYER_GROUPS[CONTEXT]), one.sum_rows(BUBBLE)]
    return [
        *(str(number) if number > 1 else "" for number in get_sizes(plan.layout)), str(chunks) if chunks > 1 else "", kept,
        str(plan.args.training.micro_batch_size), again, size(one.peak_bytes), f"{milliseconds(step_ms)} ms",
        *(percent(share(ms, step_ms)) if ms else "" for ms in shares),
    ]  # fmt: skip


def _give_reasons(one: Candidate) -> Iterator[str]:
    """Describe what each dimension of a layout costs, and over which links."""
    plan, layout = one.plan, one.plan.layout
    passes = plan.batch.final // plan.samples_per_pass
    if layout.tensor > 1:
        yield f"TP {layout.tensor}: {_place(plan, TENSOR)}; {_cost(one, LAYER_GROUPS[TENSOR])} for exchange within layers"
    if layout.context > 1:
        yield f"CP {layout.context}: {_place(plan, CONTEXT)}; {_cost(one, LAYER_GROUPS[CONTEXT])} for keys and values"
    if layout.pipeline > 1:
        chunks = len(plan.stage.chunks)
        times = f", {chunks} chunks each" if chunks > 1 else ""
        yield f"PP {layout.pipeline}: a bubble of {_cost(one, BUBBLE)} with {passes} micro-batches{times}; {_place(plan, PIPELINE)}"
    if plan.sharding:
        state = "state" if not plan.sharding.gathers_twice else "weights and state"
        yield f"{state} sharded over {plan.sharding.ranks} ranks; {_place(plan, DATA)}"


def _place(plan: Plan, group: str) -> str:
    nodes = find_members(group, plan.layout, plan.sharding, plan.world).nodes
    return f"its traffic {f'goes over the network between {nodes} nodes' if nodes > 1 else 'stays within a node'}"


def _cost(one: Candidate, *names: str) -> str:
    return percent(share(one.sum_rows(*names), one.step_ms))


def _compare(layouts: list[Candidate]) -> Iterator[str]:
    """Describe what makes the second layout slower than the first."""
    if len(layouts) < 2 or not (layouts[0].time and layouts[1].time):
        return
    first, second = ({row.name: row.ms for row in one.time.rows} for one in layouts[:2])  # type: ignore[union-attr]
    more = {name: second.get(name, 0.0) - first.get(name, 0.0) for name in {**first, **second}}
    name = max(more, key=lambda name: more[name])
    slower = layouts[1].step_ms - layouts[0].step_ms
    if more[name] > 0:
        most = f"{milliseconds(more[name])} ms more for {name}"
        yield f"{name_layout(layouts[1].plan)} takes {milliseconds(slower)} ms longer: {most}"
