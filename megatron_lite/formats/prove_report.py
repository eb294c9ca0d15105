"""What comparing the records of two commands gave: what `megatron-lite prove` prints and writes as JSON."""

import enum

import msgspec

NOTHING_COMPARED = "nothing"  # coverage of a report


class ErrorKind(enum.Enum):
    """The kinds of error that a difference shows."""

    FACTOR = "factor"
    MISSING_REDUCTION = "missing reduction"
    REDUCED_TWICE = "reduced twice"
    LOCAL_NORM = "local norm"
    WRONG_SHARD = "wrong shard"
    TIED_NOT_SUMMED = "tied weight not summed"
    LOCAL_STATISTICS = "local statistics"
    RANDOM_MUST_AGREE = "random states must agree"
    RANDOM_MUST_DIFFER = "random states must differ"
    DATA_TWICE = "data seen twice"
    DATA_NEVER = "data never seen"
    NO_GRADIENT = "no gradient"
    WRONG_UPDATE = "wrong update"
    UNKNOWN = "unknown"


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """An error that was found, most fundamental first."""

    kind: ErrorKind
    # the first module, parameter or loader that shows it; "": the whole run
    where: str
    # of the step, from 1
    step: int
    # one sentence: what was found, with its figures
    evidence: str
    # one sentence: what to look at or to write instead
    remedy: str
    # other modules or parameters that show it, in the order in which they do
    others: tuple[str, ...] = ()
    # of the kind: high, medium or low
    confidence: str = "high"


class ComparedRow(msgspec.Struct, frozen=True, kw_only=True):
    """A figure on both sides."""

    # loss, gradient norm, gradients, outputs of modules, weights after the update, with the step
    name: str
    # of the reference and of what was proved; null: it has none
    reference: float | None
    proved: float | None
    # the largest relative difference; null: a number is not finite
    difference: float | None
    # up to which rounding explains it
    tolerance: float
    # how many tensors were compared; 1: the figure itself
    tensors: int = 1


class ProofReport(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `megatron-lite prove`."""

    # the command, and what it was laid beside: a command, or the sum of the ranks' own gradients
    command: str
    reference: str
    ranks: int
    reference_ranks: int
    rows: tuple[ComparedRow, ...] = ()
    differences: tuple[Difference, ...] = ()
    # what was not compared, and why: each lowers what "equal" says
    not_compared: tuple[str, ...] = ()
    # what ran: engines that averaged gradients, precision, dropout that was switched off
    notes: tuple[str, ...] = ()
    # whole | partial | nothing: how much of the model was compared
    coverage: str = "whole"
    seconds: float = 0.0
