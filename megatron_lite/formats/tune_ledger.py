"""The ledger of `megatron-lite tune`: a JSON line for what was asked, each run, each trial and the outcome.

Times are milliseconds per step of the whole step on the host, with what evaluating and saving take of each step.
"""

import enum
from typing import Literal, TypeAlias

import msgspec

from megatron_lite.formats.setting import Setting

LEDGER_SCHEMA = 1


Settings: TypeAlias = tuple[Setting, ...]


def describe_settings(settings: Settings) -> str:
    """Write settings for a reader: "--num-workers 4, OMP_NUM_THREADS=2, without --log-params-norm"."""
    return ", ".join(map(str, settings))


class SeenFinding(msgspec.Struct, frozen=True, kw_only=True):
    """A finding of the report on a recorded run."""

    code: str
    title: str
    # per step; null for a cost that is not known
    cost_ms: float | None = None
    # that its remedy saves of a step by a replay of the measured steps, else at most; null where nothing says it
    gain_ms: float | None = None
    # what each of its remedies sets, of this trainer and of the environment
    remedies: tuple[Settings, ...] = ()


class TuneRequest(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="request"):
    """What was asked for: another request has another ledger."""

    schema: int = LEDGER_SCHEMA
    # the words of the command
    command: tuple[str, ...]
    # content of the file of knobs; "" without one
    knobs: str = ""
    # of the environment that the command gets, those that a knob may set
    variables: dict[str, str] = {}
    # by path, of the scripts and data sets that the command names: a script's SHA-256, a data set's size and time
    files: dict[str, str] = {}
    # steps of each run
    steps: int
    # runs of each variant in a trial
    rounds: int
    # relative difference of a step's loss that rounding may make
    tolerance: float


class MeasuredRun(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="run"):
    """One run of a variant of the command."""

    # recorded for its findings, timed in a trial, or timed in the comparison at the end
    purpose: Literal["record", "trial", "check"]
    # of the trial, from 1; of a recording, how many changes were kept before it
    number: int
    # of the trial, from 1
    round: int = 1
    # what differs from the command as given
    settings: Settings = ()
    # that the run and reading it took, in seconds
    wall_s: float
    # of each step behind the first one that nothing disturbed
    step_ms: tuple[float, ...] = ()
    # the part of a step in which its thread was ready and had no core, median; null: not measured
    core_wait_ms: float | None = None
    # of each step, from the first one; null for NaN, Inf and a step without one
    losses: tuple[float | None, ...] = ()
    # why the run has no steps to measure; "" for a run that has them
    failure: str = ""
    # of a recorded run, in the report's order
    findings: tuple[SeenFinding, ...] = ()


class TrialResult(enum.Enum):
    """What became of a change."""

    KEPT = "kept"
    SLOWER = "slower"
    WITHIN_NOISE = "within the noise"
    OTHER_LOSSES = "other losses"
    FAILED = "failed"


class TuneTrial(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="trial"):
    """A change that was tried, beside the best command until then."""

    number: int
    # the finding whose remedy it is
    code: str
    # what the change sets, and all settings that it was tried with
    change: Settings
    settings: Settings
    # that the finding said the remedy would save of a step, at most; null where it did not
    expected_ms: float | None = None
    # medians; null where a run failed
    before_ms: float | None = None
    after_ms: float | None = None
    # a difference up to this may be noise; null for too few steps
    noise_ms: float | None = None
    # the largest relative difference of a step's loss; null where none was recorded, or not compared
    loss_difference: float | None = None
    result: TrialResult
    # one sentence, where the figures do not say it
    reason: str = ""


class TuneOutcome(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="outcome"):
    """The end: the best variant beside the command as given, once more."""

    # of the last comparison; null where nothing was kept
    original_ms: float | None = None
    best_ms: float | None = None
    noise_ms: float | None = None
    # of the command to use; () for the one that was given
    settings: Settings = ()
    # the command to use, as typed in a shell
    command: str
    # why tuning ended, and why a variant is not used that won its trials
    reason: str
    # that all runs took, in seconds
    wall_s: float


LedgerLine: TypeAlias = TuneRequest | MeasuredRun | TuneTrial | TuneOutcome


def encode_line(line: LedgerLine) -> bytes:
    """Build a line of the ledger, with its end."""
    return msgspec.json.encode(line) + b"\n"


def decode_line(text: bytes) -> LedgerLine:
    """Read a line of the ledger. Raises msgspec.ValidationError or msgspec.DecodeError for what is none."""
    return msgspec.json.decode(text, type=TuneRequest | MeasuredRun | TuneTrial | TuneOutcome)
