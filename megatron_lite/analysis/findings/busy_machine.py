"""Ranks that were ready to compute and had no core.

Meaning: other programs, or more threads than cores, take the cores that the ranks want. Steps get longer by chance,
    now on one rank, now on another; all times tell of the machine as much as of the run.
Measured: for how long the thread that trains was ready and had no core, by Linux's own account (schedstat), per step
    in steps.jsonl; elsewhere how often its threads lost their cores without having asked (involuntary context
    switches per second of CPU time).
Cost: the wait of the rank that waits longest; the others wait for it in the next collective.
Do: look for other programs (top), fewer threads or loader workers, a cgroup's limit of CPU time; give the run cores
    of its own; measure again on a quiet machine.
Flags: OMP_NUM_THREADS times the ranks, plus --num-workers, at most the number of cores.
False alarm: none of the wait; on a GPU it is hidden as long as the device has work in its queue.
"""

from megatron_lite.analysis.findings.base import Evidence, Finding, in_ms
from megatron_lite.analysis.findings.run_settings import hardware, local_ranks, on_gpu, whole
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.variables import THREADS

CODE, TITLE = "busy-machine", "ranks that are not given their cores"
MAX_SHOWN = 8  # ranks


def find(facts: Facts) -> Finding | None:
    run = facts.run
    if run is None or run.without_core is None:
        return None
    (rank, ms), ranks, told = run.without_core, run.ranks, []
    step = f"a step of {in_ms(ranks.step_ms[rank])}"
    if ranks.core_wait_ms:
        pairs = list(zip(ranks.core_wait_ms, ranks.step_ms))[:MAX_SHOWN]
        shares = ", ".join(f"{wait / step_ms:.0%}" for wait, step_ms in pairs if wait >= 0)  # NaN is not
        wait = f"rank {rank} is ready and has no core for {in_ms(ranks.core_wait_ms[rank])} of {step}"
        told.append(f"{wait}; ranks from 0 on: {shares}")
    if ranks.cpu_ms:
        got = f"rank {rank} gets {in_ms(ranks.cpu_ms[rank])} of CPU time in {step}"
        lost = ranks.involuntary_switches
        told.append(f"{got}, and loses a core {lost[rank]:,.0f} times" if lost else got)
    advice, flags = (
        "stop what else runs on these cores (top shows it), or give the run cores of its own, and measure again",
        (),
    )
    cpus, threads, local = whole(hardware(facts, "cpus")), whole(hardware(facts, "threads")), local_ranks(facts)
    if cpus and threads and local and local * threads > cpus:
        advice = f"start fewer threads ({THREADS}): {local} ranks x {threads} threads share {cpus} cores"
        flags = (THREADS,)
    seen = tuple(Evidence(text, "steps.jsonl") for text in told)
    return Finding(
        cost_ms=ms,
        evidence=seen,
        advice=advice,
        flags=flags,
        gain_ms=ms,
        certain=ms is not None and not on_gpu(facts),
        rank=rank,
    )
