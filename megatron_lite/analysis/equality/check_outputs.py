"""Says which error modules' outputs that differ show."""

from collections.abc import Sequence

import msgspec

from megatron_lite.analysis.equality.check_gradients import MAX_OTHERS_SHOWING, write_ratio
from megatron_lite.analysis.equality.gradient_patterns import is_same_ratio
from megatron_lite.analysis.equality.outputs import ComparedOutput, Likeness, MadeOf
from megatron_lite.formats.prove_report import Difference, ErrorKind
from megatron_lite.units import significant

STATISTICS_REMEDY = (
    "use SyncBatchNorm (torch.nn.SyncBatchNorm.convert_sync_batchnorm), or a norm without batch statistics"
)
RIGHT = (Likeness.EQUAL, Likeness.PARTIAL)


def check_outputs(outputs: Sequence[ComparedOutput]) -> list[Difference]:
    """Name the error that the first output that differs shows; what follows it is its consequence.

    Args:
        outputs: Outputs of the first step beside the reference's, in the order of the calls.
    """
    at = find_first_error(outputs)
    if at is None:
        return []
    later = dict.fromkeys(describe_name(output.key.module) for output in outputs[at + 1 :] if _differs(output))
    later.pop(describe_name(outputs[at].key.module), None)
    return [msgspec.structs.replace(_judge_first(outputs, at), others=tuple(later)[:MAX_OTHERS_SHOWING])]


def find_first_error(outputs: Sequence[ComparedOutput]) -> int | None:
    """Find the output from which on outputs differ; None where forward is right.

    An output that differs while those behind it agree was laid beside another one than it should be. So the output is
    looked for before which as many as possible agree, and behind which as many as possible differ.

    Args:
        outputs: Outputs beside the reference's, in the order of the calls.
    """
    # what the whole model returns comes from all others
    if any(output.key.module == "" and output.likeness is Likeness.EQUAL for output in outputs):
        return None
    best = None
    score = sum(output.likeness in RIGHT for output in outputs)
    most = score + 1
    # moves the begin of what is wrong from the end to the front
    for at in reversed(range(len(outputs))):
        likeness = outputs[at].likeness
        score -= int(likeness in RIGHT)
        score += int(likeness is Likeness.DIFFERS)
        if likeness is Likeness.DIFFERS and score >= most:
            best = at
            most = score
    return best


def _differs(output: ComparedOutput) -> bool:
    return output.likeness in (Likeness.DIFFERS, Likeness.PERMUTED)


def _judge_first(outputs: Sequence[ComparedOutput], at: int) -> Difference:
    """Say what the first output that differs shows, and those before it."""
    first = outputs[at]
    earlier = outputs[:at]
    if first.has_local_statistics:
        return _make(
            ErrorKind.LOCAL_STATISTICS,
            first,
            f"{_describe_first(first)}: it normalizes by the statistics of each rank's own batch",
            STATISTICS_REMEDY,
        )
    permuted = next((output for output in earlier if output.likeness is Likeness.PERMUTED), None)
    if permuted is not None:
        return _make(
            ErrorKind.WRONG_SHARD,
            permuted,
            f"ranks return the parts of {describe_module(permuted)} in another order; {_describe_first(first)}",
            "look at which block each rank takes: both layers of a pair must be cut in the same order",
            "medium",
        )
    last = earlier[-1] if earlier else None
    if last is not None and last.likeness is Likeness.PARTIAL:
        return _make(
            ErrorKind.MISSING_REDUCTION,
            last,
            f"the output of {describe_module(last)} is right only as the sum over ranks; {_describe_first(first)}",
            "all_reduce this output with SUM between the ranks that split the layer",
        )
    if first.made_of is not None:
        return _describe_multiples(first, first.made_of)
    if first.measured is not None and first.measured.is_scaled:
        ratio = write_ratio(first.measured.ratio)
        evidence = f"{_describe_first(first)}: it is {ratio} times the reference's"
        return _make(ErrorKind.FACTOR, first, evidence, "look at what the module multiplies or divides by")
    evidence = f"{_describe_first(first)}; {at} before it agree"
    return _make(ErrorKind.UNKNOWN, first, evidence, "look at what this module does on several ranks", "medium")


def _describe_multiples(first: ComparedOutput, made_of: MadeOf) -> Difference:
    """Report a layer that has its product or its bias a number of times."""
    evidence = (
        f"{_describe_first(first)}: it has what the layer computes {write_ratio(made_of.product)} times, and its bias "
        f"{write_ratio(made_of.bias)} times"
    )
    if is_same_ratio(made_of.product, 1.0):
        return _make(ErrorKind.REDUCED_TWICE, first, evidence, "add the bias behind the sum over ranks, or on one rank")
    return _make(ErrorKind.REDUCED_TWICE, first, evidence, "add up this output between the ranks once")


def _make(kind: ErrorKind, output: ComparedOutput, evidence: str, remedy: str, confidence: str = "high") -> Difference:
    where = describe_name(output.key.module)
    return Difference(kind=kind, where=where, step=1, evidence=evidence, remedy=remedy, confidence=confidence)


def _describe_first(output: ComparedOutput) -> str:
    error = "" if output.measured is None else f", by {significant(output.measured.error, 2)} of its norm"
    return f"the output of {describe_module(output)} is the first that differs{error}"


def describe_name(module: str) -> str:
    """Name a module; the one without a name is the model itself."""
    return module or "the model"


def describe_module(output: ComparedOutput) -> str:
    """Name a module with its class: "layers.0.norm (BatchNorm1d)"."""
    module = describe_name(output.key.module)
    return f"{module} ({output.class_name})" if output.class_name else module
