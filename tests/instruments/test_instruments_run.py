"""Instruments watch and change nothing, whatever becomes of them."""

import re

import pytest
from support.launch import DROPOUT, checkpoint, flags, losses, quietly, same, steps

from megatron_lite.instruments.base import Instrument, Instruments
from megatron_lite.instruments.timeline import Timeline
from megatron_lite.phases import NOT_TRAINING, Phase

pytestmark = pytest.mark.usefixtures("process_group")

PROFILE = "--profile --use-pytorch-profiler --profile-step-start 3 --profile-step-end 4"
DETAILS = [f"--pytorch-profiler-collect-{what}" for what in ("shapes", "callstack", "memory", "chakra", "flops")]
STEP_PHASES = {phase.value for phase in Phase if phase not in (*NOT_TRAINING, Phase.PIPELINE_WAIT)}
MOMENTS = ("open", "begin", "begin_phase", "end_phase", "end", "close")


class Broken(Instrument):
    """Fails at one moment; counts how often each was asked of it."""

    def __init__(self, moment: str):
        self.moment, self.asked = moment, []

    def _note(self, moment: str):
        self.asked.append(moment)
        if moment == self.moment:
            raise RuntimeError("out of ink")


for name in MOMENTS:
    setattr(Broken, name, lambda self, *given, name=name: self._note(name))


@pytest.mark.parametrize("precision", [pytest.param("", marks=pytest.mark.slow), "--fp16 --initial-loss-scale 4096"])
def test_profiling_changes_no_bit_and_broken_instruments_neither(tmp_path, precision):
    """Each is switched off with a word; what stands beside it goes on, and what it had switched on is switched off."""
    argv = flags("--train-iters 6 --eval-interval 3 --eval-iters 1 --save-interval 6", precision, *DROPOUT)
    quietly([*argv, "--save", str(tmp_path / "off")], tmp_path / "off")
    profile = [*PROFILE.split(), *DETAILS, "--profile-modules", "--timing-log-level", "2"]
    broken = [Broken(moment) for moment in (*MOMENTS, "never")]
    _, out = quietly([*argv, "--save", str(tmp_path / "on"), *profile], tmp_path / "on", broken)
    off, on = (checkpoint(tmp_path / name, 6) for name in ("off", "on"))
    assert off.keys() == on.keys() and all(same(off[name], on[name]) for name in off if name != "record")
    assert losses(tmp_path / "off") == losses(tmp_path / "on") and len(losses(tmp_path / "on")) == 6
    said = re.findall(r"Broken\.(\w+) failed and was switched off; training goes on: out of ink", out)
    assert sorted(said) == sorted(MOMENTS)
    for one in broken:
        assert one.asked.count(one.moment) == (one.moment != "never") and one.asked.count("close") == 1
        assert one.asked[-2:] == ([one.moment, "close"] if one.moment not in ("close", "never") else ["end", "close"])
    assert broken[-1].asked.count("begin") == broken[-1].asked.count("end") == 6
    records = steps(tmp_path / "off")
    for record in records:  # phases add up to no more than the step
        assert 0 < sum(record["phases_ms"].values()) <= record["ms"] + 0.01
        more = {phase for phase, interval in (("eval", 3), ("save", 6)) if record["iteration"] % interval == 0}
        assert set(record["phases_ms"]) == STEP_PHASES | more


def test_a_failing_phase_hides_no_error_of_the_step():
    words = []
    watching = Instruments([Timeline(), Broken("end_phase")], words.append)
    with pytest.raises(ZeroDivisionError), watching.phase(Phase.FORWARD):
        raise ZeroDivisionError
    assert len(words) == 1 and [type(member) for member in watching.members] == [Timeline]
