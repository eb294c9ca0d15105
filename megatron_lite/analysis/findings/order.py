"""The order of findings: what makes a run fail, what takes its machine away, then what saves most of a step."""

from collections.abc import Iterable

from megatron_lite.analysis.findings import hardware_rules, imbalance_rules, machine_rules, memory_rules
from megatron_lite.analysis.findings.base import Finding
from megatron_lite.analysis.rank_facts import MATTERS
from megatron_lite.analysis.run_facts import Facts

# the run fails or computes something wrong: what its steps cost comes second
BEFORE_COSTS = (
    memory_rules.find_out_of_memory.code,
    imbalance_rules.find_collective_order.code,
    hardware_rules.find_gpu_errors.code,
)
# a GPU that is slowed down explains what its rank does, and all others do
OF_CLOCKS = (hardware_rules.find_slowed_gpu.code,)
# what takes the cores stands before what the run does with them; of equal cost what the user can change comes first
OF_CORES = (machine_rules.find_too_many_threads.code, machine_rules.find_busy_machine.code)


def order_findings(findings: Iterable[Finding], facts: Facts) -> tuple[Finding, ...]:
    """Order findings: first what makes the run itself fail, then slowed hardware and missing cores, then what saves
    most of a step; by bytes what saves no time.

    Args:
        findings: what the rules found.
        facts: the run.
    """
    time = facts.critical.time if facts.critical is not None else None
    steps = max(1, len(time.steps)) if time is not None else 1
    notable_ms = MATTERS * time.step_ms if time is not None else 0.0
    return tuple(sorted(findings, key=lambda one: _rate(one, steps, notable_ms)))


def _rate(one: Finding, steps: int, notable_ms: float) -> tuple[int, float, int]:
    """Where a finding stands: what ended the run or makes its results wrong comes first; then hardware that is slowed
    down, and other jobs on the machine, which make every other cost what it is.

    What saves a notable part of a step stands before a cost of which nobody knows what the remedy saves.

    Args:
        one: the finding.
        steps: of the trace.
        notable_ms: the notable part.
    """
    saving_ms = measure_saved_ms(one, steps)
    if one.code in BEFORE_COSTS and one.certain:
        order = 0
    elif one.code in OF_CLOCKS:
        order = 1
    elif one.code in OF_CORES and one.cost_ms is not None:
        order = 2
    elif one.cost_ms is not None and one.gain_ms is None:
        order = 4
    elif saving_ms >= notable_ms:
        order = 3
    else:
        order = 5
    return order, -saving_ms, -(one.cost_bytes or 0)


def measure_saved_ms(one: Finding, steps: int = 1) -> float:
    """Measure what a finding's remedy saves of a step, ms: what its replay says, else the cost, of which nothing says
    how much goes.

    Args:
        one: the finding.
        steps: of the trace, which share what is paid once.
    """
    if one.once_ms is not None:
        return one.once_ms / steps
    saving_ms = one.cost_ms if one.gain_is_bound else one.gain_ms
    return saving_ms or 0.0
