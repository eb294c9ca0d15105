"""torch.compile cut the model into pieces.

Meaning: where the compiler meets Python that it cannot follow (print, .item(), a branch on a tensor's value, an
    unknown extension) it ends the graph, lets Python run that line, and begins another graph. Nothing is fused across
    the cut.
Measured: frames that torch names torch_dynamo_resume_in_... (they exist only behind a break); without stacks, more
    different compiled regions per step than a layer and a loss explain.
Cost: not measured by itself: the launches and memory traffic between the pieces. See launch-bound and
    unfused-elementwise.
Do: TORCH_LOGS=graph_breaks names the lines; fullgraph=True turns them into errors.
Flags: --torch-compile compiles each layer by itself and the loss, so that what stands between them cannot break a
    graph.
False alarm: a model with several functions that are compiled apart on purpose.
"""

import re

import numpy as np

from megatron_lite.analysis.findings.base import Evidence, Finding, where
from megatron_lite.analysis.findings.step_measurements import per_step, rows_named
from megatron_lite.analysis.run_facts import Facts, RankFacts
from megatron_lite.analysis.trace.columns import Kind

CODE, TITLE = "graph-breaks", "compiled graphs cut into pieces"
REGION = re.compile(r"Torch-Compiled Region: (\d+)/\d+")
RESUME = re.compile(r"torch_dynamo_resume_in_(\w+)_at_(\d+)")
MAX_SHOWN = 4
FEW = 3  # different regions: here a layer and the loss' two pieces; elsewhere functions compiled apart are seldom more


def find_in_trace(facts: Facts, one: RankFacts) -> Finding | None:
    resumed = rows_named(one, RESUME.search, Kind.PYTHON, Kind.OP, Kind.ANNOTATION)
    if len(resumed):
        breaks = dict.fromkeys(RESUME.search(name).groups() for name in _names(one, resumed))
        told = [f"the graph of {function} breaks before line {line}" for function, line in list(breaks)[:MAX_SHOWN]]
        place = where(one, resumed[0])
    else:
        regions = rows_named(one, REGION.match, Kind.OP, Kind.ANNOTATION)
        number = len({REGION.match(name)[1] for name in _names(one, regions)})
        if number <= FEW:
            return None
        told = [f"{number} different functions were compiled, {per_step(one, regions):,.0f} regions run per step"]
        place = where(one, regions[0])
    seen = tuple(Evidence(text, place) for text in told)
    advice = "start with TORCH_LOGS=graph_breaks to see the lines that break the graph"
    return Finding(
        evidence=seen, advice=advice, flags=("TORCH_LOGS=graph_breaks",), certain=bool(len(resumed)), rank=one.time.rank
    )


def _names(one: RankFacts, rows: np.ndarray) -> list[str]:
    """The distinct ones."""
    return [one.trace.names[index] for index in np.unique(one.trace.events.name[rows])]
