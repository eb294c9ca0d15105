"""The run ended because memory was full.

Meaning: an allocation failed. The line it failed at is the last drop, not what filled the memory.
Measured: the failed request in the snapshot, what was free on the device, and what held the memory at the peak.
Cost: the run.
Do: begin with the largest category: activations or logits: a smaller micro-batch or recomputation; moments and
    masters: more ranks or a smaller model; reserved but not allocated: see fragmentation; growing: see memory-growth.
Flags: --micro-batch-size, --recompute-granularity full, PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.
False alarm: a failure that the program caught and got around; the snapshot keeps it.
"""

from megatron_lite.analysis.findings.base import Evidence, Finding
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.units import size

CODE, TITLE = "out-of-memory", "allocation that failed"
MAX_SHOWN = 3
GROWS_WITH_BATCH = ("activations", "logits and loss", "workspace")


def find(facts: Facts) -> Finding | None:
    failed = next((one for one in facts.snapshots if one.oom is not None), None)
    if failed is None:
        return None
    free = f"{size(max(failed.oom.device_free_bytes, 0))} were free on the device"
    held = [
        Evidence(
            f"{part.category}: {size(part.num_bytes)}, {part.num_bytes / max(failed.peak_bytes, 1):.0%} of "
            "what tensors held"
        )
        for part in failed.held[:MAX_SHOWN]
    ]
    most = failed.held[0].category if failed.held else ""
    advice = f"{most or 'tensors'} hold most, which the micro-batch does not change: fewer parameters per rank"
    if most in GROWS_WITH_BATCH:
        advice = f"{most} hold most: a smaller --micro-batch-size, or --recompute-granularity full"
    asked = Evidence(f"{size(failed.oom.requested_bytes)} were asked for, {free}", failed.oom.site or failed.source)
    flags = ("--micro-batch-size", "--recompute-granularity full")
    return Finding(cost_bytes=failed.peak_bytes, evidence=(asked, *held), advice=advice, flags=flags, rank=failed.rank)
