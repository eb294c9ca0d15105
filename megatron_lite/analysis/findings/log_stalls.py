"""Logging takes a notable part of each step.

Meaning: reading losses and norms waits for the device, and formatting, TensorBoard and files take host time. At every
    step that is part of every step.
Measured: with a GPU, idle time after waits in the phase log; without one, the median time of that phase in ordinary
    steps.
Cost: that time per step.
Do: log less often; drop figures that take work of their own (parameter norm, zeros in gradients).
Flags: --log-interval 100, --tensorboard-log-interval, without --log-params-norm and --log-num-zeros-in-grad.
False alarm: a demonstration that is meant to print every step.
"""

from megatron_lite.analysis.findings.base import (
    MATTERS,
    MIN_SHARE_SHOWN,
    Evidence,
    Finding,
    in_ms,
    of_step,
    share,
    where,
)
from megatron_lite.analysis.findings.run_settings import argument, measure_ordinary, on_gpu
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.phases import Phase

CODE, TITLE = "log-stalls", "logging in every step"
LOG = Phase.LOG.value
COSTLY = {"log_params_norm": "--log-params-norm", "log_num_zeros_in_grad": "--log-num-zeros-in-grad"}


def find(facts: Facts) -> Finding | None:
    run, one = facts.run, facts.critical
    if on_gpu(facts):
        sites = [site for site in one.time.syncs if site.phase == LOG] if one is not None else []
        cost = sum(site.idle_ms for site in sites)
        if not sites or share(cost, one) < MIN_SHARE_SHOWN:
            return None
        waits = f"{sum(site.per_step for site in sites):.3g} waits in {LOG}"
        seen = Evidence(f"after {waits} the device idles {of_step(cost, one)}", where(one))
    else:
        cost = measure_ordinary(run, run.phases_ms.get(LOG, ())) if run and run.steady_step_ms else None
        if cost is None or cost < MATTERS * run.steady_step_ms:
            return None
        of_which = f"a step of {in_ms(run.steady_step_ms)} (medians of ordinary steps)"
        seen = Evidence(f"the phase {LOG} takes {in_ms(cost)} of {of_which}", "steps.jsonl")
    costly = [flag for name, flag in COSTLY.items() if argument(facts, name)]
    now = argument(facts, "log_interval")
    advice = f"a larger --log-interval{f' (now {now})' if now else ''}"
    return Finding(
        cost_ms=cost,
        evidence=(seen,),
        advice=f"{advice}, without {', '.join(costly)}" if costly else advice,
        flags=("--log-interval 100",),
        gain_ms=cost,
    )
