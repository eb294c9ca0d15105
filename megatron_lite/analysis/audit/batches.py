"""The point about batch, accumulation and schedule."""

import math
from itertools import pairwise

from megatron_lite.analysis.audit.audit_results import Case, Outcome, blamed, failed, not_seen, passed
from megatron_lite.analysis.audit.recording import RUN_FOLDER
from megatron_lite.analysis.findings.base import Evidence
from megatron_lite.analysis.findings.seen.accumulation import micro_batches_seen
from megatron_lite.analysis.findings.seen.planned import argument, part, whole
from megatron_lite.analysis.findings.seen.steady import counted, rows_named, steady_steps, where
from megatron_lite.analysis.run.learning import learning_of
from megatron_lite.analysis.run.run_results import Run
from megatron_lite.analysis.run_facts import Facts, RankFacts
from megatron_lite.analysis.trace.columns import Kind


def one_update_per_batch(case: Case) -> Outcome:
    """Global batch = micro-batch x ranks x micro-batches; samples and learning rate follow updates."""
    if found := case.found("reduce-every-micro-batch"):
        return blamed(found)
    facts = case.facts
    if facts.run and (why := learning_of(facts.run).nothing):
        code = next((one.code for one in case.found("overflow-storm", "no-learning")), "")
        return failed(
            "see why no step improves the weights", Evidence(f"no update at all: {why}", "steps.jsonl"), code=code
        )
    traced = _traced(facts.critical)
    passes = _samples_per_pass(facts)
    sizes = [one for one in facts.run.batch_sizes if one > 0] if facts.run else []
    if not passes or not sizes:
        return not_seen(RUN_FOLDER, *traced)
    checks = (
        _odd_batch(facts.run, passes),
        _other_batch(facts, sizes),
        _other_micro_batches(facts, sizes, passes),
        _updates(facts),
        _consumed(facts.run),
        _learning_rate(facts.run),
    )
    wrong = [Evidence(text, "steps.jsonl") for text in checks if text]
    if wrong:
        return failed(
            "micro-batch size x ranks x micro-batches must give --global-batch-size, with one update for all of it",
            *wrong,
            *traced,
        )
    text = (
        f"{sizes[-1]:,.0f} samples per step = micro-batches of {whole(argument(facts, 'micro_batch_size'))} x "
        f"{counted(facts.run.world_size, 'rank')} x {sizes[-1] / passes:,.0f} of them, in {len(sizes)} steps"
    )
    return passed(Evidence(text, "steps.jsonl"), *_schedule(facts.run), *traced)


def _samples_per_pass(facts: Facts) -> int | None:
    size, world = whole(argument(facts, "micro_batch_size")), facts.run.world_size if facts.run else None
    return size * world if size and world else None


def _odd_batch(run: Run, passes: int) -> str:
    wrong = [(at, size) for at, size in zip(run.iterations, run.batch_sizes) if size > 0 and size % passes]
    return (
        f"iteration {wrong[0][0]} has {wrong[0][1]:g} samples, no multiple of {passes} (micro-batch x ranks)"
        if wrong
        else ""
    )


def _other_batch(facts: Facts, sizes: list[float]) -> str:
    """Against the plan, where nothing ramps up."""
    final = whole(part(facts, "batch", "final"))
    if not final or part(facts, "batch", "start") or set(sizes) == {final}:
        return ""
    return f"the plan has {final} samples per step, the steps have {min(sizes):g} to {max(sizes):g}"


def _other_micro_batches(facts: Facts, sizes: list[float], passes: int) -> str:
    one = facts.critical
    number = micro_batches_seen(one) if one is not None else 0.0
    if not number or len(set(sizes)) > 1 or number == sizes[0] / passes:
        return ""
    return f"{number:.3g} backward passes per step in the trace, {sizes[0] / passes:g} micro-batches by the plan"


def _updates(facts: Facts) -> str:
    one = facts.critical
    number = _updates_seen(one) if one is not None else 0.0
    return f"{number:.3g} optimizer steps per iteration in the trace" if number > 1 else ""


def _updates_seen(one: RankFacts) -> float:
    return len(rows_named(one, lambda name: name.startswith("Optimizer.step#"), Kind.ANNOTATION)) / steady_steps(one)


def _traced(one: RankFacts | None) -> tuple[Evidence, ...]:
    number = micro_batches_seen(one) if one is not None else 0.0
    if not number:
        return ()
    updates = _updates_seen(one)
    told = f", {counted(updates, 'optimizer step')}" if updates else ""
    return (Evidence(f"per step {counted(number, 'backward range')}{told} in the trace", where(one)),)


def _consumed(run: Run) -> str:
    for at, (before, after), size in zip(run.iterations[1:], pairwise(run.consumed_samples), run.batch_sizes[1:]):
        if after - before != size and not any(map(math.isnan, (before, after, size))):
            return f"iteration {at} has {size:g} samples and counts {after - before:g}"
    return ""


def _learning_rate(run: Run) -> str:
    """A skipped step updates nothing, so that the schedule must wait."""
    for at, (before, after), skipped in zip(run.iterations[1:], pairwise(run.next_lrs), run.skipped[1:]):
        if skipped and before != after and not math.isnan(before) and not math.isnan(after):
            return f"the learning rate goes on from {before:.6g} to {after:.6g} in iteration {at}, which was skipped"
    return ""


def _schedule(run: Run) -> tuple[Evidence, ...]:
    known = [rate for rate in run.next_lrs if not math.isnan(rate)]
    if not known:
        return ()
    text = f"the learning rate is set once per step, {known[0]:.3g} to {known[-1]:.3g}"
    return (Evidence(text + (", and held in skipped ones" if any(run.skipped) else ""), "steps.jsonl"),)
