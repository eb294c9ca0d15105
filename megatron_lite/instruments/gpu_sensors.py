"""Reads clocks, temperatures and error counters of one GPU by NVML (the package nvidia-ml-py).

What a driver does not tell, or not to this user, is asked once and then left out: an absent figure is unknown.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any

from megatron_lite.formats.hardware_record import ClockLimit

# nvml.h of R590: enumerations whose names pynvml has, too; its older releases lack some
SM_CLOCK = 1
MEMORY_CLOCK = 2
GPU_TEMPERATURE = 0
SLOWDOWN_TEMPERATURE = 1
CORRECTED = 0
UNCORRECTED = 1
SINCE_DRIVER_LOADED = 0  # "volatile" counters
XID_EVENTS = 0x8
# totals of all links since Volta's NVLink: data that failed its check, what was sent again, links that recovered
NVLINK_ERRORS = (45, 52, 59)
NOT_SUPPORTED = 3
NO_PERMISSION = 4
FUNCTION_NOT_FOUND = 13
FOR_GOOD = (NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND)
TIMEOUT = 10
UNINITIALIZED = 1
GPU_IS_LOST = 15
RESET_REQUIRED = 16
LOST = (UNINITIALIZED, GPU_IS_LOST, RESET_REQUIRED)
ALL_LIMITS = sum(ClockLimit)  # of newer drivers, those that are not known are left out
MAX_FAILURES = 3  # of one figure, before it is asked for no more
MAX_XIDS = 32  # that one sample takes; more wait for the next
REPAIR_PENDING = 1
REPAIR_FAILED = 2
HOW_TO_INSTALL = "pip install nvidia-ml-py"
UNSIGNED_INT = 1  # kinds of a field's value
UNSIGNED_LONG = 2
UNSIGNED_LONG_LONG = 3


def open_gpu(uuids: Sequence[str], pci_bus_id: str) -> "GpuSensors | str":
    """Find the GPU that torch computes on among those of NVML, whose numbers are others.

    Args:
        uuids: names that NVML may have for it, as in GPU-1234..., MIG-1234...
        pci_bus_id: its place, as in 00000000:1B:00.0; "" for unknown.

    Returns:
        The sensors, or a line that says why there are none.
    """
    try:
        nvml = import_module("pynvml")
    except ImportError:
        return f"clocks and temperatures of the GPU are not recorded: {HOW_TO_INSTALL}"
    try:
        nvml.nvmlInit()
    except Exception as error:  # noqa: BLE001 - whatever a driver lacks must not end the training
        return f"clocks and temperatures of the GPU are not recorded: NVML says {error}"
    ways: list[tuple[Callable[..., Any], str]] = [(nvml.nvmlDeviceGetHandleByUUID, uuid) for uuid in uuids]
    if pci_bus_id:
        ways.append((nvml.nvmlDeviceGetHandleByPciBusId, pci_bus_id))
    for find, name in ways:
        with contextlib.suppress(Exception):
            return GpuSensors(nvml, find(name))
    return f"clocks and temperatures of the GPU are not recorded: NVML knows no GPU {', '.join(uuids) or pci_bus_id}"


class GpuSensors:
    """Sensors and counters of one GPU. Each reading is None where the driver does not tell.

    Args:
        nvml: the module pynvml, initialized.
        handle: what NVML calls the GPU, or an instance of it.
    """

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._failures: dict[str, int] = {}
        # by figure, why it is not read
        self.unread: dict[str, str] = {}
        self.lost = ""  # why NVML knows the GPU no longer
        self.is_mig = False
        with contextlib.suppress(Exception):
            # clocks, temperature and errors are those of the whole GPU
            handle = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
            self.is_mig = True
        self._handle = handle
        self._xids = self._register_xids()

    def read_limits(self) -> Iterator[tuple[str, float | None]]:
        """Yield what does not change in a run: names of HardwareFigures, and values."""
        yield "max_sm_clock_mhz", self._ask("max_sm_clock_mhz", "nvmlDeviceGetMaxClockInfo", SM_CLOCK)
        yield "power_limit_w", _to_units(self._ask("power_limit_w", "nvmlDeviceGetEnforcedPowerLimit"))
        yield "slowdown_c", self._ask("slowdown_c", "nvmlDeviceGetTemperatureThreshold", SLOWDOWN_TEMPERATURE)
        yield "max_pcie_width", self._ask("max_pcie_width", "nvmlDeviceGetMaxPcieLinkWidth")

    def read_gauges(self) -> Iterator[tuple[str, float | None]]:
        """Yield what holds at this moment: names of HardwareFigures, and values."""
        yield "sm_clock_mhz", self._ask("sm_clock_mhz", "nvmlDeviceGetClockInfo", SM_CLOCK)
        yield "memory_clock_mhz", self._ask("memory_clock_mhz", "nvmlDeviceGetClockInfo", MEMORY_CLOCK)
        yield "temperature_c", self._ask("temperature_c", "nvmlDeviceGetTemperature", GPU_TEMPERATURE)
        yield "power_w", _to_units(self._ask("power_w", "nvmlDeviceGetPowerUsage"))
        yield "utilization", self._try("utilization", self._read_utilization)

    def read_clock_limits(self) -> ClockLimit | None:
        """Read what holds the clock down at this moment; None where it is unknown."""
        known = self._try("clock_limits", self._read_reasons)
        return None if known is None else ClockLimit(int(known) & ALL_LIMITS)

    def read_counters(self) -> Iterator[tuple[str, float | None]]:
        """Yield counts since the driver was loaded, and what is asked as seldom: names of HardwareFigures, and values.

        Some take milliseconds.
        """
        for name, kind in (("ecc_corrected", CORRECTED), ("ecc_uncorrected", UNCORRECTED)):
            yield name, self._ask(name, "nvmlDeviceGetTotalEccErrors", kind, SINCE_DRIVER_LOADED)
        yield "remapped_rows", self._try("remapped_rows", self._count_remapped_rows)
        yield "repair", self._try("repair", self._read_repair)
        yield "nvlink_errors", self._try("nvlink_errors", self._count_nvlink_errors)
        yield "pcie_replays", self._ask("pcie_replays", "nvmlDeviceGetPcieReplayCounter")
        yield "pcie_width", self._ask("pcie_width", "nvmlDeviceGetCurrPcieLinkWidth")

    def take_xids(self) -> list[int] | None:
        """Take the numbers of Xid events since the last call, without waiting; None where the driver tells of none."""
        if self._xids is None:
            return None
        numbers: list[int] = []
        wait = getattr(self._nvml, "nvmlEventSetWait_v2", None) or self._nvml.nvmlEventSetWait
        while len(numbers) < MAX_XIDS:
            try:
                event = wait(self._xids, 0)
            except Exception as error:  # noqa: BLE001 - whatever NVML says, the rest of the sample stands
                if _get_code(error) != TIMEOUT:
                    self._note_failure("xids", error)
                    if "xids" in self.unread:
                        self._xids = None
                return numbers
            numbers.append(int(event.eventData))
        return numbers

    def close(self) -> None:
        """Let go of NVML."""
        with contextlib.suppress(Exception):
            if self._xids is not None:
                self._nvml.nvmlEventSetFree(self._xids)
            self._nvml.nvmlShutdown()

    def _register_xids(self) -> Any:
        """Ask the driver for Xid events of this GPU; None where it does not send them."""
        nvml = self._nvml
        try:
            events = nvml.nvmlEventSetCreate()
        except Exception as error:  # noqa: BLE001 - a driver without events has the rest
            self.unread["xids"] = str(error)
            return None
        try:
            nvml.nvmlDeviceRegisterEvents(self._handle, XID_EVENTS, events)
        except Exception as error:  # noqa: BLE001 - as above
            self.unread["xids"] = str(error)
            with contextlib.suppress(Exception):
                nvml.nvmlEventSetFree(events)
            return None
        return events

    def _ask(self, name: str, function: str, *arguments: int) -> float | None:
        """Ask one function of NVML about the GPU.

        Args:
            name: of the figure.
            function: its name; older releases of the package lack some.
            arguments: behind the GPU.
        """
        return self._try(name, lambda: getattr(self._nvml, function)(self._handle, *arguments))

    def _try(self, name: str, read: Callable[[], float]) -> float | None:
        """Read one figure; None where it cannot be read. One that is not there, or not for this user, is tried once."""
        if name in self.unread or self.lost:
            return None
        try:
            value = float(read())
        except Exception as error:  # noqa: BLE001 - NVML has dozens of errors, and each release has others
            self._note_failure(name, error)
            return None
        self._failures.pop(name, None)
        return value

    def _note_failure(self, name: str, error: Exception) -> None:
        """Note that a figure could not be read, and whether to ask again."""
        code = _get_code(error)
        if code in LOST:
            self.lost = str(error)
            return
        failures = self._failures.get(name, 0) + 1
        self._failures[name] = failures
        # an error without a code is of the package: a function that its release does not have
        if code is None or code in FOR_GOOD or failures >= MAX_FAILURES:
            self.unread[name] = str(error)

    def _read_utilization(self) -> float:
        """Share of time in which a kernel ran."""
        return float(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu) / 100

    def _read_reasons(self) -> int:
        """Bits of what holds the clock down, by the name that driver and package have for it."""
        nvml = self._nvml
        read = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        if read is not None:
            try:
                return int(read(self._handle))
            except Exception as error:
                if _get_code(error) != FUNCTION_NOT_FOUND:
                    raise
        # drivers before R535
        return int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle))

    def _count_remapped_rows(self) -> int:
        """Rows of memory that were replaced since the GPU was made."""
        corrected, uncorrected, _, _ = self._nvml.nvmlDeviceGetRemappedRows(self._handle)
        return int(corrected) + int(uncorrected)

    def _read_repair(self) -> int:
        """Whether memory waits to be repaired, or could not be."""
        _, _, is_pending, has_failed = self._nvml.nvmlDeviceGetRemappedRows(self._handle)
        if has_failed:
            return REPAIR_FAILED
        return REPAIR_PENDING if is_pending else 0

    def _count_nvlink_errors(self) -> int:
        """Errors of all links together; raises where the GPU has no such counters."""
        fields = self._nvml.nvmlDeviceGetFieldValues(self._handle, list(NVLINK_ERRORS))
        counts = [_read_field(field) for field in fields]
        known = [count for count in counts if count is not None]
        if not known:
            raise LookupError("the GPU has no counters of NVLink's errors")
        return sum(known)


def _get_code(error: Exception) -> int | None:
    """Number of an error of NVML; None for another one."""
    value = getattr(error, "value", None)
    return value if isinstance(value, int) else None


def _to_units(thousandths: float | None) -> float | None:
    """Convert milliwatts to watts."""
    return None if thousandths is None else thousandths / 1000


def _read_field(field: Any) -> int | None:
    """Whole number of a field's value; None where NVML has none for this GPU."""
    if field.nvmlReturn != 0:
        return None
    members = {UNSIGNED_INT: "uiVal", UNSIGNED_LONG: "ulVal", UNSIGNED_LONG_LONG: "ullVal"}
    member = members.get(field.valueType)
    return None if member is None else int(getattr(field.value, member))
