"""GPUs that run below their clock, and what holds them: heat, power, settings, other GPUs."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megatron_lite.analysis.run.hardware import RanksHardware
from megatron_lite.formats.hardware_record import SLOWDOWNS, ClockLimit, name_limits
from megatron_lite.thresholds import LOW_CLOCK, MIN_SLOWED_SHARE

MIN_SAMPLES = 3  # in which the GPU works: fewer tell of a moment
FAR_BELOW_OTHERS = 0.90  # of the other ranks' clock: a power limit makes boards differ by some percent
FAR_BELOW_HIGHEST = 0.60  # of the highest clock: a power limit at full load leaves more
BELOW_HIGHEST = 0.90  # of the highest clock, where a setting holds it
MOSTLY = 0.5  # of samples


@dataclass(frozen=True)
class GpuClock:
    """Clock of one rank's GPU while it worked, and what held it down."""

    rank: int
    mhz: float | None  # mean; None for unknown
    highest_mhz: float | None
    others_mhz: float | None  # median of the other ranks' means; None without any
    limits: ClockLimit  # in any sample
    slowed: float  # share of samples in which board or driver slowed it down
    power_capped: float  # share of samples in which the power limit held it
    temperature_c: float | None  # highest
    power_w: float | None
    power_limit_w: float | None

    @property
    def is_slowed(self) -> bool:
        """Whether heat or power supply made board or driver slow the GPU down, and its clock shows it."""
        if self.slowed < MIN_SLOWED_SHARE:
            return False
        return self.mhz is None or self._is_below_usual(self.mhz)

    @property
    def is_low(self) -> bool:
        """Whether the clock is lower than a power limit at full load explains, though nothing slowed the GPU down."""
        if self.is_slowed or self.mhz is None:
            return False
        if self.others_mhz is not None and self.mhz < FAR_BELOW_OTHERS * self.others_mhz:
            return True
        if self.highest_mhz is None:
            return False
        if ClockLimit.APPLICATION_CLOCKS in self.limits:
            return self.mhz < BELOW_HIGHEST * self.highest_mhz
        return self.power_capped >= MOSTLY and self.mhz < FAR_BELOW_HIGHEST * self.highest_mhz

    @property
    def is_below_others(self) -> bool:
        """Whether the other ranks' GPUs have a higher clock."""
        return self.mhz is not None and self.others_mhz is not None and self.mhz < LOW_CLOCK * self.others_mhz

    @property
    def causes(self) -> ClockLimit:
        """Limits that explain the clock: of one that is slowed down those of board and driver."""
        return self.limits & SLOWDOWNS if self.is_slowed else self.limits

    def describe(self) -> str:
        """Describe it as in "ran at 1,095 of 1,980 MHz: thermal slowdown"."""
        cause = name_limits(self.causes)
        if self.mhz is None:
            return f"was slowed down in {self.slowed:.0%} of samples: {cause}"
        highest_mhz = self.highest_mhz or self.others_mhz
        of_highest = f" of {highest_mhz:,.0f}" if highest_mhz else ""
        text = f"ran at {self.mhz:,.0f}{of_highest} MHz"
        return f"{text}: {cause}" if cause else text

    def _is_below_usual(self, mhz: float) -> bool:
        """Whether a clock is below the highest one, or the other ranks'; also where neither is known."""
        usual_mhz = [usual for usual in (self.highest_mhz, self.others_mhz) if usual is not None]
        return not usual_mhz or mhz < LOW_CLOCK * max(usual_mhz)


def list_gpu_clocks(hardware: RanksHardware) -> Iterator[GpuClock]:
    """List the clocks of the ranks whose GPUs worked in enough samples."""
    samples = np.nan_to_num(hardware.get("samples"))
    at_work = samples * (1 - np.nan_to_num(hardware.get("idle")))
    clocks = hardware.get("sm_clock_mhz")
    knows_clock = ~np.isnan(clocks)
    knows_limits = ~np.isnan(hardware.get("clock_limits"))
    for rank in np.flatnonzero((knows_clock | knows_limits) & (at_work >= MIN_SAMPLES)).tolist():
        others = clocks[knows_clock & (np.arange(hardware.ranks) != rank)]
        yield GpuClock(
            rank=rank,
            mhz=hardware.get_one("sm_clock_mhz", rank),
            highest_mhz=hardware.get_one("max_sm_clock_mhz", rank),
            others_mhz=float(np.median(others)) if len(others) else None,
            limits=hardware.get_limits(rank),
            slowed=hardware.get_one("slowed", rank) or 0.0,
            power_capped=hardware.get_one("power_capped", rank) or 0.0,
            temperature_c=hardware.get_one("temperature_c", rank),
            power_w=hardware.get_one("power_w", rank),
            power_limit_w=hardware.get_one("power_limit_w", rank),
        )


def find_slowed_gpus(hardware: RanksHardware) -> list[GpuClock]:
    """Find the GPUs that board or driver slow down, those with the lowest clock first."""
    found = [one for one in list_gpu_clocks(hardware) if one.is_slowed]
    return sorted(found, key=lambda one: (one.mhz or 0.0, one.rank))


def find_low_gpus(hardware: RanksHardware) -> list[GpuClock]:
    """Find the GPUs whose clock a limit of power, a setting or nothing that is known holds far down, lowest first."""
    found = [one for one in list_gpu_clocks(hardware) if one.is_low]
    return sorted(found, key=lambda one: (one.mhz or 0.0, one.rank))


def describe_kept_clock(hardware: RanksHardware, rank: int) -> str:
    """Describe that a rank's GPU kept its clock, as the other ranks' did; '' where it did not, or it is not known.

    Args:
        hardware: of all ranks.
        rank: one that others wait for.
    """
    for one in list_gpu_clocks(hardware):
        is_kept = not (one.is_slowed or one.is_low or one.is_below_others)
        if one.rank == rank and is_kept and one.mhz is not None and one.others_mhz is not None:
            return f"its GPU kept its clock ({one.mhz:,.0f} MHz, the others {one.others_mhz:,.0f}): it is not throttled"
    return ""


def describe_slow_gpu(hardware: RanksHardware, rank: int) -> str:
    """Describe the clock of a rank's GPU where it is low and the other ranks' are not; '' elsewhere.

    Args:
        hardware: of all ranks.
        rank: one that others wait for.
    """
    for one in list_gpu_clocks(hardware):
        if one.rank == rank and one.is_below_others and (one.is_slowed or one.is_low):
            return f"its GPU {one.describe()}; the others at {one.others_mhz:,.0f} MHz"
    return ""
