"""What the hardware of a rank did beside its steps: clocks, temperatures, errors, and what the host took from it."""

import enum
from typing import Annotated

import msgspec

MAX_FIGURE = 10**18  # no clock, count or size is larger; beyond it a file is damaged

Figure = Annotated[float, msgspec.Meta(ge=0, lt=MAX_FIGURE)]


class ClockLimit(enum.IntFlag):
    """What holds a GPU's clock below its highest one: NVML's clocks event reasons.

    Source: docs.nvidia.com/deploy/nvml-api, group nvmlClocksEventReasons, R590, 2026-01-12.
    """

    IDLE = 0x1
    APPLICATION_CLOCKS = 0x2
    SW_POWER_CAP = 0x4
    HW_SLOWDOWN = 0x8
    SYNC_BOOST = 0x10
    SW_THERMAL = 0x20
    HW_THERMAL = 0x40
    HW_POWER_BRAKE = 0x80
    DISPLAY_CLOCKS = 0x100


# the board or its driver slows the GPU down to protect it; HW_SLOWDOWN stands beside the two after it, or alone
SLOWDOWNS = ClockLimit.HW_SLOWDOWN | ClockLimit.HW_THERMAL | ClockLimit.HW_POWER_BRAKE | ClockLimit.SW_THERMAL


LIMIT_NAMES = {
    # the more telling names first: HW_SLOWDOWN stands beside them
    ClockLimit.HW_THERMAL: "thermal slowdown",
    ClockLimit.HW_POWER_BRAKE: "power brake",
    ClockLimit.SW_THERMAL: "thermal slowdown by the driver",
    ClockLimit.HW_SLOWDOWN: "hardware slowdown",
    ClockLimit.SW_POWER_CAP: "power limit",
    ClockLimit.SYNC_BOOST: "sync boost with another GPU",
    ClockLimit.APPLICATION_CLOCKS: "application clocks",
    ClockLimit.DISPLAY_CLOCKS: "display clocks",
    ClockLimit.IDLE: "idle",
}


def name_limits(limits: ClockLimit) -> str:
    """Name what holds a clock down, as in "thermal slowdown, power limit"; "" where nothing does."""
    names = {limit: name for limit, name in LIMIT_NAMES.items() if limit in limits}
    if ClockLimit.HW_THERMAL in names or ClockLimit.HW_POWER_BRAKE in names:
        names.pop(ClockLimit.HW_SLOWDOWN, None)
    return ", ".join(names.values())


class HardwareFigures(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Samples of one rank's hardware, over some seconds. What cannot be read is absent; nothing is guessed.

    Clocks are of samples in which the GPU was not idle. Of a MIG instance, what NVML tells of the whole GPU.
    """

    # how many samples were taken
    samples: Figure | None = None
    # CPU time of one sample, mean; milliseconds
    sampling_ms: Figure | None = None
    # clock of the GPU's multiprocessors, mean; MHz
    sm_clock_mhz: Figure | None = None
    # the lowest of them
    min_sm_clock_mhz: Figure | None = None
    # clock of the GPU's memory, mean; MHz
    memory_clock_mhz: Figure | None = None
    # the highest temperature of the GPU; degrees Celsius
    temperature_c: Figure | None = None
    # power that the GPU draws, mean; watts
    power_w: Figure | None = None
    # share of time in which a kernel ran, mean of what NVML tells; 1 is all
    utilization: Figure | None = None
    # what limited the clock in any sample but idle ones: the sum of ClockLimit's values
    clock_limits: Figure | None = None
    # share of samples in which the GPU was idle
    idle: Figure | None = None
    # share of the other samples in which the board or its driver slowed the GPU down (heat, power supply)
    slowed: Figure | None = None
    # share of the other samples in which the power limit held the clock down
    power_capped: Figure | None = None
    # highest clock that the multiprocessors can have; MHz
    max_sm_clock_mhz: Figure | None = None
    # power limit that holds; watts
    power_limit_w: Figure | None = None
    # temperature from which the board slows the GPU down; degrees Celsius
    slowdown_c: Figure | None = None
    # lanes of the PCIe link, and those that GPU and slot can have
    pcie_width: Figure | None = None
    max_pcie_width: Figure | None = None
    # 1: memory of the GPU waits to be repaired by a reset; 2: a repair failed
    repair: Figure | None = None
    # 1: NVML lost the GPU
    lost: Figure | None = None
    # events since the samples before: errors of the GPU's memory that were corrected
    ecc_corrected: Figure | None = None
    # errors of the GPU's memory that were not
    ecc_uncorrected: Figure | None = None
    # rows of the GPU's memory that were replaced
    remapped_rows: Figure | None = None
    # errors of NVLink that made it send again, or recover
    nvlink_errors: Figure | None = None
    # packets that PCIe sent again
    pcie_replays: Figure | None = None
    # Xid events that the driver told of
    xids: Figure | None = None
    # number of the last one that no program makes, else of the last one
    last_xid: Figure | None = None
    # share of the periods of a control group's CPU quota in which the group had used it up
    quota_used_up: Figure | None = None
    # share of all CPU time that other virtual machines took
    stolen: Figure | None = None
    # clock of the first cores that the process may use, mean; MHz
    cpu_mhz: Figure | None = None
    # highest clock that they can have; MHz
    max_cpu_mhz: Figure | None = None
    # how often heat slowed them down
    cpu_slowdowns: Figure | None = None
    # share of time in which some process of the machine waited for a core, for memory, and for a disk (PSI)
    cpu_pressure: Figure | None = None
    memory_pressure: Figure | None = None
    io_pressure: Figure | None = None
    # bytes that the machine moved between memory and swap
    swapped_bytes: Figure | None = None
