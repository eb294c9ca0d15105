"""The loop: the report's first change that may be made, tried in turns with the best command until then."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_lite.errors import UserError
from megatron_lite.formats.tune_ledger import (
    MeasuredRun,
    SeenFinding,
    Settings,
    TrialResult,
    TuneOutcome,
    TuneTrial,
)
from megatron_lite.tune.candidates import ProposedChange, combine, list_candidates
from megatron_lite.tune.judge_trial import is_faster, judge_runs, pair_runs
from megatron_lite.tune.knobs import DeclaredKnob
from megatron_lite.tune.ledger import Ledger
from megatron_lite.tune.variant import TunedCommand

RunVariant = Callable[[MeasuredRun], MeasuredRun]  # fills in what it measured of the run that is asked for
NOTHING_LEFT = "no finding names a further change that may be tried"


@dataclass(frozen=True)
class Bounds:
    """How far tuning goes.

    Attributes:
        trials: Changes that are tried at most.
        seconds: That all runs may take, as far as their lengths are foreseen; None for no limit.
        rounds: Runs of each variant in a trial.
        tolerance: Relative difference of a step's loss that rounding may make.
    """

    trials: int
    seconds: float | None
    rounds: int
    tolerance: float


class Tuner:
    """Tunes one command.

    All decisions follow from the runs: with a ledger of some of them, the same decisions are made again, and the rest
    is measured.
    """

    def __init__(
        self,
        command: TunedCommand,
        declared: Sequence[DeclaredKnob],
        bounds: Bounds,
        ledger: Ledger,
        run: RunVariant,
        tell: Callable[[TuneTrial | MeasuredRun], None],
    ):
        """Take all that tuning needs.

        Args:
            command: as it was given.
            declared: knobs of the user's file.
            bounds: how far it goes.
            ledger: is given every run and trial, and has those of before.
            run: runs a variant, and measures it.
            tell: is told of each trial, and of a recording that failed.
        """
        self._command = command
        self._declared = declared
        self._bounds = bounds
        self._ledger = ledger
        self._run = run
        self._tell = tell
        self._used_s = 0.0
        self._timed_s = 0.0
        self._recorded_s = 0.0
        self._trials: list[TuneTrial] = []
        self._kept: Settings = ()
        self._number_kept = 0

    def tune(self) -> tuple[list[TuneTrial], TuneOutcome]:
        """Try changes until none is left, or a bound is reached; then compare the best with the command as given.

        Raises:
            UserError: the command as given cannot be measured.
        """
        findings = self._record()
        reason = NOTHING_LEFT
        while candidate := self._find_next(findings):
            stop = self._find_bound()
            if stop:
                reason = stop
                break
            if self._try(candidate):
                findings = self._record()
        outcome = self._compare_with_original(reason)
        self._ledger.add(outcome)
        return self._trials, outcome

    def _find_next(self, findings: Sequence[SeenFinding]) -> ProposedChange | None:
        """Find the report's first change that was not tried yet."""
        tried = {trial.change for trial in self._trials}
        for candidate in list_candidates(findings, self._command, self._kept, self._declared):
            if candidate.change not in tried:
                return candidate
        return None

    def _find_bound(self) -> str:
        """Say which bound is reached; "" where a further trial, and the comparison at the end, fit into them."""
        bounds = self._bounds
        if len(self._trials) >= bounds.trials:
            return f"--trials {bounds.trials} is reached"
        # two variants in each round of the trial and of the end, and a recording between
        further_s = 4 * bounds.rounds * (self._timed_s or self._recorded_s) + self._recorded_s
        if bounds.seconds is not None and self._used_s + further_s > bounds.seconds:
            return f"--time {bounds.seconds / 60:g} leaves no time for a further trial"
        return ""

    def _record(self) -> Sequence[SeenFinding]:
        """Record the best command until now, and return its findings."""
        run = self._measure("record", self._number_kept, 1, self._kept)
        if run.failure and not self._kept:
            raise UserError(f"megatron-lite tune: the command cannot be measured: {run.failure}")
        if run.failure:
            self._tell(run)
        return run.findings

    def _try(self, candidate: ProposedChange) -> bool:
        """Try a change, and return whether it is kept."""
        number = len(self._trials) + 1
        settings = combine(self._kept, candidate.change, self._command)
        before, after = self._take_turns("trial", number, self._kept, settings)
        found = judge_runs(before, after, candidate.losses, self._bounds.tolerance)
        trial = TuneTrial(
            number=number,
            code=candidate.code,
            change=candidate.change,
            settings=settings,
            expected_ms=candidate.expected_ms,
            before_ms=found.pair.a if found.pair else None,
            after_ms=found.pair.b if found.pair else None,
            noise_ms=found.pair.band if found.pair else None,
            loss_difference=found.loss_difference,
            result=found.result,
            reason=found.reason,
        )
        self._trials.append(trial)
        self._ledger.add(trial)
        self._tell(trial)
        if trial.result is not TrialResult.KEPT:
            return False
        self._kept = settings
        self._number_kept += 1
        return True

    def _compare_with_original(self, reason: str) -> TuneOutcome:
        """Compare the best command with the one that was given, once more; the latter is used unless it is slower."""
        if not self._kept:
            return TuneOutcome(command=self._command.write(()), reason=reason, wall_s=self._used_s)
        before, after = self._take_turns("check", self._number_kept, (), self._kept)
        failures = [run.failure for run in (*before, *after) if run.failure]
        settings: Settings = ()
        pair = None
        if failures:
            reason = f"the comparison at the end failed: {failures[0]}"
        else:
            pair = pair_runs(before, after)
            if is_faster(pair, before, after):
                settings = self._kept
            else:
                reason = "what was kept is not faster than the command as given, in the comparison at the end"
        return TuneOutcome(
            original_ms=pair.a if pair else None,
            best_ms=pair.b if pair else None,
            noise_ms=pair.band if pair else None,
            settings=settings,
            command=self._command.write(settings),
            reason=reason,
            wall_s=self._used_s,
        )

    def _take_turns(
        self, purpose: Literal["trial", "check"], number: int, first: Settings, second: Settings
    ) -> tuple[list[MeasuredRun], list[MeasuredRun]]:
        """Run two variants in turns; a variant that fails is not run again.

        Args:
            purpose: what the runs are for.
            number: of the trial, or of the kept changes.
            first: settings of the one variant.
            second: settings of the other.
        """
        runs: tuple[list[MeasuredRun], list[MeasuredRun]] = ([], [])
        for at in range(1, self._bounds.rounds + 1):
            for settings, of_variant in zip((first, second), runs):
                run = self._measure(purpose, number, at, settings)
                of_variant.append(run)
                if run.failure:
                    return runs
        return runs

    def _measure(
        self, purpose: Literal["record", "trial", "check"], number: int, at: int, settings: Settings
    ) -> MeasuredRun:
        """Run a variant, or take what the ledger has of that run."""
        wanted = MeasuredRun(purpose=purpose, number=number, round=at, settings=settings, wall_s=0.0)
        run = self._ledger.take_run(wanted)
        if run is None:
            run = self._run(wanted)
            is_mistake = purpose == "record" and run.failure and not settings
            # nothing was tried yet, and the mistake may be mended when the same command comes again
            if not is_mistake:
                self._ledger.add_run(run)
        self._used_s += run.wall_s
        if purpose == "record":
            self._recorded_s = max(self._recorded_s, run.wall_s)
        else:
            self._timed_s = max(self._timed_s, run.wall_s)
        return run
