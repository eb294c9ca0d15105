"""Switches for finding errors that were left on, by the run's record and by what they leave in a trace."""

from dataclasses import dataclass

import numpy as np

from megatron_lite.analysis.findings.base import (
    Evidence,
    Finding,
    Observation,
    Recording,
    could_not_look,
    rule,
    saw,
    saw_nothing,
)
from megatron_lite.analysis.findings.settings import WITHOUT
from megatron_lite.analysis.intervals import Integers
from megatron_lite.analysis.rank_facts import MIN_SHARE_SHOWN, RankFacts, in_ms
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.analysis.time.time_results import SyncSite
from megatron_lite.analysis.trace.columns import Kind
from megatron_lite.formats.file_names import RUN_FILE
from megatron_lite.phases import Phase
from megatron_lite.units import counted
from megatron_lite.variables import RunPlace, switches_on

NODE = "autograd::engine::evaluate_function: "  # PyTorch's range around each operation of a backward pass
LEAVES = "AccumulateGrad"  # writes a parameter's gradient, and has no result to be checked
CHECKED = 0.75  # of the operations of backward: hooks that look for NaN stand at few of them
BESIDE_CHECKS = ("aten::_is_any_true", "aten::any", "aten::item")
FETCHES = ("aten::item", "aten::_local_scalar_dense", "aten::is_nonzero")
LONG_KERNEL_NS = 50_000  # a shorter one may end before its launch call does
MIN_LONG_KERNELS = 20
BLOCKED = 0.95  # of the long kernels
LAUNCH_BLOCKING = "CUDA_LAUNCH_BLOCKING"


def find_anomaly_checks(one: RankFacts) -> Integers:
    """The rows of autograd's checks for NaN, one per result of an operation of backward; none without anomaly mode."""
    is_node = one.trace.passing(_is_node, Kind.OP)
    checks = one.rows_named("aten::isnan".__eq__, Kind.OP)
    around = one.placing.operator[checks]
    has_around = around >= 0
    checks = checks[has_around]
    around = around[has_around]
    directly_below = is_node[one.trace.events.name[around]]
    checks = checks[directly_below]
    checked_nodes = np.unique(around[directly_below])
    nodes = one.rows_named(_is_node, Kind.OP)
    if len(nodes) and len(checked_nodes) >= CHECKED * len(nodes):
        return checks
    return checks[:0]


def _is_node(name: str) -> bool:
    """Whether a name is of the range around an operation of backward that has a result."""
    return name.startswith(NODE) and LEAVES not in name


def _measure_anomaly_mode(one: RankFacts, checks: Integers) -> float:
    """Measure ms per step of the checks, and with a GPU of its idle time after their results were fetched."""
    nodes = np.unique(one.placing.operator[checks])
    beside = one.rows_named(BESIDE_CHECKS.__contains__, Kind.OP)
    beside = beside[np.isin(one.placing.operator[beside], nodes)]
    operators = np.sort(np.concatenate((checks, beside)))
    checking_ms = one.covered_ms(one.work_under(operators))
    idle_ms = sum(site.idle_ms for site in one.time.syncs if is_fetch_of_check(site))
    return checking_ms + idle_ms


def is_fetch_of_check(site: SyncSite) -> bool:
    """Whether the host waits there for the result of a check. Only meant for a trace in anomaly mode."""
    return site.operator in FETCHES and site.phase == Phase.BACKWARD.value


def launches_block(one: RankFacts) -> bool:
    """Whether the host stands in nearly every launch of a long kernel until the kernel has ended."""
    start_ns = one.trace.events.start_ns
    end_ns = one.trace.events.end_ns
    kernels = one.rows_named(lambda name: True, Kind.KERNEL)
    kernels = kernels[end_ns[kernels] - start_ns[kernels] >= LONG_KERNEL_NS]
    calls = one.trace.launch_of[kernels]
    is_known = calls >= 0
    kernels = kernels[is_known]
    calls = calls[is_known]
    if len(kernels) < MIN_LONG_KERNELS:
        return False
    begins_inside = start_ns[calls] <= start_ns[kernels]
    ends_inside = end_ns[kernels] <= end_ns[calls]
    return float((begins_inside & ends_inside).mean()) >= BLOCKED


@rule("debug-switches", "debugging switches left on", "run", "operators")
def find_debug_switches(facts: Facts) -> Finding | Observation:
    """Debugging switches were left on.

    Meaning: some environment variables and modes make a run safer to debug and slower: launches that wait, timing
        events around every collective, checks of every collective on all ranks, checks of every gradient, no cached
        memory.
    Measured: the variables as recorded by the run. In a trace, aten::isnan after most operations of backward
        (autograd's anomaly mode), and launch calls that end after their kernels do (CUDA_LAUNCH_BLOCKING).
    Cost: of anomaly mode the time of its checks, with a GPU also the idle time after their results are fetched; it
        takes as much again to record stacks in forward. Others are not measured: some cost microseconds per call,
        CUDA_LAUNCH_BLOCKING=1 all overlap of host and device.
    Do: unset them for runs whose speed matters; leave out set_detect_anomaly(True) and detect_anomaly=True.
    Flags: CUDA_LAUNCH_BLOCKING, TORCH_NCCL_ENABLE_TIMING, TORCH_DISTRIBUTED_DEBUG, PYTORCH_NO_CUDA_MEMORY_CACHING,
        NCCL_DEBUG, NCCL_P2P_DISABLE, NCCL_SHM_DISABLE, NCCL_IB_DISABLE.
    False alarm: NCCL_..._DISABLE on a machine whose links are broken, where it is the remedy.
    """
    one = facts.critical
    place = RunPlace(facts.on_gpu is not False, facts.plan.world.size or 1, facts.local_ranks or 1)
    variables = []
    seen = []
    for setting, cost in switches_on(facts.variables, place).items():
        variables.append(setting.partition("=")[0])
        seen.append(Evidence(f"{setting}: {cost}", RUN_FILE))
    anomaly = _look_for_anomaly_mode(one) if one is not None else None
    if anomaly is not None:
        seen.insert(0, anomaly.seen)
    if one is not None and LAUNCH_BLOCKING not in variables and launches_block(one):
        seen.append(Evidence(f"{LAUNCH_BLOCKING}: each launch call ends after its kernel does", one.where()))
        variables.append(LAUNCH_BLOCKING)
    if not seen:
        return _look_at_switches(facts)
    without = [f"{WITHOUT}{variable}" for variable in variables]
    remedies = [WITHOUT_ANOMALY_MODE] if anomaly is not None else []
    if without:
        remedies.append(f"run {', '.join(without)}")
    cost_ms = anomaly.cost_ms if anomaly is not None else None
    return Finding(
        cost_ms=cost_ms,
        gain_ms=cost_ms,
        evidence=tuple(seen),
        advice="; ".join(remedies),
        flags=tuple(without),
        certain=anomaly is not None,
    )


def _look_at_switches(facts: Facts) -> Observation:
    """Say where no switch was seen: in the run's variables, in a trace, or in neither."""
    seen = []
    if facts.run is not None:
        seen.append(Evidence("no known switch among the variables that the run wrote down", RUN_FILE))
    if facts.critical is not None and len(facts.critical.trace.rows[Kind.OP]):
        seen.append(Evidence("no anomaly mode and no launches that block", facts.critical.where()))
    return saw(*seen) if seen else could_not_look(record=Recording.RUN_FOLDER)


WITHOUT_ANOMALY_MODE = "leave out torch.autograd.set_detect_anomaly(True) (detect_anomaly=True of a trainer)"


@dataclass(frozen=True)
class AnomalyMode:
    """Autograd's anomaly mode in a trace."""

    cost_ms: float  # per step
    seen: Evidence


def _look_for_anomaly_mode(one: RankFacts) -> AnomalyMode | None:
    """Look for the checks of autograd's anomaly mode in a trace; None without them."""
    checks = find_anomaly_checks(one)
    if not len(checks):
        return None
    cost_ms = _measure_anomaly_mode(one, checks)
    number = counted(round(one.per_step(checks)), "check")
    text = f"autograd's anomaly mode: {number} of backward's results per step, {one.of_step(cost_ms)}"
    return AnomalyMode(cost_ms, Evidence(text, one.where(int(checks[0]))))


SEARCH = "torch.distributed.ddp.reducer::search_unused_parameters"
SINK = "_DDPSink"  # copies the results of forward, so that all of them have a gradient
TO_GRADIENT = "torch.distributed.ddp.reducer::copy_bucket_to_grad"


@rule("unused-parameters", "search for unused parameters in each step", "operators", "phases", needs="trace")
def find_unused_parameter_search(facts: Facts, one: RankFacts) -> Finding | Observation:
    """DistributedDataParallel looks for parameters that get no gradient.

    Meaning: with find_unused_parameters=True it walks autograd's graph after each forward pass, copies the pass's
        results, and sums a map of the used parameters over ranks after backward, for which it waits.
    Measured: PyTorch's own range around the search, and the copy of the results. The reduction of the map is among the
        collectives.
    Cost: the copies, and of the search what the device does not work meanwhile; from 1% of the step on.
    Do: leave find_unused_parameters=True out; if some parameters get no gradient, freeze them or take them out of the
        model, or set static_graph=True where they are the same in each step.
    Flags: find_unused_parameters=False of DistributedDataParallel; "ddp" instead of "ddp_find_unused_parameters_true"
        in Lightning; ddp_find_unused_parameters=False in Transformers.
    False alarm: a model that uses other parameters in each step and on each rank needs the search.
    """
    searches = _find_searches(one)
    if not len(searches):
        return saw_nothing(one, "no search for unused parameters")
    copies = one.rows_named(SINK.__eq__, Kind.OP)
    search_ms = one.covered_ms(searches)
    copy_ms = one.covered_ms(one.work_under(copies))
    number = counted(one.per_step(searches), "search")
    text = f"{number} per step, {in_ms(search_ms)} of the host; copying the results takes {in_ms(copy_ms)}"
    shown = [Evidence(text, one.where(int(searches[0])))]
    advice = "leave find_unused_parameters=True out"
    unused = _count_unused(one, len(searches))
    if unused:
        shown.append(Evidence(f"{counted(unused, 'parameter')} without a gradient per search", one.where()))
        advice = (
            "freeze parameters that get no gradient, or set static_graph=True, and leave find_unused_parameters out"
        )
    # with a GPU the host may search while the device works
    lost_ms = copy_ms + (measure_exposed_search(one) if one.time.on_gpu else search_ms)
    is_notable = one.share(lost_ms) >= MIN_SHARE_SHOWN
    cost_ms = lost_ms if is_notable else None
    return Finding(
        cost_ms=cost_ms,
        gain_ms=cost_ms,
        evidence=tuple(shown),
        advice=advice,
        certain=not unused,
        rank=one.time.rank,
    )


def _find_searches(one: RankFacts) -> Integers:
    """Rows of the ranges around the search for unused parameters, in steady steps."""
    return one.rows_named(SEARCH.__eq__, Kind.OP, Kind.ANNOTATION)


def measure_exposed_search(one: RankFacts) -> float:
    """Measure the search for unused parameters that the device does not work beside, in ms per step."""
    return one.exposed_ms(_find_searches(one))


def _count_unused(one: RankFacts, searches: int) -> int:
    """Count the parameters of a search that got no gradient; 0 where the trace does not tell."""
    written = one.rows_named(TO_GRADIENT.__eq__, Kind.OP, Kind.ANNOTATION)
    given = one.rows_named(lambda name: name.startswith(NODE) and LEAVES in name, Kind.OP)
    if not len(given):
        return 0
    return max(0, len(written) - len(given)) // searches
