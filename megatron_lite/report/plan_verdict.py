"""The first lines of a plan: does training fit, or generating; how fast can it be, how long does it take."""

from megatron_lite.estimate.hardware import PROCESSORS
from megatron_lite.estimate.inference import InferencePrediction
from megatron_lite.estimate.prediction import LedgerRow
from megatron_lite.estimate.step_time import Duration
from megatron_lite.estimate.what_if import Fit
from megatron_lite.report.plan_figures import Outlook, PlanReport
from megatron_lite.report.text import milliseconds, percent
from megatron_lite.units import GIB, count, duration, short_count, size


def verdicts(report: PlanReport) -> list[str]:
    """A sentence for each GPU that was named; without any the peak, and how to learn more."""
    if report.inference:
        return _of_inference(report)
    if not report.outlooks:
        peak = f"peak {size(peak_bytes(report))} of tensors on each GPU, {where(report)}"
        return [f"{peak}; --gpu NAME shows whether it fits and how fast it can be"]
    return [_verdict(report, outlook) for outlook in report.outlooks]


def peak_bytes(report: PlanReport, outlook: Outlook | None = None) -> int:
    """The exact one if it was asked for, else that on the outlook's GPU, or on the first one."""
    return report.exact.allocated_peak_bytes if report.exact else (outlook or report).memory.peak.num_bytes


def where(report: PlanReport) -> str:
    """'at cross entropy (backward), estimated'."""
    peak = report.memory.peak
    if report.exact is None:
        return f"at {peak.where} ({peak.phase}), estimated"
    same = report.exact.phase == peak.phase
    return f"at {peak.where} ({peak.phase})" if same else f"in {report.exact.phase}"


def _verdict(report: PlanReport, outlook: Outlook) -> str:
    peak, room = peak_bytes(report, outlook), outlook.room_bytes
    of_room = f"peak {peak / GIB:.1f} of {room / GIB:.1f} GiB ({percent(peak / room)}), {where(report)}"
    name = outlook.processor.name
    if peak > room:
        return f"does not fit in one {name}: {of_room}{_way_out(outlook)}"
    if peak > room * (1 - report.margin):
        left = f"less than {percent(report.margin)} is left for CUDA, NCCL and what the allocator loses"
        return f"may fit in one {name}: {of_room}; {left}{_way_out(outlook)}; {speed(outlook)}"
    return f"fits in one {name}: {of_room}; {speed(outlook)}"


def _way_out(outlook: Outlook) -> str:
    return f"; {fit_sentence(outlook.fit)}" if outlook.fit else ""


def fit_sentence(fit: Fit) -> str:
    """'it fits with --micro-batch-size 2 (10.84 GiB)'."""
    if fit.found:
        words = fit.found.words or "no change at all, by formula"
        return f"it fits with {words} ({size(fit.found.peak_bytes)})"
    too_much = (
        f"{size(fit.least.peak_bytes - fit.budget_bytes)} more than there is with {percent(fit.margin)} left free"
    )
    least = f"no micro-batch and no recomputation makes it fit: at least {size(fit.least.peak_bytes)}, {too_much}"
    if fit.way_out is None:
        return f"{least}; nor does a shorter sequence: it needs a smaller model{_larger_gpu(fit)}"
    return f"{least}; smallest change that fits: {fit.way_out.words} ({size(fit.way_out.peak_bytes)})"


def _larger_gpu(fit: Fit) -> str:
    """The smallest one of the table that holds what needs least."""
    gib = fit.least.peak_bytes / (1 - fit.margin) / GIB
    large = [one for one in PROCESSORS if (one.memory_gib or 0.0) >= gib]
    if not large:
        return ", no GPU of the table is large enough"
    least = min(large, key=lambda one: one.memory_gib)
    return f" or a GPU of {gib:.1f} GiB, such as {least.name} ({least.memory_gib:g} GiB)"


def _of_inference(report: PlanReport) -> list[str]:
    """For each GPU with weights of the training's precision."""
    found = report.inference
    at = 0 if report.plan.precision == "fp32" else 1  # WEIGHT_BITS
    weights = found.weights[at]
    held = f"with {weights.name} and a cache for {count(found.batch)} x {count(found.tokens)} tokens"
    if not report.outlooks:
        takes = f"generating takes {size(found.num_bytes(weights))} of tensors {held}"
        return [f"{takes}; --gpu NAME shows whether it fits and how fast it can be"]
    return [_inference_verdict(outlook, at, held, report.margin) for outlook in report.outlooks]


def _inference_verdict(outlook: Outlook, at: int, held: str, margin: float) -> str:
    found, room, name = outlook.inference, outlook.room_bytes, outlook.processor.name
    needed = found.num_bytes(found.weights[at])
    of_room = f"{needed / GIB:.1f} of {room / GIB:.1f} GiB ({percent(needed / room)}) {held}"
    best = f"; at best {count(found.tokens_per_s(found.token_rows[at]))} tokens/s" if found.token_rows else ""
    if needed <= room * (1 - margin):
        return f"generating fits in one {name}: {of_room}{best}"
    other = _smaller_inference(found, found.weights[at], room * (1 - margin))
    if needed <= room:
        return f"generating may fit in one {name}: {of_room}; less than {percent(margin)} is left{other}{best}"
    return f"generating does not fit in one {name}: {of_room}{other}"


def _smaller_inference(found: InferencePrediction, weights: LedgerRow, budget: float) -> str:
    """The largest batch with these weights, else the widest weights with this batch."""
    one_bytes = found.cache.num_bytes // found.batch
    batch = int((budget - weights.num_bytes) // one_bytes)
    if batch >= 1:
        return f"; it fits with --batch {batch} ({size(weights.num_bytes + batch * one_bytes)})"
    fitting = next((row for row in found.weights if found.num_bytes(row) <= budget), None)
    return f"; it fits with {fitting.name} ({size(found.num_bytes(fitting))})" if fitting else ""


def speed(outlook: Outlook) -> str:
    """'at best 163 ms per step, 201,000 tokens/s, 17.3 days for 300B tokens'."""
    if not outlook.time.peak_tflops or outlook.duration is None:
        return "how fast it can be is not known: the table has no peak of this GPU in this precision"
    step = milliseconds(outlook.time.step_ms)
    return f"at best {step} ms per step, {count(outlook.time.tokens_per_s)} tokens/s, {lasting(outlook.duration)}"


def lasting(found: Duration) -> str:
    """'17.3 days for 300B tokens'."""
    return f"{span(found)} for {short_count(found.tokens)} tokens"


def span(found: Duration) -> str:
    """Days above two of them, else hours, minutes, seconds."""
    return f"{found.days:,.1f} days" if found.days >= 2 else duration(found.seconds)
