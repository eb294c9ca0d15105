"""Updates, what is learned by them, and the work between steps."""

import math
import re
from dataclasses import dataclass
from functools import partial

import numpy as np

from megatron_lite.analysis.findings.base import (
    Edit,
    Evidence,
    Finding,
    Observation,
    Recording,
    build_time_finding,
    could_not_look,
    find_lost_time,
    rule,
    saw,
    saw_nothing,
)
from megatron_lite.analysis.findings.settings import WITHOUT
from megatron_lite.analysis.findings.stall_remedies import advise_on_stalls
from megatron_lite.analysis.graph.edits.fusion import fuse_update
from megatron_lite.analysis.graph.edits.left_out import leave_out_phases
from megatron_lite.analysis.graph.edits.saving import read_saving
from megatron_lite.analysis.graph.graph import Graph
from megatron_lite.analysis.rank_facts import MATTERS, MIN_SHARE_SHOWN, RankFacts, in_ms
from megatron_lite.analysis.run.learning import MIN_UPDATES, find_clip_limit, measure_learning
from megatron_lite.analysis.run.run_results import Run
from megatron_lite.analysis.run_facts import Facts, measure_ordinary
from megatron_lite.analysis.trace.columns import Kind
from megatron_lite.formats.file_names import RUN_FILE, STEPS_FILE
from megatron_lite.phases import Phase
from megatron_lite.units import counted, significant

FUSED = re.compile(r"aten::_fused_(adam|adamw|sgd|adagrad)_|FusedAdam|fused_adam", re.IGNORECASE)
# The last operation of an Adam update, over all parameters at once or over each.
FOREACH = "aten::_foreach_addcdiv_"
LOOP = "aten::addcdiv_"
RANGE = "Optimizer.step#"  # PyTorch's own, around step()
OPTIMIZER_PHASE = re.compile(rf"{Phase.OPTIMIZER_STEP}$|Optimizer\.step#")
MIN_TENSORS = 4  # parameter tensors whose loop would not be worth a word


@rule("unfused-optimizer", "optimizer that is not fused", "phases", "kernels", "operators", needs="trace")
def find_unfused_optimizer(facts: Facts, one: RankFacts) -> Finding | Observation:
    """The optimizer updates tensor by tensor, or operation by operation.

    Meaning: AdamW written as a loop launches about ten small kernels per parameter; foreach joins the parameters but
        still reads and writes them once per operation. A fused optimizer does all of it in one pass over memory.
    Measured: names of the operators: aten::addcdiv_ in a loop, aten::_foreach_addcdiv_, or aten::_fused_adamw_; the
        cost is the time of the optimizer's phase (device time; without a GPU the host's).
    Cost: up to that time; one pass over weights, gradients and moments remains.
    Do: torch.optim.AdamW(..., fused=True), on a CPU too; apex or Transformer Engine's FusedAdam for Megatron-LM.
    Flags: none here: this trainer's optimizers are fused.
    False alarm: an optimizer of your own that has no fused form.
    """
    if len(one.rows_named(FUSED.search, Kind.OP, Kind.KERNEL)):
        return saw_nothing(one, "a fused update")
    loops = one.rows_named(LOOP.__eq__, Kind.OP)
    joined = one.rows_named(FOREACH.__eq__, Kind.OP)
    is_foreach = len(joined) > 0
    if not is_foreach and one.per_step(loops) < MIN_TENSORS:
        return could_not_look(Evidence("no update whose operators are known", one.where()))
    cost = _measure_update(one)
    how = "foreach" if is_foreach else f"a loop over {one.per_step(loops):,.0f} tensors"
    text = f"the update is {how}; the optimizer takes {one.of_step(cost)}"
    advice = "a fused optimizer: torch.optim.AdamW(..., fused=True)"
    first = joined[0] if is_foreach else loops[0]
    return find_lost_time(
        one,
        cost,
        text,
        advice,
        row=first,
        certain=not is_foreach,
        edit=Edit("fuse the optimizer", _fuse_update),
    )


def _fuse_update(graph: Graph) -> Graph:
    """Let the update read and write its tensors in one pass, in every phase that holds some of it."""
    for phase in graph.phases:
        if OPTIMIZER_PHASE.search(phase):
            graph = fuse_update(graph, phase)
    return graph


def _measure_update(one: RankFacts) -> float:
    """Measure the optimizer's step in ms per step: its phase's work, else PyTorch's range around it."""
    phases_ms = [phase.device_ms for phase in one.time.phases if OPTIMIZER_PHASE.search(phase.name)]
    if phases_ms:
        return max(phases_ms)
    return one.covered_ms(one.rows_named(lambda name: name.startswith(RANGE), Kind.ANNOTATION))


ZEROES = ("aten::zero_", "aten::_foreach_zero_")
ZERO_GRAD_PHASES = ("Optimizer.zero_grad", "zero_grad")


@rule("zeroed-gradients", "gradients zeroed instead of freed", "phases", "kernels", "operators", needs="trace")
def find_zeroed_gradients(facts: Facts, one: RankFacts) -> Finding | Observation:
    """Gradients are filled with zeros instead of freed.

    Meaning: zero_grad(set_to_none=False), or an old PyTorch's default, writes zeros into every gradient, and backward
        then reads them to add to them. If freed (None), a gradient is simply written by the next backward.
    Measured: aten::zero_ and its kin within the range of zero_grad; cost is their device time and the idle time while
        the host launches them, tensor by tensor. Without a GPU the operators' time.
    Cost: that time, and as much again in backward, which is not counted here.
    Do: optimizer.zero_grad(set_to_none=True), PyTorch's default since 2.0.
    Flags: none here: this trainer frees gradients.
    False alarm: code that reads .grad of parameters that got no gradient.
    """
    rows = one.in_phases(one.rows_named(ZEROES.__contains__, Kind.OP), *ZERO_GRAD_PHASES)
    if not len(rows):
        return saw_nothing(one, "no gradient is filled with zeros")
    phases = [phase for phase in one.time.phases if phase.name in ZERO_GRAD_PHASES]
    sites = [site for site in one.time.hosts if site.phase in ZERO_GRAD_PHASES]
    cost = sum(phase.device_ms for phase in phases)
    cost += sum(site.idle_ms for site in sites)
    calls = counted(round(one.per_step(rows)), "call")
    text = f"{calls} per step in zero_grad: {one.of_step(cost)}"
    advice = "free gradients instead of zeroing them: optimizer.zero_grad(set_to_none=True)"
    edit = Edit("free gradients instead of zeroing them", partial(leave_out_phases, phases=ZERO_GRAD_PHASES))
    return find_lost_time(one, cost, text, advice, row=rows[0], cheap=True, edit=edit)


MAX_SKIPPED_SHARE = 0.05  # of the steps: dynamic scaling at Megatron's window of 1000 skips one in 500 at most
MIN_SKIPS = 4  # fewer may be a single bad batch


@rule("overflow-storm", "steps thrown away because gradients overflow", "run", "losses", needs="run")
def find_overflow_storm(facts: Facts, run: Run) -> Finding | Observation:
    """Many steps are skipped because gradients overflow.

    Meaning: with fp16 a step whose gradients hold Inf or NaN is thrown away and the loss scale is lowered. A few at the
        beginning are how the scale finds its size; many later mean that values are truly too large.
    Measured: skipped steps in steps.jsonl, those before the first good step left out; all of them where there is no
        good step.
    Cost: each skipped step is computed for nothing.
    Do: bf16, whose range is that of fp32; a smaller learning rate or longer warm-up; look at the layer whose values
        explode (logits, a norm in fp16).
    Flags: --bf16 instead of --fp16; --lr, --lr-warmup-iters; --initial-loss-scale 65536 saves the steps at the
        beginning.
    False alarm: one skip per --loss-scale-window: that is the scale trying a larger size.
    """
    if not run.steps:
        return could_not_look()
    settled = run.skipped[run.skipped.argmin() :]  # from the first good step on
    number = int(settled.sum())
    if number < MIN_SKIPS or number < MAX_SKIPPED_SHARE * len(settled):
        return _look_at_scale(facts, run)
    share = number / len(settled)
    text = f"{number:,} of {len(settled):,} steps after the first good one were skipped ({share:.0%})"
    if run.skipped.all():
        text = f"all {number:,} steps were skipped: none has changed the weights"
    cost_ms = None
    if run.steady_step_ms:
        cost_ms = share * run.steady_step_ms
        text += f": {in_ms(cost_ms)} of every {in_ms(run.steady_step_ms)} are computed for nothing"
    advice = "train in bf16 (--bf16 instead of --fp16), or lower --lr and lengthen --lr-warmup-iters"
    return build_time_finding(cost_ms, [Evidence(text, STEPS_FILE)], advice, ("--bf16",))


MIN_SETTLED_STEPS = 20  # after the first good one, of which one skipped is 5%


def _look_at_scale(facts: Facts, run: Run) -> Observation:
    """Tell skipped steps and the loss scale of a run that has one."""
    scales = run.loss_scale[run.loss_scale > 0]
    if not len(scales):
        return could_not_look()
    text = (
        f"{run.skipped.sum():,} of {run.steps:,} steps skipped, "
        f"the loss scale is {significant(scales[-1], 6)} at the end"
    )
    settled = 0  # steps from the first good one on
    if not run.skipped.all():
        settled = run.steps - int(run.skipped.argmin())
    if run.skipped.any() and settled < MIN_SETTLED_STEPS:
        record = f"{Recording.LONGER_RUN}; --initial-loss-scale 65536 avoids the skipped steps at the beginning"
        since = f"{counted(settled, 'step')} since the first good one"
        return could_not_look(Evidence(f"{text}; {since}", STEPS_FILE), record=record)
    precision = facts.plan.precision
    if precision not in (None, "", "fp16"):
        text += f": {precision} has the range of fp32 and needs none"
    return saw(Evidence(text, STEPS_FILE))


TOO_SMALL = 16.0  # gradients of a healthy run bear scales of thousands; fp16's smallest number is 6e-8
FALLEN = 256.0  # times from its highest after the first good step
MIN_SCALED_STEPS = 20


@rule("scale-collapse", "loss scale that has collapsed", "run", "losses", needs="run")
def find_scale_collapse(facts: Facts, run: Run) -> Finding | Observation:
    """The fp16 loss scale has fallen to where gradients vanish.

    Meaning: overflows keep halving the scale. Near 1, small gradients round to zero in fp16: training goes on without
        error, and learns little or nothing.
    Measured: the loss scale of the last steps in steps.jsonl, and what it was before.
    Cost: not time: trust in the run.
    Do: stop and find what overflows: a learning rate too high, a layer that explodes, bad data. bf16 needs no scale.
    Flags: --bf16 instead of --fp16; --min-loss-scale stops the fall and masks it; --lr, --clip-grad.
    False alarm: a fixed --loss-scale 1, chosen on purpose.
    """
    if facts.plan.precision not in (None, "fp16"):
        return saw(Evidence(f"{facts.plan.precision} needs no loss scale", RUN_FILE))
    if facts.settings.loss_scale:
        return saw(Evidence("the loss scale is fixed (--loss-scale)", RUN_FILE))
    settled = run.loss_scale[run.skipped.argmin() :] if run.steps else run.loss_scale
    known = settled[settled > 0]  # NaN is not
    if len(known) < MIN_SCALED_STEPS:
        return could_not_look(record=Recording.LONGER_RUN)
    highest = known.max()
    at_end = known[-1]
    end = significant(at_end, 6)
    if at_end > TOO_SMALL or highest < FALLEN * at_end:
        text = f"the loss scale is {end} at the end, and was {significant(highest, 6)} at most"
        return saw(Evidence(text, STEPS_FILE))
    skipped = f"{run.skipped.sum():,} of {run.steps:,} steps were skipped"
    text = f"the loss scale fell from {highest:,.0f} to {end} ({skipped})"
    advice = "stop and find what overflows; bf16 needs no loss scale (--bf16 instead of --fp16)"
    return Finding(evidence=(Evidence(text, STEPS_FILE),), advice=advice, flags=("--bf16",))


@rule("no-learning", "losses that show no learning", "run", "losses", needs="run")
def find_no_learning(facts: Facts, run: Run) -> Finding | Observation:
    """The run computes, but its losses show that it does not learn.

    Meaning: the loss of updates is NaN or Inf, or it is as high at the end as at the beginning. The steps may be as
        fast as they like.
    Measured: losses in steps.jsonl, skipped steps left out: the mean of the first fifth against that of the last fifth,
        from 20 losses on; losses that are no numbers.
    Cost: not time: trust in the run.
    Do: not finite: stop, the weights are lost; go back to the last good checkpoint. Not falling: look at the learning
        rate and its warm-up, at labels that do not belong to their inputs, at data that is shuffled noise.
    Flags: without --no-check-for-nan-in-loss-and-grad such a run stops; --lr, --lr-warmup-iters, --clip-grad.
    False alarm: a benchmark with a learning rate of 0; data that the model knows already. Mock data and continued runs
        are not judged.
    """
    learning = measure_learning(run)
    seen = Evidence(learning.losses, STEPS_FILE)
    if learning.not_finite:
        advice = "go back to the last checkpoint before that, lower --lr, and drop --no-check-for-nan-in-loss-and-grad"
        return Finding(evidence=(seen,), advice=advice, flags=("--lr",))
    if learning.falls is None:
        return could_not_look(record=Recording.LONGER_RUN)
    if learning.falls:
        return saw(seen)
    # random tokens teach nothing, a continued run may have learned what it can, and so may a script's
    if facts.settings.mock_data or run.iterations[0] > 1 or facts.is_watched:
        told = "mock data, continued runs and other scripts are not judged"
        return could_not_look(Evidence(f"{learning.losses}; {told}", STEPS_FILE))
    advice = "compare --lr and its warm-up with a run that learns, and look at the data (megatron-lite inspect PREFIX)"
    return Finding(evidence=(seen,), advice=advice, flags=("--lr",), certain=False)


@rule("hard-clipping", "gradients that are always clipped hard", "run", "losses", needs="run")
def find_hard_clipping(facts: Facts, run: Run) -> Finding | Observation:
    """The gradients' norm is far above the limit of clipping in nearly every step.

    Meaning: clipping is meant for rare outliers. Where each update is scaled down to the limit, the limit and not the
        gradient decides the update's size: with SGD it is the learning rate in disguise, with Adam the scale cancels
        out, and what remains is that steps with large gradients count no more than others.
    Measured: gradient norms in steps.jsonl (of watched scripts what torch.nn.utils.clip_grad_norm_ returned), skipped
        steps left out, against --clip-grad: above 10 times the limit in 95% of the updates, from 10 updates on.
    Cost: not time: what the updates mean.
    Do: look for what makes gradients large: a loss that is summed instead of averaged, no warm-up, an initialization
        that is too wide, targets that are not scaled. If the norm is right, raise the limit to what it is usually.
    Flags: --clip-grad, --lr, --lr-warmup-iters, --init-method-std.
    False alarm: the first steps of training; a recipe that normalizes gradients on purpose.
    """
    limit = find_clip_limit(run)
    if limit is None or limit <= 0:
        return could_not_look(record=Recording.RUN_FOLDER)
    clipped = measure_learning(run).clipped
    if clipped is None and (~np.isnan(run.grad_norms)).sum() < MIN_UPDATES:
        return could_not_look(record=Recording.LONGER_RUN)
    if clipped is None:
        text = f"the gradients' norm is not far above the limit of clipping ({limit:g}) in nearly all updates"
        return saw(Evidence(text, STEPS_FILE))
    times = f"{clipped:,.0f} times --clip-grad {limit:g} (median)"
    text = f"the gradients' norm is {times}, and clipped in nearly all updates"
    return Finding(
        evidence=(Evidence(text, STEPS_FILE),),
        advice=f"find what makes gradients large, or raise --clip-grad (now {limit:g}) to the usual norm",
        flags=("--clip-grad",),
        certain=False,
    )


LOG = Phase.LOG.value
RARELY_LOGGED = 100  # --log-interval from which on logging is no part of each step


@rule("log-stalls", "logging in every step", "step", "phases", "run")
def find_log_stalls(facts: Facts) -> Finding | Observation:
    """Logging takes a notable part of each step.

    Meaning: reading losses and norms waits for the device, and formatting, TensorBoard and files take host time. At
        every step that is part of every step.
    Measured: with a GPU, idle time in the phase log, in lines of Python that log, and after their waits; without one,
        the median time of that phase in typical steps.
    Cost: that time per step.
    Do: log less often; drop figures that take work of their own (parameter norm, zeros in gradients).
    Flags: --log-interval 100, --tensorboard-log-interval, without --log-params-norm and --log-num-zeros-in-grad.
    False alarm: a demonstration that is meant to print every step.
    """
    measured = _measure_idle_in_logging(facts.critical) if facts.on_gpu else _measure_logging_phase(facts.run)
    if isinstance(measured, Observation):
        return measured
    settings = facts.settings
    figures = {
        "--log-params-norm": settings.log_params_norm,
        "--log-num-zeros-in-grad": settings.log_num_zeros_in_grad,
    }
    without = [f"{WITHOUT}{flag}" for flag, is_on in figures.items() if is_on]
    interval = settings.log_interval
    now = f" (now {interval})" if interval else ""
    interval_flag = f"--log-interval {RARELY_LOGGED}"
    advice = f"a larger --log-interval{now}"
    if interval and interval >= RARELY_LOGGED:
        # what the console shows is no part of each step: what is written for TensorBoard may be
        interval_flag = "--tensorboard-log-interval"
        advice = f"a larger --tensorboard-log-interval (--log-interval is {interval})"
    advice = ", ".join([advice, *without])
    edit = Edit("log in rare steps", partial(leave_out_phases, phases=(LOG,)))
    flags = (interval_flag, *without)
    return build_time_finding(measured.cost_ms, [measured.seen], advice, flags, edit=edit)


@dataclass(frozen=True)
class LoggingTime:
    """Time that logging takes of a step."""

    cost_ms: float
    seen: Evidence


def _measure_idle_in_logging(one: RankFacts | None) -> LoggingTime | Observation:
    """Measure a GPU's idle time because of logging; a look where it is little or not seen."""
    if one is None:
        return could_not_look(record=Recording.TRACE)
    sites = [site for site in one.time.syncs if LOG in (site.phase, site.cause)]
    waited_ms = sum(site.idle_ms for site in sites)
    own_ms = one.time.rows.get(LOG, 0.0)
    cost_ms = waited_ms + own_ms
    waits = counted(sum(site.per_step for site in sites), "wait")
    idle = f"{in_ms(waited_ms)} after {waits} in {LOG} and {in_ms(own_ms)} during it"
    seen = Evidence(f"the device idles {idle}: {one.of_step(cost_ms)}", one.where())
    limit = MIN_SHARE_SHOWN if waited_ms > own_ms else MATTERS
    if one.share(cost_ms) >= limit:
        return LoggingTime(cost_ms, seen)
    has_phase = any(part.name == LOG for part in one.time.phases)
    is_named = cost_ms > 0 or has_phase
    if is_named and one.time.step_ms > 0:
        return saw(seen)
    return could_not_look(record=Recording.STACKS)


def _measure_logging_phase(run: Run | None) -> LoggingTime | Observation:
    """Measure the host's time in the phase that logs; a look where it is little or not seen."""
    if run is None or not run.steady_step_ms:
        return could_not_look(record=Recording.RUN_FOLDER)
    cost_ms = measure_ordinary(run, run.phases_ms.get(LOG, ()))
    if cost_ms is None:
        return could_not_look(record=Recording.RUN_FOLDER)
    step = f"a step of {in_ms(run.steady_step_ms)} (medians of typical steps)"
    seen = Evidence(f"the phase {LOG} takes {in_ms(cost_ms)} of {step}", STEPS_FILE)
    if cost_ms < MATTERS * run.steady_step_ms:
        return saw(seen)
    return LoggingTime(cost_ms, seen)


# One of both: a short run's only checkpoint says nothing of how often.
MIN_STEPS = 20
MIN_STALLS = 3
SAVE = Phase.SAVE.value
EVAL = Phase.EVAL.value


@rule("save-and-eval", "stalls for checkpoints and evaluations", "run", needs="run")
def find_save_and_eval(facts: Facts, run: Run) -> Finding | Observation:
    """Training stops for checkpoints and evaluations.

    Meaning: while a checkpoint is written or the validation loss is computed, no step runs. On several ranks the
        slowest writer decides.
    Measured: time of the phases save and eval in steps.jsonl over all steps of the run, spread over them.
    Cost: that time per step. It is in no profile of a few steady steps.
    Do: write in the background from a copy in host memory; save and evaluate less often, or on fewer batches.
    Flags: --async-save, --save-interval, --eval-interval, --eval-iters.
    False alarm: a short run, in which one checkpoint weighs more than it will in a long one; below 20 steps only what
        came three times counts.
    """
    all_ms = math.fsum(run.step_ms)
    times = {SAVE: int(run.saving.sum()), EVAL: int(run.evaluating.sum())}
    is_long = run.steps >= MIN_STEPS
    known = [name for name, number in times.items() if is_long or number >= MIN_STALLS]
    if not all_ms or not known:
        return could_not_look(record=Recording.LONGER_RUN)
    totals_ms = {name: math.fsum(run.phases_ms.get(name, ())) for name in known}
    stalls_ms = {name: total_ms for name, total_ms in totals_ms.items() if total_ms}
    stalled_ms = sum(stalls_ms.values())
    if stalled_ms < MATTERS * all_ms:
        text = f"saving and evaluating take {in_ms(stalled_ms)} of {in_ms(all_ms)} of all steps"
        return saw(Evidence(text, STEPS_FILE))
    read = [read_saving(run, name) for name in stalls_ms]
    stalls = [stall for stall in read if stall is not None]
    # a long first step is not what they are weighed by
    remedy = advise_on_stalls(facts, stalls, training_ns=float(np.median(run.training_ms)) * 1e6)
    seen = [_describe_stalls(run, name, times[name], total_ms) for name, total_ms in stalls_ms.items()]
    return build_time_finding(stalled_ms / run.steps, seen, remedy.advice, remedy.flags, edit=remedy.edit)


def _describe_stalls(run: Run, name: str, number: int, total_ms: float) -> Evidence:
    """Describe what saving or evaluating takes.

    Args:
        run: its steps.
        name: the phase.
        number: how many times it came.
        total_ms: all of them together.
    """
    share = total_ms / math.fsum(run.step_ms)
    each = f"{counted(number, 'time')}, {in_ms(total_ms / number)} each"
    of_all = f"{share:.0%} of the time of the run's {run.steps:,} steps"
    return Evidence(f"{name}: {each}, {of_all}", STEPS_FILE)
