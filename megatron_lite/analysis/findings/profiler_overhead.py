"""The profiler slowed its steps down so much that the trace's shares are not the run's.

Meaning: recording costs host time per operator (about half a microsecond, with shapes and stacks several), and none
    on the device. A step that was bound by the device looks bound by the host.
Measured: the median step inside the window against the median of the steps before it, by the run's own clock. It is
    certain only if the steps after the window are as short again; ranks that had no cores (busy-machine) explain long
    steps without the profiler.
Cost: none in the unprofiled run. Trust device times of the trace; distrust host times, gaps and launch-bound.
Do: record less, for comparison once without stacks and shapes; a larger micro-batch hides the recording.
Flags: leave out --pytorch-profiler-collect-callstack, --pytorch-profiler-collect-shapes and
    --pytorch-profiler-collect-memory, on CPUs --record-memory-history too; more steps between --profile-step-start
    and --profile-step-end do not help.
False alarm: steps before the window that were not alike, as in a ramp-up of the batch.
"""

from megatron_lite.analysis.findings.base import Evidence, Finding, in_ms
from megatron_lite.analysis.findings.run_settings import argument
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.thresholds import is_by_chance

CODE, TITLE = "profiler-overhead", "profiler that disturbs what it measures"
TOO_MUCH = 1.25  # a quarter more: a cause of a tenth of the step can then be the profiler's own
COSTLY = tuple(f"--pytorch-profiler-collect-{what}" for what in ("callstack", "memory", "shapes"))
COSTLY_ON_CPUS = ("--record-memory-history", *COSTLY)


def find(facts: Facts) -> Finding | None:
    run = facts.run
    slowdown = run.profiler_slowdown if run else None
    if slowdown is None or not slowdown > TOO_MUCH:
        return None
    if is_by_chance(run.profiled_step_ms - run.before_profile_ms, run.without_core):
        return None  # busy-machine says why
    text = (
        f"steps inside the window take{run.on_rank} {slowdown:.2f} x as long as those before it (median "
        f"{in_ms(run.profiled_step_ms)})"
    )
    if run.after_profile_ms is not None:
        text += f"; those after it {'again' if run.recovered else 'still'} {in_ms(run.after_profile_ms)}"
    on_cpu = facts.plan.get("device") == "cpu"
    costly = COSTLY_ON_CPUS if on_cpu else COSTLY
    used = [flag for flag in costly if argument(facts, flag.removeprefix("--").replace("-", "_"))]
    trust = "the run's own step times, not the trace's" if on_cpu else "device times, not gaps"
    without = f" without {', '.join(used)}" if used else " with a larger micro-batch"
    seen = Evidence(text, "steps.jsonl")
    advice = f"trust {trust}; profile again{without}"
    return Finding(evidence=(seen,), advice=advice, certain=bool(run.recovered))
