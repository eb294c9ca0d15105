"""Hardware that is slower or sicker than it should be: clocks, errors, links, and what a host takes from its ranks."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from megatron_lite.analysis.findings.base import (
    Evidence,
    Finding,
    Observation,
    Recording,
    build_time_finding,
    could_not_look,
    rule,
    saw,
)
from megatron_lite.analysis.findings.communication_rules import find_latest_rank
from megatron_lite.analysis.gpu_clocks import GpuClock, find_low_gpus, find_slowed_gpus, list_gpu_clocks
from megatron_lite.analysis.rank_facts import in_ms
from megatron_lite.analysis.run.hardware import RanksHardware
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.formats.file_names import STEPS_FILE
from megatron_lite.formats.hardware_record import ClockLimit
from megatron_lite.thresholds import MIN_QUOTA_SHARE, MIN_STOLEN
from megatron_lite.units import counted, size
from megatron_lite.xid_errors import is_of_hardware

MAX_GPUS_SHOWN = 3
MAX_RANKS_NAMED = 8


@rule("gpu-slowed", "GPU that is slowed down", "hardware", "ranks", record=Recording.HARDWARE)
def find_slowed_gpu(facts: Facts) -> Finding | Observation:
    """A GPU's board or driver lowers its clock to protect it.

    Meaning: too hot, or without enough power from its supply, a GPU computes at a fraction of its clock, and all ranks
        wait for it in the next collective. Nothing in the program shows it.
    Measured: clock and clocks event reasons by NVML, sampled beside the steps (steps.jsonl): the GPU was not idle, and
        in a tenth of the samples or more a slowdown by heat (hardware or driver), power brake or hardware held a clock
        that is 5% or more below the highest one, or the other ranks'.
    Cost: what the others wait for this rank, where it is the one that they wait for; else it is not known.
    Do: look at cooling and power of this GPU (nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER): fans, dust, air flow, a
        cable, the room; move the rank to another node meanwhile.
    Flags: --no-hardware-samples switches the samples off.
    False alarm: none of the reason; a short one, while a job starts beside this one, is over by itself.
    """
    return _judge_clocks(facts, find_slowed_gpus(facts.ranks_hardware), _advise_on_heat, certain=True)


@rule("gpu-low-clock", "GPU at a low clock", "hardware", "ranks", record=Recording.HARDWARE)
def find_low_clock(facts: Facts) -> Finding | Observation:
    """A GPU runs far below its clock, or the other ranks', though neither heat nor its power supply slows it down.

    Meaning: a power limit that is lower than on the other GPUs, a clock that somebody has set, or sync boost with a
        slower GPU make a rank compute slower than the others, which wait for it.
    Measured: clock and clocks event reasons by NVML, sampled beside the steps, without idle samples: 10% below the
        median of the other ranks; or held by a set clock 10% below the highest one; or by the power limit below 60% of
        it. A power limit at full load takes some percent of the clock on most boards, and is no finding.
    Cost: what the others wait for this rank, where it is the one that they wait for; else it is not known.
    Do: by the reason: compare power limits (nvidia-smi -q -d POWER) and raise it (nvidia-smi -pl); give the clock free
        (nvidia-smi -rgc and -rac); for sync boost look at the other GPUs of the group.
    Flags: --no-hardware-samples switches the samples off.
    False alarm: a GPU whose own work is heavier draws more power, and has a lower clock for it; clocks of two kinds of
        GPUs in one job.
    """
    return _judge_clocks(facts, find_low_gpus(facts.ranks_hardware), _advise_on_clock, certain=False)


def _judge_clocks(
    facts: Facts, found: Sequence[GpuClock], advise: Callable[[GpuClock], str], certain: bool
) -> Finding | Observation:
    """Build the finding of GPUs at low clocks; else say at which clocks they ran.

    Args:
        facts: the run.
        found: the GPUs, lowest clock first; the one that the others wait for is named first.
        advise: writes what to do about one.
        certain: whether its clock is the GPU's fault, not its work's.
    """
    if not found:
        return _look_at_clocks(facts.ranks_hardware)
    late, _ = find_latest_rank(facts)
    first = found[0]
    cost_ms = None
    for one in found:
        if late is not None and one.rank == late.rank:
            first = one
            cost_ms = late.caused_wait_ms
    others = [one for one in found if one is not first]
    evidence = [_describe_gpu(one) for one in (first, *others[:MAX_GPUS_SHOWN])]
    if len(others) > MAX_GPUS_SHOWN:
        evidence.append(Evidence(f"and {counted(len(others) - MAX_GPUS_SHOWN, 'more GPU')}"))
    if cost_ms is not None:
        evidence.append(Evidence(f"the others wait {in_ms(cost_ms)} per step for rank {first.rank}"))
    return build_time_finding(cost_ms, evidence, advise(first), (), certain, first.rank)


def _describe_gpu(one: GpuClock) -> Evidence:
    """Describe a GPU's clock with its reasons, how often they held it, and how hot it was."""
    parts = [f"rank {one.rank}'s GPU {one.describe()}"]
    if one.slowed and one.mhz is not None:
        parts.append(f"slowed down in {one.slowed:.0%} of samples")
    if one.temperature_c is not None:
        parts.append(f"up to {one.temperature_c:.0f} degrees C")
    if one.power_w is not None and one.power_limit_w:
        parts.append(f"{one.power_w:.0f} of {one.power_limit_w:.0f} W")
    if one.others_mhz is not None:
        parts.append(f"the other ranks at {one.others_mhz:,.0f} MHz")
    return Evidence("; ".join(parts), STEPS_FILE)


def _look_at_clocks(hardware: RanksHardware) -> Observation:
    """Say at which clocks the GPUs ran, where that was sampled."""
    clocks = [one for one in list_gpu_clocks(hardware) if one.mhz is not None]
    if not clocks:
        return could_not_look()
    lowest = min(clocks, key=lambda one: one.mhz or 0.0)
    return saw(Evidence(f"the lowest clock: rank {lowest.rank}'s GPU {lowest.describe()}", STEPS_FILE))


def _advise_on_heat(one: GpuClock) -> str:
    """Advise what to look at, by the reason for which the GPU is slowed down."""
    gpu = f"the GPU of rank {one.rank}"
    if ClockLimit.HW_POWER_BRAKE in one.limits:
        return f"check the power supply and cables of {gpu}; give the rank another node meanwhile"
    if one.limits & (ClockLimit.HW_THERMAL | ClockLimit.SW_THERMAL):
        return f"check the cooling of {gpu}: fans, air flow, the room; give the rank another node meanwhile"
    return f"check cooling and power of {gpu} (nvidia-smi -q -d PERFORMANCE); give the rank another node meanwhile"


def _advise_on_clock(one: GpuClock) -> str:
    """Advise what to change, by the reason that holds the clock."""
    gpu = f"the GPU of rank {one.rank}"
    if ClockLimit.APPLICATION_CLOCKS in one.limits:
        return f"a clock is set on {gpu}: give it free (nvidia-smi -rgc, nvidia-smi -rac)"
    if ClockLimit.SYNC_BOOST in one.limits:
        return f"{gpu} is held by a slower one of its sync boost group: look at the others there"
    if ClockLimit.SW_POWER_CAP in one.limits:
        return f"compare the power limit of {gpu} with the others' (nvidia-smi -q -d POWER), and its work"
    return f"look at what holds {gpu} (nvidia-smi -q -d PERFORMANCE)"


ERRORS = ("ecc_uncorrected", "xids")
EVENT_NAMES = {
    "ecc_uncorrected": "uncorrected memory error",
    "xids": "Xid event",
    "remapped_rows": "replaced row of memory",
    "nvlink_errors": "NVLink error",
}


@rule("gpu-errors", "GPU with errors", "hardware", "ranks", record=Recording.HARDWARE)
def find_gpu_errors(facts: Facts) -> Finding | Observation:
    """A GPU had errors that end a process or make its results wrong.

    Meaning: an error of memory that was not corrected ends the process, or its results are wrong; with most Xid events
        the driver tells of the same, or of a GPU that no longer answers.
    Measured: the counter of uncorrected ECC errors since the run began, and Xid events of the driver, by NVML beside
        the steps; whether NVML lost the GPU.
    Cost: no time that is known; results are in doubt.
    Do: look at the kernel's log (dmesg, NVRM: Xid) and at nvidia-smi -q -d ECC; reset the GPU or drain the node, and
        have it checked (dcgmi diag -r 3); go on from a checkpoint before the error.
    Flags: --no-hardware-samples switches the samples off.
    False alarm: Xid 13, 31, 43 and 45 may be the program's own: a kernel that reads outside of its memory, a process
        that was ended. They make the finding likely at most, and so do Xids that are not known here.
    """
    hardware = facts.ranks_hardware
    told = dict(_list_errors(hardware))
    if not told:
        return _look_at_events(hardware, ERRORS)
    worst = max(told, key=lambda rank: _is_serious(hardware, rank))
    advice = (
        f"have the GPU of rank {worst} checked (dmesg, nvidia-smi -q -d ECC), give the rank another node meanwhile, "
        "and go on from a checkpoint before the error"
    )
    certain = _is_serious(hardware, worst)
    return build_time_finding(None, _list_evidence(told, worst), advice, (), certain, worst)


def _list_errors(hardware: RanksHardware) -> Iterator[tuple[int, str]]:
    """Yield each rank whose GPU had errors, and what they are."""
    for rank in range(hardware.ranks):
        parts = []
        if hardware.get_one("lost", rank):
            parts.append("NVML lost it")
        parts += _describe_events(hardware, rank, ERRORS)
        last_xid = hardware.get_one("last_xid", rank)
        if last_xid is not None:
            doubt = "" if is_of_hardware(int(last_xid)) else ", which a program may cause"
            parts.append(f"the most telling Xid: {last_xid:.0f}{doubt}")
        if parts:
            yield rank, "; ".join(parts)


def _is_serious(hardware: RanksHardware, rank: int) -> bool:
    """Whether a rank's errors are known as those of the hardware or its driver, not the program's."""
    if hardware.get_one("ecc_uncorrected", rank) or hardware.get_one("lost", rank):
        return True
    last_xid = hardware.get_one("last_xid", rank)
    return last_xid is not None and is_of_hardware(int(last_xid))


WEAR = ("remapped_rows", "nvlink_errors")
REPAIRS = {1: "its memory waits for a reset that repairs it", 2: "a repair of its memory failed"}


@rule("gpu-wear", "GPU whose memory or links wear out", "hardware", "ranks", record=Recording.HARDWARE)
def find_gpu_wear(facts: Facts) -> Finding | Observation:
    """A GPU's memory needs repairs, or its links send again what was lost.

    Meaning: rows of memory that were replaced, or wait to be, announce errors that are not corrected; NVLink repeats
        what arrived damaged, which takes time, and drops to less speed at last.
    Measured: remapped rows and errors of NVLink since the run began, and whether memory waits for a reset or could not
        be repaired, by NVML beside the steps. On GPUs since Hopper NVML has no such counters of links.
    Cost: not known.
    Do: reset the GPU when the job is over (nvidia-smi --gpu-reset); where a repair failed, exchange it; for links look
        at nvidia-smi nvlink -e on both ends.
    Flags: --no-hardware-samples switches the samples off.
    False alarm: some errors of links in days are normal.
    """
    hardware = facts.ranks_hardware
    told = {}
    for rank in range(hardware.ranks):
        parts = _describe_events(hardware, rank, WEAR)
        repair = hardware.get_one("repair", rank)
        if repair:
            parts.append(REPAIRS.get(int(repair), "its memory needs a repair"))
        if parts:
            told[rank] = "; ".join(parts)
    if not told:
        return _look_at_events(hardware, WEAR)
    worst = max(told, key=lambda rank: hardware.get_one("repair", rank) or 0.0)
    advice = f"reset the GPU of rank {worst} when the job is over (nvidia-smi --gpu-reset), and watch it"
    return build_time_finding(None, _list_evidence(told, worst), advice, (), certain=True, rank=worst)


def _describe_events(hardware: RanksHardware, rank: int, names: Sequence[str]) -> list[str]:
    """Describe which of these events a rank's GPU had, and how many."""
    parts = []
    for name in names:
        number = hardware.get_one(name, rank)
        if number:
            what = EVENT_NAMES[name]
            parts.append(counted(round(number), what))
    return parts


def _list_evidence(told: Mapping[int, str], worst: int) -> list[Evidence]:
    """List what was seen of the ranks' GPUs, the worst first."""
    ranks = [worst, *(rank for rank in told if rank != worst)]
    evidence = [Evidence(f"rank {rank}'s GPU: {told[rank]}", STEPS_FILE) for rank in ranks[:MAX_GPUS_SHOWN]]
    if len(ranks) > MAX_GPUS_SHOWN:
        evidence.append(Evidence(f"and {counted(len(ranks) - MAX_GPUS_SHOWN, 'more GPU')}"))
    return evidence


def _look_at_events(hardware: RanksHardware, names: Sequence[str]) -> Observation:
    """Say that no GPU had such events, where they are counted."""
    looked = [EVENT_NAMES[name] for name in names if name in hardware.figures]
    if not looked:
        return could_not_look()
    return saw(Evidence(f"no {', no '.join(looked)} of any GPU", STEPS_FILE))


@rule("narrow-pcie", "PCIe link with fewer lanes than it can have", "hardware", "ranks", record=Recording.HARDWARE)
def find_narrow_pcie(facts: Facts) -> Finding | Observation:
    """A GPU's PCIe link has fewer lanes than GPU and slot can have.

    Meaning: a card or cable that does not sit well, or a damaged lane, leaves half of the lanes or fewer: copies to the
        GPU, and to other nodes through the host, take twice as long.
    Measured: the current width of the link against the greatest that GPU and slot have, by NVML beside the steps.
    Cost: not known; it is part of copies that the step waits for, and of traffic to other nodes.
    Do: seat the card anew; exchange cable or slot; compare nvidia-smi -q -d PCIE with a healthy node.
    Flags: --no-hardware-samples switches the samples off.
    False alarm: boards that save power by fewer lanes while nothing is copied.
    """
    hardware = facts.ranks_hardware
    widths = hardware.get("pcie_width")
    highest = hardware.get("max_pcie_width")
    if np.isnan(widths).all() or np.isnan(highest).all():
        return could_not_look()
    narrow = np.flatnonzero(widths < highest).tolist()
    if not narrow:
        return saw(Evidence(f"each link has its {np.nanmax(highest):.0f} lanes", STEPS_FILE))
    first = narrow[0]
    lanes = f"{widths[first]:.0f} of {highest[first]:.0f} lanes"
    text = f"PCIe link of the GPU of {_name_ranks(narrow)}: {lanes}"
    advice = f"seat the GPU of rank {first} anew, or exchange its cable or slot"
    return build_time_finding(None, [Evidence(text, STEPS_FILE)], advice, (), certain=True, rank=first)


# --- what the host takes from its ranks

MIN_PRESSURE = 0.10  # of the time
MIN_SWAPPED = 64 * 2**20  # bytes


@rule("cpu-quota", "CPU quota of the container used up", "run", record=Recording.RUN_FOLDER)
def find_cpu_quota(facts: Facts) -> Finding | Observation:
    """The control group of a rank had used up its CPU quota, and all its threads stood still until the next period.

    Meaning: a container with a limit of CPU time (limits.cpu of Kubernetes, cpus of Docker) sees all cores of its host.
        It is stopped for the rest of each period of 0.1 s in which its threads together took more than the limit.
        Steps get longer by chance; launches to a GPU come late.
    Measured: nr_throttled against nr_periods in cpu.stat of the process' control groups (versions 1 and 2), over the
        run: the share of periods in which the quota was used up.
    Cost: the wait for a core of the rank that waits longest, where that is recorded.
    Do: raise the limit or remove it; or start fewer threads and loader workers than it grants.
    Flags: OMP_NUM_THREADS, --num-workers.
    False alarm: a group that other processes share may be stopped for their sake: the ranks stand still all the same.
    """
    shares = facts.ranks_hardware.get("quota_used_up")
    if np.isnan(shares).all():
        return could_not_look()
    short = np.flatnonzero(shares >= MIN_QUOTA_SHARE).tolist()
    rank = int(np.nanargmax(shares))
    text = f"the CPU quota was used up in {shares[rank]:.0%} of its periods"
    if not short:
        return saw(Evidence(f"{text}, at most", STEPS_FILE))
    shortage = facts.core_shortage
    cost_ms = shortage.wait_ms if shortage is not None and shortage.rank in short else None
    advice = (
        "raise the container's limit of CPU time (Kubernetes: limits.cpu), or start fewer threads and loader workers"
    )
    whose = Evidence(f"{text} on {_name_ranks(short)}", STEPS_FILE)
    return build_time_finding(cost_ms, [whose], advice, (), certain=True, rank=rank)


@rule("stolen-time", "CPU time that other virtual machines took", "run", record=Recording.RUN_FOLDER)
def find_stolen_time(facts: Facts) -> Finding | Observation:
    """Other virtual machines of the host took CPU time that this one wanted.

    Meaning: a host that has sold more cores than it has gives them in turns. While another machine has it, a core of
        this one stands still, and no counter of the process shows it.
    Measured: steal in /proc/stat, over the run: the share of all CPU time of the machine.
    Cost: at most this share of what the host computes.
    Do: a machine with cores of its own (a dedicated one, or of another kind); compare runs only on quiet ones.
    Flags: none.
    False alarm: a burstable machine whose credit is used up is slowed down in the same way, by its own limit.
    """
    shares = facts.ranks_hardware.get("stolen")
    if np.isnan(shares).all():
        return could_not_look()
    rank = int(np.nanargmax(shares))
    text = f"other virtual machines took {shares[rank]:.0%} of the CPU time"
    robbed = np.flatnonzero(shares >= MIN_STOLEN).tolist()
    if not robbed:
        return saw(Evidence(f"{text}, at most", STEPS_FILE))
    advice = "move the run to a machine with cores of its own, and compare times on quiet machines only"
    seen = Evidence(f"{text} of {_name_ranks(robbed)}", STEPS_FILE)
    return build_time_finding(None, [seen], advice, (), certain=True, rank=rank)


@rule("host-memory-pressure", "machine that is short of memory", "run", record=Recording.RUN_FOLDER)
def find_memory_pressure(facts: Facts) -> Finding | Observation:
    """The machine was short of memory: processes waited for pages, or memory was moved to swap.

    Meaning: where processes together want more than there is, the kernel drops and reads pages again and again. All of
        them get slower, and at last one is killed.
    Measured: pressure stall information of the kernel (some, /proc/pressure/memory), over the run: the share of time in
        which a process waited for memory; bytes moved to and from swap.
    Cost: not known: at most this share of the host's part of a step.
    Do: fewer loader workers and smaller prefetching, no copies of the data set per worker; a machine with more memory.
    Flags: --num-workers.
    False alarm: another job's processes wait, not the ranks: the machine is short all the same.
    """
    hardware = facts.ranks_hardware
    pressures = hardware.get("memory_pressure")
    swapped = hardware.get("swapped_bytes")
    if np.isnan(pressures).all() and np.isnan(swapped).all():
        return could_not_look()
    rank = int(np.nan_to_num(pressures).argmax())
    pressure = hardware.get_one("memory_pressure", rank) or 0.0
    swapped_bytes = float(np.nan_to_num(swapped).max())
    text = f"processes waited for memory in {pressure:.0%} of the time"
    if swapped_bytes:
        text += f"; {size(swapped_bytes)} moved to and from swap"
    seen = Evidence(text, STEPS_FILE)
    is_certain = pressure >= MIN_PRESSURE
    # moving memory that nobody waits for costs nothing
    swaps = pressure > 0 and swapped_bytes >= MIN_SWAPPED
    if not (is_certain or swaps):
        return saw(seen)
    advice = "use less memory of the host: fewer loader workers, smaller prefetching; or a machine with more"
    return build_time_finding(None, [seen], advice, ("--num-workers",), certain=is_certain, rank=rank)


@rule("hot-cpu", "CPU that heat slows down", "run", record=Recording.RUN_FOLDER)
def find_hot_cpu(facts: Facts) -> Finding | Observation:
    """Heat makes the machine's cores slow down.

    Meaning: a processor that gets too hot lowers its clock by itself, and everything that the host does takes longer.
    Measured: throttle counts of the cores in sysfs (thermal_throttle), sampled beside the steps, and their clock
        against the highest they can have (cpufreq): as many events as seconds at least, and a clock below 60% of it.
    Cost: not known.
    Do: check the machine's cooling; move the run to another node meanwhile.
    Flags: none.
    False alarm: some events at full load are normal on many machines, and so is a clock below the highest when all
        cores work; where the clock is not known, nothing is found.
    """
    hardware = facts.ranks_hardware
    events = hardware.get("cpu_slowdowns")
    clocks = hardware.get("cpu_mhz")
    highest = hardware.get("max_cpu_mhz")
    is_known = ~np.isnan(events + clocks + highest)
    if not is_known.any():
        return could_not_look()
    rank = int(np.where(is_known, events, -1.0).argmax())
    text = (
        f"heat slowed the cores of rank {rank} down {counted(round(float(events[rank])), 'time')}; "
        f"their clock is {clocks[rank]:,.0f} of {highest[rank]:,.0f} MHz"
    )
    seen = Evidence(text, STEPS_FILE)
    samples = hardware.get_one("samples", rank) or 0.0
    is_often = events[rank] >= samples
    is_slow = clocks[rank] < LOW_CPU_CLOCK * highest[rank]
    if not (is_often and is_slow):
        return saw(seen)
    advice = f"check the cooling of the machine of rank {rank}; move the run to another node meanwhile"
    return build_time_finding(None, [seen], advice, (), certain=False, rank=rank)


LOW_CPU_CLOCK = 0.6  # of the highest: all cores together have less than one alone


def _name_ranks(ranks: Sequence[int]) -> str:
    """Name ranks as in "rank 3", "ranks 0, 1, 2", "ranks 0, 1, ... and 92 more"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    named = ", ".join(map(str, ranks[:MAX_RANKS_NAMED]))
    if len(ranks) > MAX_RANKS_NAMED:
        named += f" and {len(ranks) - MAX_RANKS_NAMED} more"
    return f"ranks {named}"
