"""Instruments watch and change nothing, whatever becomes of them."""

import re

import pytest
from launch import DROPOUT, alone, checkpoint, flags, quietly, same, steps

from megatron_lite.instruments.base import Instrument, Instruments
from megatron_lite.instruments.timeline import Timeline
from megatron_lite.phases import NOT_TRAINING, Phase

PROFILE = "--profile --use-pytorch-profiler --profile-step-start 3 --profile-step-end 5"
STEP_PHASES = [phase.value for phase in Phase if phase not in NOT_TRAINING]


@pytest.fixture(scope="module", autouse=True)
def group():
    with alone():
        yield


# --- on = off


@pytest.mark.parametrize("precision", [pytest.param("", marks=pytest.mark.slow), "--fp16 --initial-loss-scale 4096"])
def test_profiling_changes_no_bit(tmp_path, precision):
    argv = flags("--train-iters 6 --eval-interval 2 --eval-iters 1", precision, *DROPOUT)
    quietly([*argv, "--save", str(tmp_path / "off")], tmp_path / "off")
    details = [f"--pytorch-profiler-collect-{what}" for what in ("shapes", "callstack", "memory", "chakra", "flops")]
    profile = [*PROFILE.split(), *details, "--profile-modules", "--timing-log-level", "2"]
    quietly([*argv, "--save", str(tmp_path / "on"), *profile], tmp_path / "on")
    off, on = (checkpoint(tmp_path / name, 6) for name in ("off", "on"))
    assert off.keys() == on.keys() and all(same(off[name], on[name]) for name in off if name != "record")
    assert [s["loss"] for s in steps(tmp_path / "off")] == [s["loss"] for s in steps(tmp_path / "on")]


# --- a broken instrument


class Broken(Instrument):
    """Fails at one moment, and counts how often it was asked."""

    def __init__(self, moment: str):
        self.moment, self.asked = moment, 0

    def _maybe(self, moment: str):
        if moment == self.moment:
            self.asked += 1
            raise RuntimeError("out of ink")

    def phase(self, name):
        self._maybe("phase")
        return self if self.moment in ("__enter__", "__exit__") else None


for name in ("open", "begin", "end", "close", "__enter__", "__exit__"):
    setattr(Broken, name, lambda self, *given, name=name: self._maybe(name))


@pytest.mark.parametrize("moment", ["open", "begin", "end", "close", "phase", "__enter__", "__exit__"])
def test_a_broken_instrument_is_switched_off_with_a_word(tmp_path, moment):
    broken = Broken(moment)
    _, out = quietly(flags("--train-iters 4", *DROPOUT), tmp_path / "broken", [broken])
    quietly(flags("--train-iters 4", *DROPOUT), tmp_path / "whole")
    assert broken.asked == 1
    assert len(re.findall(r"Broken\.\w+ failed and was switched off; training goes on: out of ink", out)) == 1
    one, other = (steps(tmp_path / name) for name in ("broken", "whole"))
    assert [s["loss"] for s in one] == [s["loss"] for s in other] and len(one) == 4


def test_what_an_instrument_switched_on_is_switched_off_with_it():
    closed = []

    class Left(Broken):
        def close(self, error):
            closed.append(error)

    words = []
    with Instruments([Left("begin")], words.append) as watching, watching.step(1):
        pass
    assert [str(error) for error in closed] == ["out of ink"] and len(words) == 1


def test_a_failing_phase_hides_no_error_of_the_step():
    words = []
    watching = Instruments([Timeline(), Broken("__exit__")], words.append)
    with pytest.raises(ZeroDivisionError), watching.phase(Phase.FORWARD):
        raise ZeroDivisionError
    assert len(words) == 1 and [type(member) for member in watching.members] == [Timeline]


class Asked(Instrument):
    """Counts what it is asked for, and how often its contexts are entered."""

    def __init__(self, same: bool):
        self.same_contexts, self.asked, self.entered = same, 0, 0

    def phase(self, name):
        self.asked += 1
        return self

    def __enter__(self):
        self.entered += 1

    def __exit__(self, *error):
        pass


def in_phases(watching: Instruments, times: int):
    for _ in range(times):
        with watching.phase(Phase.FORWARD):
            pass


@pytest.mark.parametrize("same", [True, False])
def test_contexts_are_asked_for_once_only_where_everyone_says_so(same):
    constant, other = Asked(True), Asked(same)
    in_phases(Instruments([constant, Timeline(), other], print), 3)
    assert constant.asked == other.asked == (1 if same else 3) and constant.entered == other.entered == 3


def test_a_kept_context_goes_with_its_instrument():
    broken, asked = Broken("__enter__"), Asked(True)
    broken.same_contexts = True
    words = []
    in_phases(Instruments([broken, asked], words.append), 3)
    assert broken.asked == 1 and len(words) == 1 and asked.entered == 3


def test_one_that_fails_does_not_make_others_contexts_last():
    changing = Asked(False)
    in_phases(Instruments([Broken("phase"), changing], lambda text: None), 3)
    assert changing.asked == 3


# --- the timeline


def test_phases_add_up_to_no_more_than_the_step(tmp_path):
    words = "--train-iters 12 --log-interval 3 --eval-interval 4 --eval-iters 1 --save-interval 5 --save"
    quietly(flags(words, tmp_path / "save"), tmp_path / "run")
    records = steps(tmp_path / "run")
    for record in records:
        assert 0 < sum(record["phases_ms"].values()) <= record["ms"] + 0.01
        expected = set(STEP_PHASES)
        expected |= {phase for phase, interval in (("eval", 4), ("save", 5)) if record["iteration"] % interval == 0}
        assert set(record["phases_ms"]) == expected
