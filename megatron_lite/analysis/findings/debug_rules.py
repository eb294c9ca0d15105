"""Switches for finding errors that were left on, by the run's record and by what they leave in a trace."""

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
LEAVES = "AccumulateGrad"  # has no result to be checked
CHECKED = 0.75  # of the operations of backward: hooks that look for NaN stand at few of them
FETCHES = ("aten::item", "aten::_local_scalar_dense", "aten::is_nonzero")
LONG_KERNEL_NS = 50_000  # a shorter one may end before its launch call does
MIN_LONG_KERNELS = 20
BLOCKED = 0.95  # of the long kernels
LAUNCH_BLOCKING = "CUDA_LAUNCH_BLOCKING"


def find_anomaly_checks(one: RankFacts) -> Integers:
    """The rows of autograd's checks for NaN, one per result of an operation of backward; none without anomaly mode."""
    checks = one.rows_named("aten::isnan".__eq__, Kind.OP)
    around = one.placing.operator[checks]
    checks, around = checks[around >= 0], around[around >= 0]
    is_node = one.trace.passing(lambda name: name.startswith(NODE) and LEAVES not in name, Kind.OP)
    directly = is_node[one.trace.events.name[around]]
    checks, checked = checks[directly], np.unique(around[directly])
    nodes = one.rows_named(lambda name: name.startswith(NODE) and LEAVES not in name, Kind.OP)
    return checks if len(nodes) and len(checked) >= CHECKED * len(nodes) else checks[:0]


def _measure_anomaly_mode(one: RankFacts, checks: Integers) -> float:
    """ms per step of the checks, and with a GPU of its idle time after their results were fetched."""
    nodes = np.unique(one.placing.operator[checks])
    beside = one.rows_named(lambda name: name in ("aten::_is_any_true", "aten::any", "aten::item"), Kind.OP)
    beside = beside[np.isin(one.placing.operator[beside], nodes)]
    cost = one.covered_ms(one.work_under(np.sort(np.concatenate((checks, beside)))))
    return cost + sum(site.idle_ms for site in one.time.syncs if is_fetch_of_check(site))


def is_fetch_of_check(site: SyncSite) -> bool:
    """In anomaly mode: does the host wait there for a check's result?"""
    return site.operator in FETCHES and site.phase == Phase.BACKWARD.value


def launches_block(one: RankFacts) -> bool:
    """Does the host stand in nearly every launch of a long kernel until the kernel has ended?"""
    events = one.trace.events
    kernels = one.rows_named(lambda name: True, Kind.KERNEL)
    kernels = kernels[events.end_ns[kernels] - events.start_ns[kernels] >= LONG_KERNEL_NS]
    calls = one.trace.launch_of[kernels]
    kernels, calls = kernels[calls >= 0], calls[calls >= 0]
    if len(kernels) < MIN_LONG_KERNELS:
        return False
    inside = (events.start_ns[calls] <= events.start_ns[kernels]) & (events.end_ns[kernels] <= events.end_ns[calls])
    return float(inside.mean()) >= BLOCKED


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
    ranks, local = facts.plan.world.size or 1, facts.local_ranks or 1
    on = switches_on(facts.variables, RunPlace(facts.on_gpu is not False, ranks, local))
    variables = [setting.partition("=")[0] for setting in on]
    seen = [Evidence(f"{setting}: {cost}", "run.json") for setting, cost in on.items()]
    anomaly = _describe_anomaly_mode(facts.critical) if facts.critical is not None else None
    if anomaly is not None:
        seen.insert(0, anomaly[1])
    if facts.critical is not None and LAUNCH_BLOCKING not in variables and launches_block(facts.critical):
        seen.append(Evidence(f"{LAUNCH_BLOCKING}: each launch call ends after its kernel does", facts.critical.where()))
        variables.append(LAUNCH_BLOCKING)
    if not seen:
        return _look_at_switches(facts)
    remedies = [WITHOUT_ANOMALY_MODE] if anomaly is not None else []
    remedies += [f"unset {', '.join(variables)}"] if variables else []
    cost_ms = anomaly[0] if anomaly is not None else None
    advice, certain = "; ".join(remedies), anomaly is not None
    return Finding(cost_ms=cost_ms, gain_ms=cost_ms, evidence=tuple(seen), advice=advice, certain=certain)


def _look_at_switches(facts: Facts) -> Observation:
    """Say where no switch was seen: in the run's variables, in a trace, or in neither."""
    seen = []
    if facts.run is not None:
        seen.append(Evidence("no known switch among the variables that the run wrote down", RUN_FILE))
    if facts.critical is not None and len(facts.critical.trace.rows[Kind.OP]):
        seen.append(Evidence("no anomaly mode and no launches that block", facts.critical.where()))
    return saw(*seen) if seen else could_not_look(record=Recording.RUN_FOLDER)


WITHOUT_ANOMALY_MODE = "leave out torch.autograd.set_detect_anomaly(True) (detect_anomaly=True of a trainer)"


def _describe_anomaly_mode(one: RankFacts) -> tuple[float, Evidence] | None:
    """Its cost in ms per step, and what was seen; None without it."""
    checks = find_anomaly_checks(one)
    if not len(checks):
        return None
    cost_ms = _measure_anomaly_mode(one, checks)
    number = counted(round(one.per_step(checks)), "check")
    text = f"autograd's anomaly mode: {number} of backward's results per step, {one.of_step(cost_ms)}"
    return cost_ms, Evidence(text, one.where(int(checks[0])))


SEARCH = "torch.distributed.ddp.reducer::search_unused_parameters"
SINK = "_DDPSink"  # copies the results of forward, so that all of them have a gradient
TO_GRADIENT = "torch.distributed.ddp.reducer::copy_bucket_to_grad"
GIVEN = "AccumulateGrad"


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
    searches = one.rows_named(SEARCH.__eq__, Kind.OP, Kind.ANNOTATION)
    if not len(searches):
        return saw_nothing(one, "no search for unused parameters")
    copies = one.rows_named(SINK.__eq__, Kind.OP)
    search_ms, copy_ms = one.covered_ms(searches), one.covered_ms(one.work_under(copies))
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
    cost = copy_ms + (measure_exposed_search(one) if one.time.on_gpu else search_ms)
    cost_ms, rank = cost if one.share(cost) >= MIN_SHARE_SHOWN else None, one.time.rank
    return Finding(
        cost_ms=cost_ms, gain_ms=cost_ms, evidence=tuple(shown), advice=advice, certain=not unused, rank=rank
    )


def measure_exposed_search(one: RankFacts) -> float:
    """Measure the search for unused parameters that the device does not work beside, in ms per step."""
    return one.exposed_ms(one.rows_named(SEARCH.__eq__, Kind.OP, Kind.ANNOTATION))


def _count_unused(one: RankFacts, searches: int) -> int:
    """Parameters of a search that got no gradient; 0 where the trace does not tell."""
    written = one.rows_named(TO_GRADIENT.__eq__, Kind.OP, Kind.ANNOTATION)
    given = one.rows_named(lambda name: name.startswith(NODE) and GIVEN in name, Kind.OP)
    return max(0, len(written) - len(given)) // searches if len(given) else 0
