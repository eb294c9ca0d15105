"""Clocks, temperatures and slowdowns of two runs' GPUs: a lower clock is the machine's, not the code's."""

import numpy as np

from megatron_lite.analysis.compare.compare_results import Change, Total
from megatron_lite.analysis.compare.settings import paired
from megatron_lite.analysis.gpu_clocks import GpuClock, list_gpu_clocks
from megatron_lite.analysis.run.hardware import RanksHardware
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.formats.file_names import STEPS_FILE
from megatron_lite.thresholds import LOW_CLOCK, MIN_QUOTA_SHARE, MIN_SLOWED_SHARE, MIN_STOLEN

CLOCK = "lowest GPU clock"
TEMPERATURE_BAND_C = 5.0  # by which a room's air differs from day to day


def pair_hardware(a: Facts, b: Facts) -> list[Total]:
    """Pair the lowest clock of a rank's GPU, the highest temperature, and the largest share of slowed samples.

    The slowest rank sets the pace. [] where one of the runs was not sampled.
    """
    clock_a = _find_lowest(a)
    clock_b = _find_lowest(b)
    totals = []
    if clock_a is not None and clock_b is not None and clock_a.mhz and clock_b.mhz:
        band_mhz = (1 - LOW_CLOCK) * max(clock_a.mhz, clock_b.mhz)
        totals.append(Total(CLOCK, "MHz", STEPS_FILE, paired(clock_a.mhz, clock_b.mhz, band_mhz)))
    figures = (
        ("highest GPU temperature", "temperature_c", "deg C", 1.0, TEMPERATURE_BAND_C),
        ("slowed GPU samples", "slowed", "%", 100.0, 100 * MIN_SLOWED_SHARE),
    )
    for title, name, unit, factor, band in figures:
        highest_a = _find_highest(a.ranks_hardware, name)
        highest_b = _find_highest(b.ranks_hardware, name)
        if highest_a is not None and highest_b is not None:
            pair = paired(factor * highest_a, factor * highest_b, band)
            totals.append(Total(title, unit, STEPS_FILE, pair))
    return totals


def describe_lower_clock(a: Facts, b: Facts, totals: list[Total]) -> str:
    """Write which run's GPUs ran at lower clocks, and why; '' where neither did, or it is not known.

    Args:
        a: the run before.
        b: the run after.
        totals: what pair_hardware returned.
    """
    change = {total.name: total.pair.change for total in totals}.get(CLOCK)
    if change is Change.LESS:
        return _describe("B", _find_lowest(b), _find_lowest(a))
    if change is Change.MORE:
        return _describe("A", _find_lowest(a), _find_lowest(b))
    return ""


def describe_host(name: str, facts: Facts) -> list[str]:
    """Write what the machine took from run `name`: by its CPU quota, and by other virtual machines."""
    hardware = facts.ranks_hardware
    notes = []
    used_up = _find_highest(hardware, "quota_used_up") or 0.0
    if used_up >= MIN_QUOTA_SHARE:
        notes.append(f"{name}: the CPU quota of its container was used up in {used_up:.0%} of its periods")
    stolen = _find_highest(hardware, "stolen") or 0.0
    if stolen >= MIN_STOLEN:
        notes.append(f"{name}: other virtual machines took {stolen:.0%} of the machine's CPU time")
    return notes


def _describe(name: str, lower: GpuClock | None, higher: GpuClock | None) -> str:
    """Write that a run's GPU ran at a lower clock than the other run's."""
    if lower is None or higher is None:
        return ""
    rank = f" (rank {lower.rank})" if lower.others_mhz is not None else ""
    return f"{name}'s GPU{rank} {lower.describe()}, the other run's at {higher.mhz:,.0f} MHz"


def _find_lowest(facts: Facts) -> GpuClock | None:
    """Find the GPU with the lowest clock; None where no clock is known."""
    clocks = [one for one in list_gpu_clocks(facts.ranks_hardware) if one.mhz is not None]
    return min(clocks, key=lambda one: one.mhz or 0.0, default=None)


def _find_highest(hardware: RanksHardware, name: str) -> float | None:
    """Find the highest number of any rank; None where none is known."""
    values = hardware.get(name)
    return None if np.isnan(values).all() else float(np.nanmax(values))
