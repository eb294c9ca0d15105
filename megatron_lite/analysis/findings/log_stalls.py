"""Logging takes a notable part of each step.

Meaning: reading losses and norms waits for the device, and formatting, TensorBoard and files take
    host time. At every step that is part of every step.
Measured: with a GPU, idle time after waits in the phase log; without one, the median time of that
    phase in ordinary steps.
Cost: that time per step.
Do: log less often; drop figures that take work of their own (parameter norm, zeros in gradients).
Flags: --log-interval 100, --tensorboard-log-interval, without --log-params-norm and
    --log-num-zeros-in-grad.
False alarm: a demonstration that is meant to print every step.
"""

import math
from statistics import median

from megatron_lite.analysis.findings.base import Evidence, Finding
from megatron_lite.analysis.findings.run_settings import argument, on_gpu
from megatron_lite.analysis.findings.step_measurements import MATTERS, MIN_SHARE_SHOWN, in_ms, of_step, share, where
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.phases import Phase

CODE = "log-stalls"
TITLE = "logging in every step"
LOG = Phase.LOG.value
COSTLY = {"log_params_norm": "--log-params-norm", "log_num_zeros_in_grad": "--log-num-zeros-in-grad"}


def find(facts: Facts) -> Finding | None:
    seen = _of_trace(facts) if on_gpu(facts) else _of_run(facts)
    if seen is None:
        return None
    cost, evidence = seen
    costly = [flag for name, flag in COSTLY.items() if argument(facts, name)]
    now = argument(facts, "log_interval")
    advice = f"a larger --log-interval{f' (now {now})' if now else ''}"
    advice += f", without {', '.join(costly)}" if costly else ""
    return Finding(
        cost_ms=cost,
        evidence=(evidence,),
        advice=advice,
        flags=("--log-interval 100",),
        gain_ms=cost,
    )


def _of_trace(facts: Facts) -> tuple[float, Evidence] | None:
    one = facts.critical
    sites = [site for site in one.time.syncs if site.phase == LOG] if one is not None else []
    cost = sum(site.idle_ms for site in sites)
    if not sites or share(cost, one) < MIN_SHARE_SHOWN:
        return None
    return cost, Evidence(
        f"after {sum(site.per_step for site in sites):.3g} waits in {LOG} the device idles {of_step(cost, one)}",
        where(one),
    )


def _of_run(facts: Facts) -> tuple[float, Evidence] | None:
    run = facts.run
    times = zip(run.phases_ms.get(LOG, ()), run.ordinary) if run and run.steady_step_ms else ()
    known = [ms for ms, ordinary in times if ordinary and not math.isnan(ms)]
    if not known or median(known) < MATTERS * run.steady_step_ms:
        return None
    text = (
        f"the phase {LOG} takes {in_ms(median(known))} of a step of {in_ms(run.steady_step_ms)} (medians of "
        "ordinary steps)"
    )
    return median(known), Evidence(text, "steps.jsonl")
