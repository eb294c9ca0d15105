"""Samples the hardware of a rank in a thread beside its steps: what clocks, temperatures and counters tell of a run."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch

from megatron_lite.formats.hardware_record import SLOWDOWNS, ClockLimit, HardwareFigures
from megatron_lite.formats.run_record import Hardware
from megatron_lite.formats.step_records import HardwareRecord
from megatron_lite.instruments.base import Instrument
from megatron_lite.instruments.gpu_sensors import GpuSensors, open_gpu
from megatron_lite.instruments.host_counters import HostCounters, measure_shares
from megatron_lite.xid_errors import choose_most_telling

PERIOD_S = 1.0  # between samples, at least
MAX_SHARE = 0.001  # of one core's time that samples may take
SAMPLES_PER_COUNT = 5  # gauges are read in each sample, counters in each fifth: some take milliseconds
SECONDS_PER_LINE = 10.0  # of steps.jsonl, where no console lines take the samples
MAX_END_S = 2.0  # for the thread at a run's end: a driver that hangs must not hold it up
GPU_COUNTS = ("ecc_corrected", "ecc_uncorrected", "remapped_rows", "nvlink_errors", "pcie_replays")
MEANS = ("sm_clock_mhz", "memory_clock_mhz", "power_w", "utilization", "cpu_mhz")
AT_WORK = ("sm_clock_mhz", "memory_clock_mhz")  # of samples in which the GPU is not idle
STANDING = ("repair", "pcie_width")  # of the counters, those whose newest value is the figure


def open_sensors(gpu: int | None) -> GpuSensors | str | None:
    """Open the sensors of the GPU that this rank computes on.

    Args:
        gpu: torch's number of it, which CUDA_VISIBLE_DEVICES changes; None on CPUs.

    Returns:
        The sensors; a line that says why there are none; None on CPUs.
    """
    if gpu is None:
        return None
    if torch.version.cuda is None:
        return "clocks and temperatures of the GPU are not recorded: NVML knows NVIDIA's only"
    properties = torch.cuda.get_device_properties(gpu)
    uuid = getattr(properties, "uuid", None)
    # of an instance, torch's name is the instance's own
    uuids = [f"{kind}-{uuid}" for kind in ("GPU", "MIG")] if uuid else []
    domain = getattr(properties, "pci_domain_id", 0)
    bus = getattr(properties, "pci_bus_id", None)
    device = getattr(properties, "pci_device_id", 0)
    # an instance has the place of the whole GPU, which is what is read of it
    place = "" if bus is None else f"{domain:08X}:{bus:02X}:{device:02X}.0"
    return open_gpu(uuids, place)


@dataclass
class _Readings:
    """Readings of one figure since the last `take`."""

    number: int = 0
    total: float = 0.0
    least: float = math.inf
    most: float = -math.inf

    def add(self, value: float) -> None:
        """Add one reading to the sums."""
        self.number += 1
        self.total += value
        self.least = min(self.least, value)
        self.most = max(self.most, value)


class _Tally:
    """Sums over the samples since the last `take`: as small after a day as after a minute."""

    def __init__(self) -> None:
        self.samples = 0
        self.cpu_seconds = 0.0
        self.readings: dict[str, _Readings] = {}
        # samples in which it is known what held the clock down, those of a working GPU, and those held down
        self.with_limits = 0
        self.at_work = 0
        self.slowed = 0
        self.power_capped = 0
        self.limits = ClockLimit(0)
        # Xid events; None where the driver tells of none
        self.xids: int | None = None
        self.last_xid: int | None = None

    def add(self, gauges: Mapping[str, float | None], limits: ClockLimit | None, xids: Sequence[int] | None) -> None:
        """Add a sample.

        Args:
            gauges: values by name; None for unknown.
            limits: what held the clock down; None for unknown.
            xids: numbers of events; None for unknown.
        """
        self.samples += 1
        is_idle = limits is not None and ClockLimit.IDLE in limits
        if limits is not None:
            self._add_limits(limits, is_idle)
        for name, value in gauges.items():
            if value is not None and not (is_idle and name in AT_WORK):
                self.readings.setdefault(name, _Readings()).add(value)
        if xids is not None:
            self.xids = (self.xids or 0) + len(xids)
        if xids:
            before = [] if self.last_xid is None else [self.last_xid]
            self.last_xid = choose_most_telling([*before, *xids])

    def _add_limits(self, limits: ClockLimit, is_idle: bool) -> None:
        """Count what held the clock down in a sample."""
        self.with_limits += 1
        if is_idle:
            return
        self.at_work += 1
        self.limits |= limits
        if limits & SLOWDOWNS:
            self.slowed += 1
        if ClockLimit.SW_POWER_CAP in limits:
            self.power_capped += 1

    def fill(self, figures: HardwareFigures) -> None:
        """Write means, shares and extremes into the figures."""
        figures.samples = self.samples
        figures.sampling_ms = 1000 * self.cpu_seconds / self.samples
        for name in MEANS:
            readings = self.readings.get(name)
            if readings is not None:
                setattr(figures, name, readings.total / readings.number)
        clocks = self.readings.get("sm_clock_mhz")
        if clocks is not None:
            figures.min_sm_clock_mhz = clocks.least
        temperatures = self.readings.get("temperature_c")
        if temperatures is not None:
            figures.temperature_c = temperatures.most
        if self.with_limits:
            figures.idle = 1 - self.at_work / self.with_limits
            figures.clock_limits = int(self.limits)
        if self.at_work:
            figures.slowed = self.slowed / self.at_work
            figures.power_capped = self.power_capped / self.at_work
        figures.xids = self.xids
        figures.last_xid = self.last_xid


class HardwareSampler(Instrument):
    """Samples GPU and host once per second in a thread; `take` hands over what came since the last call.

    The thread that trains takes a lock for some microseconds per `take`, and does nothing else for it.

    Args:
        sensors: of the GPU; a line that says why there are none; None on CPUs.
        host: counters of the machine.
        period_s: seconds between samples; more where a sample takes more than MAX_SHARE of a core.
        clock: tells seconds; tests replace it.
    """

    def __init__(
        self,
        sensors: GpuSensors | str | None,
        host: HostCounters,
        period_s: float = PERIOD_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sensors = sensors if isinstance(sensors, GpuSensors) else None
        self._without_sensors = sensors if isinstance(sensors, str) else ""
        self._host = host
        self._period_s = period_s
        self._clock = clock
        self._lock = threading.Lock()
        self._tally = _Tally()
        self._sampled = 0
        # what holds for the run, or is asked seldom: newest values
        self._standing: dict[str, float] = {}
        # counters: newest values, and those at the last take
        self._counts: dict[str, float] = {}
        self._counted_at = 0.0
        self._counts_taken: dict[str, float] = {}
        self._taken_at = 0.0
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hardware sampler", daemon=True)
        if host.max_cpu_mhz is not None:
            self._standing["max_cpu_mhz"] = host.max_cpu_mhz
        if self._sensors is not None:
            limits = dict(self._sensors.read_limits())
            self._standing.update(_select_known(limits))

    def describe(self) -> Hardware:
        """Describe what holds for the run, and what cannot be read: fields for run.json."""
        sensors = self._sensors
        limits = HardwareFigures(**self._standing) if self._standing else None
        if self._without_sensors:
            return Hardware(limits=limits, unread={"gpu": self._without_sensors})
        if sensors is None:
            return Hardware(limits=limits)
        return Hardware(limits=limits, mig=sensors.is_mig or None, unread=dict(sensors.unread))

    def resume(self, iteration: int) -> None:
        self._thread.start()

    def finish(self) -> None:
        """Take a last sample, and end. It does not wait for a driver that hangs."""
        self._ends.set()
        if self._thread.is_alive():
            self._thread.join(MAX_END_S)

    def close(self, error: BaseException | None) -> None:
        self.finish()
        if self._sensors is not None and not self._thread.is_alive():
            self._sensors.close()

    def take(self) -> HardwareFigures | None:
        """Take what the samples since the last call tell; None where there was none."""
        with self._lock:
            tally = self._tally
            if not tally.samples:
                return None
            self._tally = _Tally()
            figures = HardwareFigures(**self._standing)
            before = self._counts_taken
            counts = dict(self._counts)
            seconds = self._counted_at - self._taken_at
            self._counts_taken = counts
            self._taken_at = self._counted_at
        tally.fill(figures)
        for name in GPU_COUNTS:
            if name in counts:
                # a counter that was set back starts anew
                setattr(figures, name, max(counts[name] - before[name], 0.0))
        for name, value in measure_shares(before, counts, seconds):
            setattr(figures, name, value)
        return figures

    def sample(self, with_counts: bool = False) -> float:
        """Take one sample.

        Args:
            with_counts: Read the counters, too, though it is not their turn.

        Returns:
            CPU seconds that it took.
        """
        began = time.thread_time()
        counts_too = with_counts or self._sampled % SAMPLES_PER_COUNT == 0
        self._sampled += 1
        sensors = self._sensors
        gauges: dict[str, float | None] = {"cpu_mhz": self._host.read_cpu_mhz()}
        limits = None
        xids = None
        if sensors is not None:
            gauges.update(sensors.read_gauges())
            limits = sensors.read_clock_limits()
            xids = sensors.take_xids()
        counts: dict[str, float | None] = {}
        if counts_too:
            counts.update(self._host.read_counts())
            if sensors is not None:
                counts.update(sensors.read_counters())
        with self._lock:
            self._tally.add(gauges, limits, xids)
            if counts_too:
                self._keep_counts(_select_known(counts))
            if sensors is not None and sensors.lost:
                self._standing["lost"] = 1.0
            took_s = time.thread_time() - began
            self._tally.cpu_seconds += took_s
        return took_s

    def _keep_counts(self, counts: dict[str, float]) -> None:
        """Keep the newest counters. The first value of each is what later ones are held against."""
        for name in STANDING:
            if name in counts:
                self._standing[name] = counts.pop(name)
        self._counts_taken = counts | self._counts_taken
        self._counts.update(counts)
        self._counted_at = self._clock()
        self._taken_at = self._taken_at or self._counted_at

    def _run(self) -> None:
        """Sample until the run ends, and once more then."""
        costs_s: deque[float] = deque(maxlen=SAMPLES_PER_COUNT)
        is_over = False
        while not is_over:
            costs_s.append(self.sample())
            wait_s = max(self._period_s, fmean(costs_s) / MAX_SHARE)
            is_over = self._ends.wait(wait_s)
        self.sample(with_counts=True)


class HardwareLines:
    """Makes lines of steps.jsonl of a rank's samples, where no console lines take them.

    Args:
        sampler: of this rank.
        rank: this one.
        clock: tells seconds; tests replace it.
    """

    def __init__(self, sampler: HardwareSampler, rank: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._sampler = sampler
        self._rank = rank
        self._clock = clock
        self._written_at = clock()
        self._first = 1

    def take(self, step: int, is_last: bool) -> HardwareRecord | None:
        """Take the next line if it is due; None where it is not, or nothing was sampled.

        Args:
            step: the running one.
            is_last: there is no later call.
        """
        now = self._clock()
        if not is_last and now - self._written_at < SECONDS_PER_LINE:
            return None
        figures = self._sampler.take()
        if figures is None:
            return None
        iterations = (min(self._first, step), step)
        self._written_at = now
        self._first = step + 1
        return HardwareRecord(iterations=iterations, rank=self._rank, figures=figures)


def _select_known(values: Mapping[str, float | None]) -> dict[str, float]:
    """The values that are known."""
    return {name: value for name, value in values.items() if value is not None}
