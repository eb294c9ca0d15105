"""Reads what the machine takes from a process: CPU quota, other virtual machines' time, clocks, pressure, swap.

All of it is Linux'; elsewhere nothing is known.
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean

MAX_CORES_READ = 4  # whose clocks are read: each read may wake a core
QUOTA_PERIODS = "quota_periods"
USED_UP_PERIODS = "used_up_periods"
ALL_TICKS = "all_ticks"
STOLEN_TICKS = "stolen_ticks"
US_PER_S = 1_000_000
PRESSURES = {"cpu_pressure": "cpu", "memory_pressure": "memory", "io_pressure": "io"}
SOME_TOTAL = re.compile(r"^some .*total=(\d+)", re.MULTILINE)
STEAL = 7  # of the fields of /proc/stat's first line: user nice system idle iowait irq softirq steal
WITHOUT_GUESTS = 8  # further ones are parts of user and nice
KHZ_PER_MHZ = 1000


class HostCounters:
    """Counters of this machine and of the control groups that this process is in, as the kernel keeps them.

    Args:
        proc: where /proc is.
        sys: where /sys is.
    """

    def __init__(self, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> None:
        self._proc = proc
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        # of groups with a quota
        self._quotas: list[Path] = []
        for path in _list_quota_files(proc, sys):
            if "nr_periods" in _read_pairs(path):
                self._quotas.append(path)
        self._clocks: list[Path] = []
        self._slowdowns: list[Path] = []
        highest_khz = []
        for folder in _list_cores(sys):
            self._clocks.append(folder / "cpufreq" / "scaling_cur_freq")
            throttling = folder / "thermal_throttle"
            self._slowdowns.append(throttling / "core_throttle_count")
            self._slowdowns.append(throttling / "package_throttle_count")
            highest_khz.append(_read_number(folder / "cpufreq" / "cpuinfo_max_freq"))
        # what one kernel does not have is not looked for again
        self._clocks = [path for path in self._clocks if path.exists()]
        self._slowdowns = [path for path in self._slowdowns if path.exists()]
        # highest clock of the cores that are read, MHz; None for unknown
        self.max_cpu_mhz = _to_mhz(max(filter(None, highest_khz), default=None))

    def read_cpu_mhz(self) -> float | None:
        """Read the mean clock of the first cores that the process may use; None where the kernel does not tell."""
        clocks_khz = [_read_number(path) for path in self._clocks]
        known_khz = [khz for khz in clocks_khz if khz is not None]
        return _to_mhz(fmean(known_khz)) if known_khz else None

    def read_counts(self) -> Iterator[tuple[str, float]]:
        """Yield counters that only grow, by name; `measure_shares` makes figures of two readings."""
        for number, path in enumerate(self._quotas):
            pairs = _read_pairs(path)
            yield f"{QUOTA_PERIODS} {number}", pairs.get("nr_periods", 0)
            yield f"{USED_UP_PERIODS} {number}", pairs.get("nr_throttled", 0)
        yield from self._read_ticks()
        for name, what in PRESSURES.items():
            text = _read(self._proc / "pressure" / what)
            found = SOME_TOTAL.search(text)
            if found:
                yield name, int(found[1])
        pages = _read_pairs(self._proc / "vmstat")
        if "pswpin" in pages and "pswpout" in pages:
            swapped = pages["pswpin"] + pages["pswpout"]
            yield "swapped_bytes", swapped * self._page_bytes
        slowdowns = [_read_number(path) for path in self._slowdowns]
        if slowdowns:
            yield "cpu_slowdowns", sum(filter(None, slowdowns))

    def _read_ticks(self) -> Iterator[tuple[str, float]]:
        """Yield clock ticks of all cores together, and those of them that other virtual machines took."""
        first, _, _ = _read(self._proc / "stat").partition("\n")
        ticks = [int(word) for word in first.split()[1:] if word.isdecimal()]
        if len(ticks) > STEAL:
            yield ALL_TICKS, sum(ticks[:WITHOUT_GUESTS])
            yield STOLEN_TICKS, ticks[STEAL]


def measure_shares(
    before: Mapping[str, float], after: Mapping[str, float], seconds: float
) -> Iterator[tuple[str, float]]:
    """Yield figures of HardwareFigures by name: what counters of the host grew by between two readings.

    Args:
        before: counters by name, as read_counts yields them.
        after: the same, later.
        seconds: between the two.
    """
    grown = {}
    for name in before.keys() & after.keys():
        grown[name] = max(after[name] - before[name], 0.0)
    quotas = list(_measure_quotas(grown))
    if quotas:
        yield "quota_used_up", max(quotas)
    ticks = grown.get(ALL_TICKS)
    if ticks:
        yield "stolen", grown[STOLEN_TICKS] / ticks
    for name in PRESSURES:
        if name in grown and seconds > 0:
            waited_s = grown[name] / US_PER_S
            yield name, min(waited_s / seconds, 1.0)
    for name in ("swapped_bytes", "cpu_slowdowns"):
        if name in grown:
            yield name, grown[name]


def _measure_quotas(grown: Mapping[str, float]) -> Iterator[float]:
    """Yield for each quota the share of its periods in which it was used up."""
    for name, periods in grown.items():
        kind, _, number = name.partition(" ")
        if kind == QUOTA_PERIODS and periods > 0:
            used_up = grown[f"{USED_UP_PERIODS} {number}"]
            yield used_up / periods


def _list_cores(sys: Path) -> list[Path]:
    """List the folders of the first cores that this process may use."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    cores = sorted(os.sched_getaffinity(0))
    return [sys / "devices" / "system" / "cpu" / f"cpu{core}" for core in cores[:MAX_CORES_READ]]


def _list_quota_files(proc: Path, sys: Path) -> Iterator[Path]:
    """List the files that count a CPU quota's periods: of the process' control group, and of all around it."""
    membership = _read(proc / "self" / "cgroup")
    for line in membership.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        # version 2 has one tree, version 1 one of each controller
        folder = sys / "fs" / "cgroup"
        if controllers:
            folder /= "cpu"
        yield folder / "cpu.stat"
        for part in path.split("/"):
            if part not in ("", ".."):
                folder /= part
                yield folder / "cpu.stat"


def _read_pairs(path: Path) -> dict[str, int]:
    """Read a file of lines "name number"; {} where there is none."""
    pairs = {}
    for line in _read(path).splitlines():
        name, _, value = line.partition(" ")
        if value.isdecimal():
            pairs[name] = int(value)
    return pairs


def _read_number(path: Path) -> int | None:
    """Read a file that holds one number; None where there is none."""
    text = _read(path).strip()
    return int(text) if text.isdecimal() else None


def _to_mhz(khz: float | None) -> float | None:
    """Convert kilohertz to megahertz."""
    return None if khz is None else khz / KHZ_PER_MHZ


def _read(path: Path) -> str:
    """Read a file of the kernel; "" where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
