"""What is added to the header of a trace of torch.profiler: what its rank got of the cores. Times are milliseconds.

Ranks of a watched script that write no steps.jsonl also add samples of their hardware, a HardwareFigures.
"""

import msgspec

from megatron_lite.formats.step_records import Number, Ordinal, Positive

CORES_IN_TRACE = "megatron_lite_cores"  # key of the header
# key of a HardwareFigures: samples since the process began, of a rank of a watched script that writes no lines
HARDWARE_IN_TRACE = "megatron_lite_hardware"
# key of a KeptDamage: of a trace in a bundle, which was made of a damaged one
KEPT_DAMAGE = "megatron_lite_damage"


class RecordedCores(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Means per step over the recorded steps. A field that the system does not tell is absent."""

    # how many were recorded to their end
    steps: Ordinal
    # the whole step on the host
    ms: Positive
    # CPU time of all threads of the process
    cpu_ms: Number | None = None
    # for how long the thread that trains was ready and had no core; Linux
    core_wait_ms: Number | None = None
    # how often something else took a thread of the process off its core
    involuntary_switches: Number | None = None


class KeptDamage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What was wrong with the trace that one in a bundle was made of."""

    # "the JSON breaks off after byte 1,000; what precedes it was read"; "" where only the end is missing
    text: str = ""
    # the end of its events was missing
    cut: bool = False
