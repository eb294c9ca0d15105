"""A run on a terminal while it goes on: what its folder says now, and how `megatron-lite live` draws it."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megatron_lite.analysis.analyze import describe_run
from megatron_lite.analysis.findings.rules import apply_rules
from megatron_lite.analysis.ranks.from_run import OWN, compare_ranks_of_run
from megatron_lite.analysis.run.learning import describe_rise
from megatron_lite.analysis.run.read import compute_rank_medians, compute_speed
from megatron_lite.analysis.run.run_results import RankLines, Run, Steps
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.phases import NOT_TRAINING
from megatron_lite.report.text import Style, milliseconds, percent
from megatron_lite.terminal import escape
from megatron_lite.units import count, duration, significant, size

RECENT_STEPS = 50  # that "now" is the median of
MIN_RECENT = 10  # ordinary ones, before they are compared with the run's
MIN_SHARE = 0.01  # of a step: phases that take less stand together
OTHERS, OUTSIDE = "others", "outside of phases"
LONGER = 0.1  # than the run's median step
BINS = 400  # of the loss curve, at most
WIDE, GAP = 100, 3  # columns from which on two parts stand beside each other
MAX_RANKS = 8  # in full; of more the slowest, the median and the fastest one
CURVE_ROWS, GOOD_ROWS = (4, 16), 10
MAX_ROWS = 50  # where no terminal limits them
BAR_WIDTH = 14
MAX_TEXTS = 8  # warnings and findings
DOTS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])  # of a Braille letter, by row and column


@dataclass(frozen=True)
class RankNow:
    """Figures of a rank in the last console lines: ms per step, NaN for what is not known."""

    rank: int
    step_ms: float
    own_ms: float  # work without waiting for other ranks
    data_ms: float
    core_wait_ms: float


@dataclass(frozen=True)
class View:
    """Everything that the screen shows, in plain numbers and words."""

    title: str
    status: str
    started: float | None  # seconds since 1970
    ended: float | None
    iteration: int
    last_iteration: int | None  # that the run is to reach
    left_s: float | None
    figures: tuple[str, ...]  # of the newest steps
    curve: tuple[Sequence[float], Sequence[float]]  # iterations, losses
    phases: tuple[tuple[str, float, float], ...]  # name, ms now, ms over the run
    on_gpu: bool
    ranks: tuple[RankNow, ...]
    skew: str
    memory: tuple[str, ...]
    warnings: tuple[str, ...]
    findings: tuple[str, ...]  # what `report` would say now
    slowest_ms: float  # of the newest steps


def build_view(run: Run, recent: RankLines | None) -> View:
    """`recent`: the last console lines. Nothing of the run's arrays is kept."""
    last = run.take_last(RECENT_STEPS)
    speed, _ = compute_speed(run.record, last, starts_at_first=False)
    now = replace(run, ranks=compute_rank_medians(recent, run.iterations[run.ordinary])) if recent else run
    facts = Facts(ranks_seen=(), ranks=compare_ranks_of_run(now), snapshots=(), run=now, gaps=())
    on_gpu, phases = _compare_phases(run, last)
    end = run.plan.train_iters
    iteration, left_s = int(run.iterations[-1]) if run.steps else 0, None
    step_ms = speed["steady_step_ms"] or run.steady_step_ms
    if end and step_ms:
        # evaluations and checkpoints come on top, as often as so far
        stalls_ms = float(np.mean(run.step_ms - run.training_ms))
        left_s = max(end - iteration, 0) * (step_ms + stalls_ms) / 1000
    ranks = tuple(_list_ranks(now))
    return View(
        title=describe_run([run.folder], facts),
        status=run.status,
        started=_read_time(run.record.started),
        ended=_read_time(run.record.ended),
        iteration=iteration,
        last_iteration=end,
        left_s=left_s,
        figures=tuple(_list_figures(run, last, speed)),
        curve=_shorten_losses(run),
        phases=phases,
        on_gpu=on_gpu,
        ranks=ranks,
        skew=_describe_skew(ranks, run),
        memory=tuple(_describe_memory(run, recent)),
        warnings=tuple(_list_warnings(run, last, speed["steady_step_ms"], phases)),
        findings=tuple(
            f"{'' if one.certain else 'likely: '}{one.title}{'' if one.rank is None else f' (rank {one.rank})'}: "
            f"{one.evidence[0].text}"
            for one in apply_rules(facts)
        ),
        slowest_ms=float(last.step_ms.max(initial=0.0)),
    )


def _read_time(value: object) -> float | None:
    try:
        return datetime.strptime(str(value), "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except ValueError:
        return None


def _compare_phases(run: Run, last: Steps) -> tuple[bool, tuple[tuple[str, float, float], ...]]:
    """Medians of typical steps, of the GPU's own time where there is any; they add up to a step."""
    on_gpu, sides = bool(run.gpu_phases_ms), []
    for steps in (last, run):
        few = steps.ordinary if steps.ordinary.any() else np.ones_like(steps.ordinary)
        phases, whole_ms = (steps.gpu_phases_ms, steps.gpu_ms) if on_gpu else (steps.phases_ms, steps.training_ms)
        whole_ms = whole_ms[few & ~np.isnan(whole_ms)]
        if not len(whole_ms):
            return on_gpu, ()
        found = {name: float(np.median(phases[name][few])) for name in phases if name not in NOT_TRAINING}
        sides.append(found | {OUTSIDE: max(float(np.median(whole_ms)) - math.fsum(found.values()), 0.0)})
    now, usual = sides
    pairs = [(name, ms, usual.get(name, 0.0)) for name, ms in now.items()]
    least = MIN_SHARE * math.fsum(now.values())
    small = [pair for pair in pairs if max(pair[1:]) < least]
    others = [(OTHERS, math.fsum(ms for _, ms, _ in small), math.fsum(ms for _, _, ms in small))] if small else []
    return on_gpu, (*(pair for pair in pairs if pair not in small), *others)


def _list_figures(run: Run, last: Steps, speed: dict[str, float | None]) -> Iterator[str]:
    if speed["steady_step_ms"]:
        yield f"{milliseconds(speed['steady_step_ms'])} ms per step"
    if speed["tokens_per_second"]:
        yield f"{count(speed['tokens_per_second'])} tokens/s"
    if speed["mfu_causal"]:
        yield f"MFU {speed['mfu_causal']:.1%}"
    losses = last.losses[~np.isnan(last.losses) & ~last.skipped]
    if len(losses):
        yield f"loss {significant(losses[-1], 4)}"
    more = {"gradient norm": last.grad_norms, "learning rate": last.next_lrs}
    more |= {"loss scale": last.loss_scale} if run.plan.precision == "fp16" else {}
    for name, values in more.items():
        known = values[~np.isnan(values)]
        if len(known):
            yield f"{name} {significant(known[-1])}"


def _shorten_losses(run: Run) -> tuple[Sequence[float], Sequence[float]]:
    """Means of at most BINS stretches of iterations that have a loss."""
    known = ~np.isnan(run.losses) & ~run.skipped
    at, losses = run.iterations[known], run.losses[known]
    if len(at) < 2:
        return (), ()
    place = np.clip((at - at[0]) / max(float(at[-1] - at[0]), 1.0) * BINS, 0, BINS - 1).astype(int)
    number = np.bincount(place, minlength=BINS)
    filled = number > 0
    means = [np.bincount(place, values, BINS)[filled] / number[filled] for values in (at, losses)]
    means[0][[0, -1]] = at[0], at[-1]
    return means[0].tolist(), means[1].tolist()


def _list_ranks(run: Run) -> Iterator[RankNow]:
    ranks = run.ranks
    if ranks is None or len(ranks.step_ms) < 2:
        return
    unknown = (math.nan,) * len(ranks.step_ms)
    own = [ms for ms in map(ranks.own_ms, OWN) if len(ms)]
    data = ranks.phases_ms.get(OWN[0]) or unknown
    for rank, step_ms in enumerate(ranks.step_ms):
        work_ms = math.fsum(ms[rank] for ms in own) if own else math.nan
        yield RankNow(rank, step_ms, work_ms, data[rank], (ranks.core_wait_ms or unknown)[rank])


def _describe_skew(ranks: Sequence[RankNow], run: Run) -> str:
    known = sorted((one.own_ms, one.rank) for one in ranks if one.own_ms > 0)
    if len(known) < 2:
        return ""
    (most, slowest), usual_ms = known[-1], known[(len(known) - 1) // 2][0]
    told = f"rank {slowest} works longest, {most / usual_ms - 1:.0%} above the median rank"
    return f"{told}; stages have different work" if len(set(run.stages)) > 1 else told


def _describe_memory(run: Run, recent: RankLines | None) -> Iterator[str]:
    room = run.record.hardware.memory_bytes
    for name, what in (("peak_memory_bytes", "GPU, tensors' peak"), ("host_memory_bytes", "host")):
        table, own = getattr(recent, name, None), getattr(run, name)
        of_ranks = own[~np.isnan(own)][-1:] if table is None or np.isnan(table[-1]).all() else table[-1]
        if not len(of_ranks):
            continue
        least, most = float(np.nanmin(of_ranks)), float(np.nanmax(of_ranks))
        text = f"{what}: {size(most)}"
        if name == "peak_memory_bytes" and room:
            text += f" of {size(room)} ({percent(most / room)})"
        if len(of_ranks) > 1 and size(least) == size(most):
            text += " on each rank"
        elif len(of_ranks) > 1:
            text += f" on rank {np.nanargmax(of_ranks)}, {size(least)} on rank {np.nanargmin(of_ranks)}"
        yield text


def _list_warnings(
    run: Run, last: Steps, now_ms: float | None, phases: Sequence[tuple[str, float, float]]
) -> Iterator[str]:
    if run.verdict_on_ranks and run.verdict_on_ranks not in run.status:
        yield run.verdict_on_ranks
    # those before the first good step are how a loss scale finds its size
    settled = run.skipped[run.skipped.argmin() :] if run.steps else run.skipped
    number, few = int(settled.sum()), int(settled[-len(last.skipped) :].sum())
    if number == len(settled) > 0:
        yield f"all {count(number)} steps so far were skipped: no gradient was finite"
    elif number:
        newest = int(run.iterations[np.flatnonzero(run.skipped)[-1]])
        yield (
            f"{count(number)} of {count(len(settled))} steps were skipped, {few} of the last {min(len(last.skipped), len(settled))}; "
            f"the newest is iteration {count(newest)}"
        )
    if risen := describe_rise(run):
        yield risen
    usual_ms = run.steady_step_ms
    known = last.ordinary.sum() >= MIN_RECENT and run.steps > 2 * RECENT_STEPS
    if known and now_ms and usual_ms and now_ms - usual_ms > max(LONGER * usual_ms, run.step_spread_ms or 0.0):
        name, more = max(((name, ms - before) for name, ms, before in phases), key=lambda one: one[1], default=("", 0))
        where = f", {name} by {milliseconds(more)} ms" if more > 0 else ""
        yield f"steps take {now_ms / usual_ms - 1:.0%} longer than the run's median of {milliseconds(usual_ms)} ms{where}"
    yield from (note for note in run.notes if "cannot be" in note or "damaged" in note)


# --- on a terminal


def describe_progress(view: View, now: float | None = None) -> str:
    """How far the run is, and how long it has taken and will take."""
    end = view.ended or (now or time.time())
    told = [f"{count(view.iteration)}{f' of {count(view.last_iteration)}' if view.last_iteration else ''} iterations"]
    if view.last_iteration:
        told[0] += f" ({view.iteration / view.last_iteration:.0%})"
    if view.started is not None and end > view.started:
        told.append(f"{duration(end - view.started)} gone")
    if view.left_s is not None and view.ended is None and view.status.startswith("running"):
        told.append(f"{duration(view.left_s)} left")
    return ", ".join(told)


def describe_newest(view: View) -> str:
    """Describe progress, figures and warnings in one line."""
    more = f"; {len(view.warnings)} warnings, the first: {view.warnings[0]}" if view.warnings else ""
    return ", ".join((describe_progress(view), *view.figures)) + more


def draw_view(view: View, note: str, console: Console, height: int | None = None) -> RenderableType:
    """All of it for the console's width; in `height` lines, if that is given, what comes first.

    Args:
        note: what `live` itself has to say, of silence or the end.
    """
    unicode, width = not console.options.ascii_only, console.width
    # of the curve and of the numbers, which stand beside each other or one below the other
    side = (width - GAP) // 2 if width >= WIDE else width

    def measure(part: RenderableType | None, width: int = side) -> int:
        options = console.options.update(width=width, height=None)
        return len(console.render_lines(part, options, pad=False)) if part else 0

    head, told = Group(*_draw_head(view, note)), _draw_texts(view, in_full=True)
    numbers = [part for part in (_draw_phases(view, unicode), _draw_ranks(view), _draw_memory(view)) if part]
    beside = sum(map(measure, numbers))
    wanted = max(beside, GOOD_ROWS) if side < width else beside + GOOD_ROWS
    if height is not None and measure(head, width) + wanted + measure(told, width) > height:
        told = _draw_texts(view, in_full=False)
    room = (height or MAX_ROWS) - measure(head, width) - measure(told, width)
    least = 0 if side < width else CURVE_ROWS[0] + 1
    while numbers and sum(map(measure, numbers)) > room - least:
        numbers.pop()
    beside = sum(map(measure, numbers))
    rows = max(room if side < width else room - beside, CURVE_ROWS[0] + 1)
    curve = draw_curve(view.curve, side, min(rows - 1, CURVE_ROWS[1]), unicode)
    middle = [part for part in (curve, *numbers) if part]
    if side < width and curve and numbers:
        grid = Table.grid(padding=(0, GAP, 0, 0))
        grid.add_column(width=side)
        grid.add_column(width=side)
        grid.add_row(curve, Group(*numbers))
        middle = [grid]
    return Group(head, *middle, *([told] if told else []))


def _draw_head(view: View, note: str) -> Iterator[RenderableType]:
    status, _, why = view.status.partition(":")
    color = {"running": "green", "finished": "green"}.get(status, "yellow" if status.startswith("running") else "red")
    yield _join(Text(escape(view.title), "bold"), Text(escape(status), color))
    if why:
        yield Text(escape(f"{status}:{why}"), color)
    if view.last_iteration:
        yield _join(ProgressBar(total=view.last_iteration, completed=view.iteration), Text())
    yield _cut(describe_progress(view))
    if view.figures:
        yield Text(", ".join(view.figures))
    if note:
        yield Text(escape(note), style="bold yellow")


def draw_curve(
    curve: tuple[Sequence[float], Sequence[float]], width: int, rows: int, unicode: bool
) -> RenderableType | None:
    """Draw the loss over iterations below a title; None without losses.

    Args:
        curve: iterations and losses.
        width: columns.
        rows: lines below the title.
        unicode: whether the terminal shows more than ASCII.
    """
    at, losses = map(np.asarray, curve)
    if not len(at):
        return None
    low, high = float(losses.min()), float(losses.max())
    labels = [significant(high, 4), *[""] * (rows - 2), significant(low, 4)]
    indent = max(map(len, labels))
    across, down = (2, 4) if unicode else (1, 1)
    columns = max(width - indent - 1, 1) * across
    values = np.interp(np.linspace(at[0], at[-1], columns), at, losses)
    heights = np.rint((high - values) / (high - low or 1.0) * (rows * down - 1)).astype(int)
    cells = np.zeros((rows, columns // across), int)
    for x, (before, y) in enumerate(zip([heights[0], *heights], heights)):
        for dot in range(min(before, y), max(before, y) + 1):
            cells[dot // down, x // across] |= DOTS[dot % 4, x % 2] if unicode else 1
    drawn = Text(f"Loss, iterations {count(at[0])} to {count(at[-1])}", style="bold", no_wrap=True)
    for label, row in zip(labels, cells):
        line = "".join((chr(0x2800 + cell) if unicode else "*") if cell else " " for cell in row)
        drawn.append(f"\n{label:>{indent}} ", style="not bold").append(line, style="not bold cyan")
    return drawn


def _draw_phases(view: View, unicode: bool) -> RenderableType | None:
    if not view.phases:
        return None
    whole = math.fsum(ms for _, ms, _ in view.phases)
    of = max(max(pair) for _, *pair in view.phases)
    clock = "the GPU's" if view.on_gpu else "the host's"
    table = _make_table(f"Step, {clock} ms", "now", "", "", "run")
    table.columns[3].justify, table.columns[3].ratio = "left", 1
    for name, now, usual in view.phases:
        share = now / whole if whole else 0.0
        bar = Text(Style(unicode=unicode).bar(share, BAR_WIDTH), style="cyan")
        table.add_row(_cut(name), milliseconds(now, of), percent(share), bar, milliseconds(usual, of))
    return table


def _draw_ranks(view: View) -> RenderableType | None:
    if not view.ranks:
        return None
    ordered, of = sorted(view.ranks, key=lambda one: -one.own_ms), max(one.step_ms for one in view.ranks)
    shown = view.ranks if len(ordered) <= MAX_RANKS else (*ordered[:3], ordered[len(ordered) // 2], ordered[-1])
    table = _make_table("Ranks, ms", "step", "own work", "data", "no core")
    for one in shown:
        figures = (one.step_ms, one.own_ms, one.data_ms, one.core_wait_ms)
        table.add_row(f"rank {one.rank}", *(milliseconds(ms, of) for ms in figures))
    return Group(table, Text(view.skew, style="dim")) if view.skew else table


def _draw_memory(view: View) -> RenderableType | None:
    return Group(Text("Memory", style="bold"), *map(_cut, view.memory)) if view.memory else None


def _draw_texts(view: View, in_full: bool) -> RenderableType | None:
    """Warnings, then what else a report would say."""
    texts = [(text, "yellow") for text in view.warnings] + [(text, "") for text in view.findings]
    if not texts:
        return None
    grid = Table.grid()
    for text, style in texts[:MAX_TEXTS]:
        grid.add_row("- ", Text(escape(text), style, overflow="ellipsis", no_wrap=not (style or in_full)))
    if len(texts) > MAX_TEXTS:
        grid.add_row("", Text(f"and {len(texts) - MAX_TEXTS} more: megatron-lite report", "dim"))
    return Group(Text("Warnings" if view.warnings else "Findings", "bold"), grid)


def _make_table(*names: str) -> Table:
    table = Table(box=None, expand=True, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim", show_edge=False)
    for name in names:
        first = name == names[0]
        table.add_column(Text(name, "bold" if first else ""), justify="left" if first else "right", no_wrap=True)
    return table


def _join(left: RenderableType, right: Text) -> RenderableType:
    grid = Table.grid(expand=True)
    grid.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    grid.add_column(justify="right", overflow="ellipsis", no_wrap=True)
    grid.add_row(left, right)
    return grid


def _cut(text: str) -> Text:
    """Make a text that is cut to one line."""
    return Text(escape(text), no_wrap=True, overflow="ellipsis")
