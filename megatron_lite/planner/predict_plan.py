"""The answers of `megatron-lite plan`: a training, and generating, on the GPUs that were named."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from megatron_lite.config.plan import Plan, plan_stages
from megatron_lite.formats.hardware import Processor
from megatron_lite.planner.inference import CACHE_BYTES, predict_inference
from megatron_lite.planner.memory import predict_memory
from megatron_lite.planner.plan_results import Exact, Generating, Outlook, StageOutlook, Training
from megatron_lite.planner.step_time import compute_duration, predict_stage_time, predict_time
from megatron_lite.planner.what_if import fit, what_if
from megatron_lite.units import GIB

NOT_WALKED: Mapping[int, Exact] = MappingProxyType({})


def predict_training(
    plan: Plan,
    processors: Sequence[Processor],
    margin: float,
    tokens: int,
    fit_into: Processor | None = None,
    walked: Mapping[int, Exact] = NOT_WALKED,
) -> Training:
    """Predict what a training needs on each GPU, what one change each would do, and with which flags it fits.

    Args:
        plan: Of the rank that holds most.
        processors: GPUs, the first of which decides where only one can be shown.
        margin: Share of a GPU's memory that stays free.
        tokens: Length of the training.
        fit_into: The GPU to look for flags for; None: of no interest.
        walked: What the walk gave, by the first stage of those that are alike.
    """
    exact = walked[find_highest(walked)] if walked else None
    outlooks = [_predict_outlook(plan, one, margin, tokens, exact) for one in processors]
    first = processors[0] if processors else None
    return Training(
        memory=outlooks[0].memory if outlooks else predict_memory(plan),
        outlooks=outlooks,
        variants=what_if(plan, first),
        fit=fit(plan, fit_into, margin) if fit_into else None,
        exact=exact,
        stages=_predict_stages(plan, first, walked) if plan.layout.pipeline > 1 else (),
    )


def _predict_outlook(plan: Plan, processor: Processor, margin: float, tokens: int, exact: Exact | None) -> Outlook:
    """A training on one kind of GPU. Whether it fits is the walk's to say where there was one."""
    memory = predict_memory(plan, processor)
    time = predict_time(plan, processor)
    duration = None
    if time.peak_tflops:
        duration = compute_duration(plan.shape, tokens, plan.world.size, time.tokens_per_s)
    peak_bytes = exact.allocated_peak_bytes if exact else memory.peak.num_bytes
    fits = peak_bytes <= (processor.memory_gib or 0.0) * GIB * (1 - margin)
    return Outlook(processor, memory, time, duration, None if fits else fit(plan, processor, margin))


def _predict_stages(plan: Plan, processor: Processor | None, walked: Mapping[int, Exact]) -> list[StageOutlook]:
    """Predict one rank of each stage of a pipeline."""
    found = []
    for one in plan_stages(plan):
        time = predict_stage_time(one, processor) if processor else None
        found.append(StageOutlook(one, predict_memory(one, processor), time, walked.get(one.stage.number)))
    return found


def find_highest(walked: Mapping[int, Exact]) -> int:
    """The stage whose walk took the most memory."""
    return max(walked, key=lambda number: walked[number].allocated_peak_bytes)


def predict_generating(plan: Plan, processors: Sequence[Processor], batch: int, context: int | None) -> Generating:
    """Predict what the trained model needs when it generates for so many sequences at a time.

    Args:
        plan: Of its training.
        processors: GPUs, each of which holds the whole model.
        batch: Sequences.
        context: Tokens of each; None: as long as in training.
    """
    cache_bytes = CACHE_BYTES[plan.precision]
    on_gpus = [(one, predict_inference(plan.shape, batch, context, one, cache_bytes)) for one in processors]
    return Generating(predict_inference(plan.shape, batch, context, None, cache_bytes), on_gpus)
