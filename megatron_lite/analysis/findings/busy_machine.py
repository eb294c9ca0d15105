"""Ranks that were ready to compute and had no core.

Meaning: other programs, or more threads than cores, take the cores that the ranks want. Steps get
    longer by chance, now on one rank, now on another; all times tell of the machine as much as
    of the run.
Measured: for how long the thread that trains was ready and had no core, by Linux's own account
    (schedstat), per step in steps.jsonl; elsewhere how often its threads lost their cores without
    having asked (involuntary context switches per second of CPU time).
Cost: the wait of the rank that waits longest; the others wait for it in the next collective.
Do: look for other programs (top), fewer threads or loader workers, a cgroup's limit of CPU time;
    give the run cores of its own; measure again on a quiet machine.
Flags: OMP_NUM_THREADS times the ranks, plus --num-workers, at most the number of cores.
False alarm: none of the wait; on a GPU it is hidden as long as the device has work in its queue.
"""

from megatron_lite.analysis.findings.base import Evidence, Finding
from megatron_lite.analysis.findings.run_settings import hardware, on_gpu, part, whole
from megatron_lite.analysis.findings.step_measurements import in_ms
from megatron_lite.analysis.run.run_results import RankMedians
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.variables import THREADS

CODE = "busy-machine"
TITLE = "ranks that are not given their cores"
MAX_SHOWN = 8  # ranks


def find(facts: Facts) -> Finding | None:
    run = facts.run
    if run is None or run.without_core is None:
        return None
    rank, ms = run.without_core
    advice, flags = _way_out(facts)
    return Finding(
        cost_ms=ms,
        evidence=tuple(Evidence(text, "steps.jsonl") for text in _seen(run.ranks, rank)),
        advice=advice,
        flags=flags,
        gain_ms=ms,
        certain=ms is not None and not on_gpu(facts),
        rank=rank,
    )


def _seen(ranks: RankMedians, rank: int) -> list[str]:
    """What the worst rank got, and the range of all."""
    step, told = ranks.step_ms[rank], []
    if ranks.core_wait_ms:
        pairs = list(zip(ranks.core_wait_ms, ranks.step_ms))[:MAX_SHOWN]
        shares = ", ".join(f"{wait / ms:.0%}" for wait, ms in pairs if wait >= 0)  # NaN is not
        wait = f"rank {rank} is ready and has no core for {in_ms(ranks.core_wait_ms[rank])} of a step of {in_ms(step)}"
        told.append(f"{wait}; ranks from 0 on: {shares}")
    got = f"rank {rank} gets {in_ms(ranks.cpu_ms[rank])} of CPU time in a step of {in_ms(step)}" if ranks.cpu_ms else ""
    if got and ranks.involuntary_switches:
        got += f", and loses a core {ranks.involuntary_switches[rank]:,.0f} times"
    return [*told, got] if got else told


def _way_out(facts: Facts) -> tuple[str, tuple[str, ...]]:
    """By whose threads they are, as far as the run's record says."""
    cpus, threads = whole(hardware(facts, "cpus")), whole(hardware(facts, "threads"))
    ranks = whole(part(facts, "world", "local_size"))
    if cpus and threads and ranks and ranks * threads > cpus:
        return f"start fewer threads ({THREADS}): {ranks} ranks x {threads} threads share {cpus} cores", (THREADS,)
    return "stop what else runs on these cores (top shows it), or give the run cores of its own, and measure again", ()
