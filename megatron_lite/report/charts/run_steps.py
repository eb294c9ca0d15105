"""Every step of the run: the trace shows a few of them only."""

from megatron_lite.analysis.report import Report
from megatron_lite.analysis.run.figures import Run
from megatron_lite.report.charts.figure import Figure, axis, layout
from megatron_lite.report.colors import BLUE, GREY, PURPLE

FEWEST_STEPS = 20  # fewer say nothing that the sentences do not
MOST_POINTS = 2000


def run_steps(report: Report) -> Figure | None:
    """Milliseconds of each step, ordinary ones apart from those that compile, save, evaluate or are profiled."""
    run = report.facts.run
    if run is None or run.steps < FEWEST_STEPS:
        return None
    kinds = {"ordinary": BLUE, "profiled": PURPLE, "others: first, evaluating, saving, compiling": GREY}
    of_step = _kinds(run)
    data = []
    for kind, color in kinds.items():
        rows = [at for at in _shown(run) if of_step[at] == kind]
        if rows:
            data.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": kind,
                    "x": [run.iterations[at] for at in rows],
                    "y": [run.step_ms[at] for at in rows],
                    "marker": {"color": color, "size": 5},
                    "hovertemplate": "iteration %{x}: %{y:.1f} ms<extra></extra>",
                }
            )
    y = axis("ms", type="log" if max(run.step_ms) > 10 * (run.steady_step_ms or max(run.step_ms)) else "linear")
    return Figure("How long every step of the run took", data, layout(240, axis("iteration"), y)) if data else None


def _kinds(run: Run) -> list[str]:
    return [
        "profiled" if profiled else "ordinary" if ordinary else "others: first, evaluating, saving, compiling"
        for ordinary, profiled in zip(run.ordinary, run.profiled)
    ]


def _shown(run: Run) -> list[int]:
    """Every n-th ordinary step of long runs, and the longest of each stretch: those are what one looks for."""
    every = max(run.steps // (MOST_POINTS // 2), 1)
    stretches = [range(at, min(at + every, run.steps)) for at in range(0, run.steps, every)]
    return sorted({at for stretch in stretches for at in (stretch[0], max(stretch, key=lambda row: run.step_ms[row]))})
