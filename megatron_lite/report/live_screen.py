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
from megatron_lite.analysis.findings.base import Finding
from megatron_lite.analysis.findings.rules import apply_rules
from megatron_lite.analysis.intervals import Numbers
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
OTHERS = "others"
OUTSIDE = "outside of phases"
LONGER = 0.1  # than the run's median step
BINS = 400  # of the loss curve, at most
WIDE = 100  # columns from which on two parts stand beside each other
GAP = 3  # columns between them
MAX_RANKS = 8  # in full; of more the slowest, the median and the fastest one
MIN_CURVE_ROWS = 4
MAX_CURVE_ROWS = 16
GOOD_CURVE_ROWS = 10  # before other texts are shortened for the curve
MAX_ROWS = 50  # where no terminal limits them
BAR_WIDTH = 14
MAX_TEXTS = 8  # warnings and findings
BRAILLE = 0x2800  # the letter without a dot
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
    """Collect what the screen shows; nothing of the run's arrays is kept.

    Args:
        run: what the folder says.
        recent: the last console lines of all ranks; None without any.
    """
    last = run.take_last(RECENT_STEPS)
    speed, _ = compute_speed(run.record, last, starts_at_first=False)
    now = run
    if recent:
        now = replace(run, ranks=compute_rank_medians(recent, run.iterations[run.ordinary]))
    facts = Facts(ranks_seen=(), ranks=compare_ranks_of_run(now), snapshots=(), run=now, gaps=())
    phases = _compare_phases(run, last)
    ranks = tuple(_list_ranks(now))
    return View(
        title=describe_run([run.folder], facts),
        status=run.status,
        started=_read_time(run.record.started),
        ended=_read_time(run.record.ended),
        iteration=_get_iteration(run),
        last_iteration=run.plan.train_iters,
        left_s=_predict_left_s(run, speed["steady_step_ms"] or run.steady_step_ms),
        figures=tuple(_list_figures(run, last, speed)),
        curve=_shorten_losses(run),
        phases=phases,
        on_gpu=bool(run.gpu_phases_ms),
        ranks=ranks,
        skew=_describe_skew(ranks, run),
        memory=tuple(_describe_memory(run, recent)),
        warnings=tuple(_list_warnings(run, last, speed["steady_step_ms"], phases)),
        findings=tuple(map(_describe_finding, apply_rules(facts))),
        slowest_ms=float(last.step_ms.max(initial=0.0)),
    )


def _get_iteration(run: Run) -> int:
    """The newest iteration; 0 before the first."""
    return int(run.iterations[-1]) if run.steps else 0


def _predict_left_s(run: Run, step_ms: float | None) -> float | None:
    """Predict the seconds until the run is done, with evaluations and checkpoints as often as so far.

    Args:
        run: what the folder says.
        step_ms: the time of a typical step.

    Returns:
        The seconds; None where the last iteration or the time of a step is not known.
    """
    end = run.plan.train_iters
    if not end or not step_ms:
        return None
    stalls_ms = float(np.mean(run.step_ms - run.training_ms))
    left = max(end - _get_iteration(run), 0)
    return left * (step_ms + stalls_ms) / 1000


def _describe_finding(finding: Finding) -> str:
    """Describe a finding in a line: what it is, on which rank, and its first evidence."""
    doubt = "" if finding.certain else "likely: "
    rank = "" if finding.rank is None else f" (rank {finding.rank})"
    return f"{doubt}{finding.title}{rank}: {finding.evidence[0].text}"


def _read_time(value: object) -> float | None:
    try:
        return datetime.strptime(str(value), "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except ValueError:
        return None


def _compare_phases(run: Run, last: Steps) -> tuple[tuple[str, float, float], ...]:
    """Compare the phases of the last steps with those of the run: name, ms now, ms over the run.

    Phases that take little stand together. () where either has no step that was timed.
    """
    on_gpu = bool(run.gpu_phases_ms)
    now = _measure_phases(last, on_gpu)
    usual = _measure_phases(run, on_gpu)
    if not now or not usual:
        return ()
    pairs = [(name, ms, usual.get(name, 0.0)) for name, ms in now.items()]
    least_ms = MIN_SHARE * math.fsum(now.values())
    small = [pair for pair in pairs if max(pair[1:]) < least_ms]
    shown = [pair for pair in pairs if pair not in small]
    if small:
        now_ms = math.fsum(ms for _, ms, _ in small)
        usual_ms = math.fsum(ms for _, _, ms in small)
        shown.append((OTHERS, now_ms, usual_ms))
    return tuple(shown)


def _measure_phases(steps: Steps, on_gpu: bool) -> dict[str, float]:
    """Take the median of each phase over typical steps, in ms; with what is outside of phases they add up to a step.

    Args:
        steps: the steps; all of them count where none is typical.
        on_gpu: take the GPU's own times instead of the host's.

    Returns:
        The medians; {} where no step was timed.
    """
    typical = steps.ordinary
    if not typical.any():
        typical = np.ones_like(steps.ordinary)
    phases_ms = steps.gpu_phases_ms if on_gpu else steps.phases_ms
    whole_ms = steps.gpu_ms if on_gpu else steps.training_ms
    known_ms = whole_ms[typical & ~np.isnan(whole_ms)]
    if not len(known_ms):
        return {}
    found = {}
    for name, ms in phases_ms.items():
        if name not in NOT_TRAINING:
            found[name] = float(np.median(ms[typical]))
    outside_ms = float(np.median(known_ms)) - math.fsum(found.values())
    found[OUTSIDE] = max(outside_ms, 0.0)
    return found


def _list_figures(run: Run, last: Steps, speed: dict[str, float | None]) -> Iterator[str]:
    """Write the newest figures of a run that are known.

    Args:
        run: what the folder says.
        last: its last steps.
        speed: what compute_speed found of them.
    """
    step_ms = speed["steady_step_ms"]
    if step_ms:
        yield f"{milliseconds(step_ms)} ms per step"
    tokens_per_s = speed["tokens_per_second"]
    if tokens_per_s:
        yield f"{count(tokens_per_s)} tokens/s"
    mfu = speed["mfu_causal"]
    if mfu:
        yield f"MFU {mfu:.1%}"
    losses = last.losses[~np.isnan(last.losses) & ~last.skipped]
    if len(losses):
        yield f"loss {significant(losses[-1], 4)}"
    columns = {"gradient norm": last.grad_norms, "learning rate": last.next_lrs}
    if run.plan.precision == "fp16":
        columns["loss scale"] = last.loss_scale
    for name, values in columns.items():
        known = values[~np.isnan(values)]
        if len(known):
            yield f"{name} {significant(known[-1])}"


def _shorten_losses(run: Run) -> tuple[Sequence[float], Sequence[float]]:
    """Means of at most BINS stretches of iterations that have a loss."""
    known = ~np.isnan(run.losses) & ~run.skipped
    iterations = run.iterations[known]
    losses = run.losses[known]
    if len(iterations) < 2:
        return (), ()
    first = iterations[0]
    length = max(float(iterations[-1] - first), 1.0)
    bins = np.clip((iterations - first) / length * BINS, 0, BINS - 1).astype(int)
    members = np.bincount(bins, minlength=BINS)
    filled = members > 0
    mean_iterations = np.bincount(bins, iterations, BINS)[filled] / members[filled]
    mean_losses = np.bincount(bins, losses, BINS)[filled] / members[filled]
    # the curve's ends are those of the run
    mean_iterations[[0, -1]] = iterations[[0, -1]]
    return mean_iterations.tolist(), mean_losses.tolist()


def _list_ranks(run: Run) -> Iterator[RankNow]:
    """List the ranks with their figures; none for a single rank, with which there is nothing to compare."""
    ranks = run.ranks
    if ranks is None or len(ranks.step_ms) < 2:
        return
    unknown = (math.nan,) * len(ranks.step_ms)
    own_phases_ms = [ms for ms in map(ranks.own_ms, OWN) if len(ms)]
    data_ms = ranks.phases_ms.get(OWN[0]) or unknown
    core_wait_ms = ranks.core_wait_ms or unknown
    for rank, step_ms in enumerate(ranks.step_ms):
        own_ms = math.nan
        if own_phases_ms:
            own_ms = math.fsum(ms[rank] for ms in own_phases_ms)
        yield RankNow(rank, step_ms, own_ms, data_ms[rank], core_wait_ms[rank])


def _describe_skew(ranks: Sequence[RankNow], run: Run) -> str:
    """Describe which rank works longest; '' where the work of fewer than two is known."""
    known = sorted((one.own_ms, one.rank) for one in ranks if one.own_ms > 0)
    if len(known) < 2:
        return ""
    most_ms, slowest = known[-1]
    median_ms, _ = known[(len(known) - 1) // 2]
    text = f"rank {slowest} works longest, {most_ms / median_ms - 1:.0%} above the median rank"
    if len(set(run.stages)) > 1:
        text += "; stages have different work"
    return text


def _describe_memory(run: Run, recent: RankLines | None) -> Iterator[str]:
    """Describe how much memory the ranks hold, of the GPU and of the host, where it is known."""
    tensors_bytes = _find_newest(recent.peak_memory_bytes if recent else None, run.peak_memory_bytes)
    if len(tensors_bytes):
        room_bytes = run.record.hardware.memory_bytes
        yield f"GPU, tensors' peak: {_describe_ranks_memory(tensors_bytes, room_bytes)}"
    host_bytes = _find_newest(recent.host_memory_bytes if recent else None, run.host_memory_bytes)
    if len(host_bytes):
        yield f"host: {_describe_ranks_memory(host_bytes)}"


def _find_newest(of_ranks: Numbers | None, of_run: Numbers) -> Numbers:
    """Find the newest numbers of all ranks, else the newest of the rank that writes the log.

    Args:
        of_ranks: a row per console line, a column per rank; None without console lines of all ranks.
        of_run: a number per step.

    Returns:
        A number per rank, or a single one; none where nothing is known.
    """
    if of_ranks is not None and not np.isnan(of_ranks[-1]).all():
        return np.asarray(of_ranks[-1])
    return of_run[~np.isnan(of_run)][-1:]


def _describe_ranks_memory(of_ranks: Numbers, room_bytes: float | None = None) -> str:
    """Describe the most that a rank holds, and where it is given of how much; then how ranks differ."""
    least = size(float(np.nanmin(of_ranks)))
    most_bytes = float(np.nanmax(of_ranks))
    most = size(most_bytes)
    text = most
    if room_bytes:
        text += f" of {size(room_bytes)} ({percent(most_bytes / room_bytes)})"
    if len(of_ranks) < 2:
        return text
    if least == most:
        return f"{text} on each rank"
    return f"{text} on rank {np.nanargmax(of_ranks)}, {least} on rank {np.nanargmin(of_ranks)}"


def _list_warnings(
    run: Run, last: Steps, now_ms: float | None, phases: Sequence[tuple[str, float, float]]
) -> Iterator[str]:
    """List what is wrong: ranks that fail, skipped steps, a loss that rises, slow steps, damaged files.

    Args:
        run: what the folder says.
        last: its last steps.
        now_ms: the time of a typical one of the last steps.
        phases: what _compare_phases found.
    """
    if run.verdict_on_ranks and run.verdict_on_ranks not in run.status:
        yield run.verdict_on_ranks
    yield from _describe_skipped(run, last)
    if risen := describe_rise(run):
        yield risen
    yield from _describe_slowdown(run, last, now_ms, phases)
    for note in run.notes:
        if "cannot be" in note or "damaged" in note:
            yield note


def _describe_skipped(run: Run, last: Steps) -> Iterator[str]:
    """Describe how many steps were skipped, but for those before the first good step: by these a loss scale finds its
    size."""
    settled = run.skipped[run.skipped.argmin() :] if run.steps else run.skipped
    skipped = int(settled.sum())
    if not skipped:
        return
    if skipped == len(settled):
        yield f"all {count(skipped)} steps so far were skipped: no gradient was finite"
        return
    recent = int(settled[-len(last.skipped) :].sum())
    of_recent = min(len(last.skipped), len(settled))
    newest = int(run.iterations[np.flatnonzero(run.skipped)[-1]])
    numbers = f"{count(skipped)} of {count(len(settled))} steps were skipped, {recent} of the last {of_recent}"
    yield f"{numbers}; the newest is iteration {count(newest)}"


def _describe_slowdown(
    run: Run, last: Steps, now_ms: float | None, phases: Sequence[tuple[str, float, float]]
) -> Iterator[str]:
    """Describe by how much the last steps take longer than the run's, and the phase that grew most.

    Args:
        run: what the folder says.
        last: its last steps.
        now_ms: the time of a typical one of the last steps.
        phases: what _compare_phases found.
    """
    usual_ms = run.steady_step_ms
    are_many = last.ordinary.sum() >= MIN_RECENT and run.steps > 2 * RECENT_STEPS
    if not are_many or not now_ms or not usual_ms:
        return
    noise_ms = max(LONGER * usual_ms, run.step_spread_ms or 0.0)
    if now_ms - usual_ms <= noise_ms:
        return
    growth_ms = {name: ms - before_ms for name, ms, before_ms in phases}
    where = ""
    if growth_ms:
        name = max(growth_ms, key=lambda name: growth_ms[name])
        if growth_ms[name] > 0:
            where = f", {name} by {milliseconds(growth_ms[name])} ms"
    longer = f"{now_ms / usual_ms - 1:.0%} longer than the run's median of {milliseconds(usual_ms)} ms"
    yield f"steps take {longer}{where}"


# --- on a terminal


def describe_progress(view: View, now: float | None = None) -> str:
    """Describe how far the run is, and how long it has taken and will take.

    Args:
        view: what the screen shows.
        now: seconds since 1970 of a run that goes on; None for the clock's.
    """
    end = view.ended or now or time.time()
    progress = f"{count(view.iteration)} iterations"
    if view.last_iteration:
        share = view.iteration / view.last_iteration
        progress = f"{count(view.iteration)} of {count(view.last_iteration)} iterations ({share:.0%})"
    parts = [progress]
    if view.started is not None and end > view.started:
        parts.append(f"{duration(end - view.started)} gone")
    is_running = view.ended is None and view.status.startswith("running")
    if view.left_s is not None and is_running:
        parts.append(f"{duration(view.left_s)} left")
    return ", ".join(parts)


def describe_newest(view: View) -> str:
    """Describe progress, figures and warnings in one line."""
    line = ", ".join((describe_progress(view), *view.figures))
    if view.warnings:
        line += f"; {len(view.warnings)} warnings, the first: {view.warnings[0]}"
    return line


def draw_view(view: View, note: str, console: Console, height: int | None = None) -> RenderableType:
    """Draw the screen for the console's width; in `height` lines, if that is given, what comes first.

    Args:
        view: what is shown.
        note: what `live` itself has to say, of silence or the end.
        console: the terminal.
        height: its lines; None where nothing limits them.
    """
    page = Page(console)
    head = Group(*_draw_head(view, note))
    numbers = [_draw_phases(view, page.unicode), _draw_ranks(view), _draw_memory(view)]
    shown = [part for part in numbers if part]
    texts = _draw_texts(view, in_full=True)
    if height is not None:
        wanted = page.add_curve(GOOD_CURVE_ROWS, page.measure_numbers(shown))
        if page.measure_whole(head) + wanted + page.measure_whole(texts) > height:
            texts = _draw_texts(view, in_full=False)
    room = (height or MAX_ROWS) - page.measure_whole(head) - page.measure_whole(texts)
    # a curve that stands below the numbers needs lines of its own: its title and some rows
    least = 0 if page.is_wide else MIN_CURVE_ROWS + 1
    while shown and page.measure_numbers(shown) > room - least:
        shown.pop()
    left = room if page.is_wide else room - page.measure_numbers(shown)
    rows = max(left, MIN_CURVE_ROWS + 1) - 1
    curve = draw_curve(view.curve, page.part_width, min(rows, MAX_CURVE_ROWS), page.unicode)
    middle = page.arrange(curve, shown)
    if texts:
        middle.append(texts)
    return Group(head, *middle)


class Page:
    """The terminal's columns: the curve and the numbers stand beside each other where there is room, else below."""

    def __init__(self, console: Console):
        self.console = console
        self.unicode = not console.options.ascii_only
        self.is_wide = console.width >= WIDE
        self.part_width = (console.width - GAP) // 2 if self.is_wide else console.width

    def measure_whole(self, part: RenderableType | None) -> int:
        """Count the lines of what is as wide as the terminal."""
        return self._measure(part, self.console.width)

    def measure_numbers(self, parts: Sequence[RenderableType]) -> int:
        """Count the lines of the tables of numbers, one below the other."""
        return sum(self._measure(part, self.part_width) for part in parts)

    def add_curve(self, curve_rows: int, number_rows: int) -> int:
        """Count the lines of the curve and the numbers together."""
        if self.is_wide:
            return max(curve_rows, number_rows)
        return curve_rows + number_rows

    def arrange(self, curve: RenderableType | None, numbers: Sequence[RenderableType]) -> list[RenderableType]:
        """Put the curve and the numbers beside each other where there is room."""
        if curve is None:
            return [*numbers]
        if not self.is_wide or not numbers:
            return [curve, *numbers]
        grid = Table.grid(padding=(0, GAP, 0, 0))
        grid.add_column(width=self.part_width)
        grid.add_column(width=self.part_width)
        grid.add_row(curve, Group(*numbers))
        return [grid]

    def _measure(self, part: RenderableType | None, width: int) -> int:
        if not part:
            return 0
        options = self.console.options.update(width=width, height=None)
        return len(self.console.render_lines(part, options, pad=False))


def _draw_head(view: View, note: str) -> Iterator[RenderableType]:
    """Draw the title with the status, why it ended, progress and figures, and what `live` itself has to say."""
    status, _, why = view.status.partition(":")
    color = _choose_color(status)
    yield _join(Text(escape(view.title), "bold"), Text(escape(status), color))
    if why:
        yield Text(escape(f"{status}:{why}"), color)
    if view.last_iteration:
        bar = ProgressBar(total=view.last_iteration, completed=view.iteration)
        yield _join(bar, Text())
    yield _cut(describe_progress(view))
    if view.figures:
        yield Text(", ".join(view.figures))
    if note:
        yield Text(escape(note), style="bold yellow")


def _choose_color(status: str) -> str:
    """Choose the color of a run's status: one that runs but is not well is yellow."""
    if status in ("running", "finished"):
        return "green"
    return "yellow" if status.startswith("running") else "red"


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
    iterations, losses = map(np.asarray, curve)
    if not len(iterations):
        return None
    labels = [
        significant(float(losses.max()), 4),
        *[""] * (rows - 2),
        significant(float(losses.min()), 4),
    ]
    indent = max(map(len, labels))
    columns = max(width - indent - 1, 1)
    lines = _draw_dots(curve, columns, rows) if unicode else _draw_stars(curve, columns, rows)
    title = f"Loss, iterations {count(iterations[0])} to {count(iterations[-1])}"
    drawn = Text(title, style="bold", no_wrap=True)
    for label, line in zip(labels, lines):
        drawn.append(f"\n{label:>{indent}} ", style="not bold")
        drawn.append(line, style="not bold cyan")
    return drawn


def _draw_dots(curve: tuple[Sequence[float], Sequence[float]], columns: int, rows: int) -> list[str]:
    """Draw a curve with Braille letters, each of which has four rows of two dots.

    Args:
        curve: iterations and losses.
        columns: letters of a line.
        rows: lines.
    """
    cells = np.zeros((rows, columns), int)
    for x, y in _trace_dots(curve, columns * 2, rows * 4):
        cells[y // 4, x // 2] |= DOTS[y % 4, x % 2]
    lines = []
    for row in cells:
        letters = [chr(BRAILLE + cell) if cell else " " for cell in row]
        lines.append("".join(letters))
    return lines


def _draw_stars(curve: tuple[Sequence[float], Sequence[float]], columns: int, rows: int) -> list[str]:
    """Draw a curve with stars, for terminals that show nothing but ASCII.

    Args:
        curve: iterations and losses.
        columns: letters of a line.
        rows: lines.
    """
    cells = [[" "] * columns for _ in range(rows)]
    for x, y in _trace_dots(curve, columns, rows):
        cells[y][x] = "*"
    return ["".join(row) for row in cells]


def _trace_dots(curve: tuple[Sequence[float], Sequence[float]], across: int, down: int) -> Iterator[tuple[int, int]]:
    """List the dots that a curve sets, as (column, row) from the top left; each joins the one before without a gap.

    Args:
        curve: iterations and losses.
        across: columns of dots.
        down: rows of dots.
    """
    iterations, losses = map(np.asarray, curve)
    lowest = float(losses.min())
    highest = float(losses.max())
    places = np.linspace(iterations[0], iterations[-1], across)
    values = np.interp(places, iterations, losses)
    share_from_top = (highest - values) / (highest - lowest or 1.0)
    heights = np.rint(share_from_top * (down - 1)).astype(int)
    before = heights[0]
    for x, y in enumerate(heights):
        for dot in range(min(before, y), max(before, y) + 1):
            yield x, dot
        before = y


def _draw_phases(view: View, unicode: bool) -> RenderableType | None:
    """Draw a row per phase: its time now with a bar, and its time over the run."""
    if not view.phases:
        return None
    whole_ms = math.fsum(now_ms for _, now_ms, _ in view.phases)
    longest_ms = max(max(now_ms, usual_ms) for _, now_ms, usual_ms in view.phases)
    clock = "the GPU's" if view.on_gpu else "the host's"
    table = _make_table(f"Step, {clock} ms", "now", "", "", "run")
    bars = table.columns[3]
    bars.justify = "left"
    bars.ratio = 1
    style = Style(unicode=unicode)
    for name, now_ms, usual_ms in view.phases:
        share = now_ms / whole_ms if whole_ms else 0.0
        bar = Text(style.bar(share, BAR_WIDTH), style="cyan")
        now = milliseconds(now_ms, longest_ms)
        usual = milliseconds(usual_ms, longest_ms)
        table.add_row(_cut(name), now, percent(share), bar, usual)
    return table


def _draw_ranks(view: View) -> RenderableType | None:
    """Draw a row per rank; of many ranks the slowest, the median and the fastest."""
    if not view.ranks:
        return None
    longest_ms = max(one.step_ms for one in view.ranks)
    shown = view.ranks
    if len(view.ranks) > MAX_RANKS:
        ordered = sorted(view.ranks, key=lambda one: -one.own_ms)
        shown = (*ordered[:3], ordered[len(ordered) // 2], ordered[-1])
    table = _make_table("Ranks, ms", "step", "own work", "data", "no core")
    for one in shown:
        figures_ms = (one.step_ms, one.own_ms, one.data_ms, one.core_wait_ms)
        cells = [milliseconds(ms, longest_ms) for ms in figures_ms]
        table.add_row(f"rank {one.rank}", *cells)
    if view.skew:
        return Group(table, Text(view.skew, style="dim"))
    return table


def _draw_memory(view: View) -> RenderableType | None:
    if not view.memory:
        return None
    return Group(Text("Memory", style="bold"), *map(_cut, view.memory))


def _draw_texts(view: View, in_full: bool) -> RenderableType | None:
    """Draw warnings, then what else a report would say; a line each, or in full. Warnings are always in full."""
    rows = [Text(escape(text), "yellow", overflow="ellipsis", no_wrap=False) for text in view.warnings]
    rows += [Text(escape(text), overflow="ellipsis", no_wrap=not in_full) for text in view.findings]
    if not rows:
        return None
    grid = Table.grid()
    for row in rows[:MAX_TEXTS]:
        grid.add_row("- ", row)
    if len(rows) > MAX_TEXTS:
        more = f"and {len(rows) - MAX_TEXTS} more: megatron-lite report"
        grid.add_row("", Text(more, "dim"))
    title = "Warnings" if view.warnings else "Findings"
    return Group(Text(title, "bold"), grid)


def _make_table(title: str, *names: str) -> Table:
    """Make a table without lines: a title over its first column, and names over the others."""
    table = Table(
        box=None,
        expand=True,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        header_style="dim",
        show_edge=False,
    )
    table.add_column(Text(title, "bold"), justify="left", no_wrap=True)
    for name in names:
        table.add_column(Text(name), justify="right", no_wrap=True)
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
