"""Runs of a command that need no process: what each setting costs is stated, and so are the findings."""

import random
from collections.abc import Callable, Iterable

import msgspec

from megatron_lite.formats.setting import Setting
from megatron_lite.formats.tune_ledger import MeasuredRun, SeenFinding, Settings, describe_settings
from megatron_lite.tune.variant import TunedCommand

WORDS = ("python", "pretrain_gpt.py", "--num-workers", "0", "--micro-batch-size", "1", "--log-interval", "1")
LOSSES = tuple(3.0 - 0.01 * at for at in range(20))


def flag(name: str, value: str | None = "") -> Setting:
    return Setting(kind="flag", name=name, value=value)


def variable(name: str, value: str | None) -> Setting:
    return Setting(kind="variable", name=name, value=value)


def trainer(*words: str, **environment: str) -> TunedCommand:
    """This package's trainer."""
    switches = frozenset({"--async-save", "--log-params-norm"})
    return TunedCommand(words or WORDS, 2, True, switches, environment)


def script(*words: str, **environment: str) -> TunedCommand:
    """A script of others."""
    return TunedCommand(("python", "train.py", *words), 2, False, frozenset({"--fast"}), environment)


def finding(code: str, *remedies: Settings) -> SeenFinding:
    return SeenFinding(code=code, title=code, cost_ms=1.0, gain_ms=1.0, remedies=remedies)


class MadeRuns:
    """Runs whose times are made.

    Attributes:
        asked: The runs that were asked for, as "trial 1.2 --num-workers 2".
    """

    def __init__(
        self,
        findings: Iterable[SeenFinding],
        cost_ms: Callable[[dict[str, str | None]], float],
        losses: Callable[[dict[str, str | None]], tuple[float | None, ...]] = lambda settings: LOSSES,
        failing: str = "",
        stop_after: int | None = None,
    ):
        """What runs give.

        Args:
            findings: of every report.
            cost_ms: of a step, by what is set: {name: value}.
            losses: of the steps, by what is set.
            failing: name of a setting with which a run fails.
            stop_after: runs, behind which the user interrupts.
        """
        self._findings = tuple(findings)
        self._cost_ms = cost_ms
        self._losses = losses
        self._failing = failing
        self._stop_after = stop_after
        self.asked: list[str] = []

    def run(self, wanted: MeasuredRun) -> MeasuredRun:
        if self._stop_after is not None and len(self.asked) == self._stop_after:
            raise KeyboardInterrupt
        self.asked.append(
            f"{wanted.purpose} {wanted.number}.{wanted.round} {describe_settings(wanted.settings)}".strip()
        )
        given = {setting.name: setting.value for setting in wanted.settings}
        if self._failing in given:
            return msgspec.structs.replace(wanted, wall_s=1.0, failure=f"exit code 2: error: {self._failing}")
        noise = random.Random(self.asked[-1])
        step_ms = tuple(self._cost_ms(given) * noise.uniform(0.99, 1.01) for _ in LOSSES)
        return msgspec.structs.replace(
            wanted,
            wall_s=10.0,
            step_ms=step_ms,
            losses=self._losses(given),
            findings=self._findings if wanted.purpose == "record" else (),
        )
