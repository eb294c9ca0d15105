"""Runs a plan's training steps without data and without a GPU, to tell exactly which memory they take, and when.

It joins two halves that do not know each other: planner/walk takes the steps, and analysis/memory reads the snapshot of
them, as it reads any other.

python -m megatron_lite.rehearsal < REQUEST is for programs that do not import torch. REQUEST is JSON: flags
of the trainer, world (fields of World), vocab_size, snapshot (a path to write), workspace (bytes of one of cuBLAS').
Prints the figures as JSON, without the snapshot. Exit code 2 and one line for each mistake of the user.
"""

import json
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path

from megatron_lite.analysis.memory.read import analyze_snapshot
from megatron_lite.caching_allocator import rounded
from megatron_lite.config.command_line import read_command_line
from megatron_lite.config.plan import Plan, resolve
from megatron_lite.config.world import World
from megatron_lite.errors import UserError
from megatron_lite.formats.hardware import CUBLAS_WORKSPACE
from megatron_lite.formats.memory_snapshot import MemorySnapshot, TraceEvent
from megatron_lite.instruments.memory_summary import describe_place, operation, site
from megatron_lite.instruments.snapshot_format import write_snapshot
from megatron_lite.planner.walk.walk_steps import Walked, walk_plan


def make_empty_snapshot() -> MemorySnapshot:
    """Make the snapshot of a process that holds nothing."""
    return {"segments": [], "device_traces": [[]], "allocator_settings": {}, "external_annotations": []}


@dataclass(frozen=True)
class Rehearsal:
    """Memory of one rank's first steps. Bytes are in steps of 512, as CUDA's allocator hands them out."""

    allocated_peak_bytes: int
    reserved_peak_bytes: int
    expandable_reserved_bytes: int  # with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
    phase: str  # of the peak, a Phase's value, or recompute
    where: str  # "forward of step 1 in decoder.layers.3.mlp: aten.gelu.default from gelu_tanh (model/gpt.py:10)"
    # bytes at the peak, by formats.memory_categories.CATEGORIES, largest first; they add up to the peak
    categories: dict[str, int]
    notes: tuple[str, ...]  # what is not in it, in words
    # (dimension of the group, kind, bytes of the whole tensor, times) in the last step, of the micro-batches walked
    collectives: tuple[tuple[str, str, int, int], ...] = ()
    snapshot: MemorySnapshot = field(default_factory=make_empty_snapshot, repr=False)


def rehearse(plan: Plan, steps: int = 2, workspace: int = CUBLAS_WORKSPACE) -> Rehearsal:
    """Walk the real model, loss, backward and optimizer under fake tensors, as on one GPU of the plan (or on its CPU).

    No more micro-batches than differ from each other are walked.

    Args:
        plan: This rank's.
        steps: Number of steps to walk.
        workspace: Bytes of each cuBLAS workspace; hardware.CUBLAS_WORKSPACE_SINCE_HOPPER on newer GPUs.

    Raises:
        UserError: A flag names an attention kernel that cannot run.
    """
    return summarize_walk(walk_plan(plan, steps, workspace))


def summarize_walk(walked: Walked) -> Rehearsal:
    """Compute the figures of a walk from its snapshot."""
    snapshot = walked.snapshot
    read = analyze_snapshot(snapshot, Path("rehearsal"))
    replayed_bytes = read.fragmentation.replay_reserved_bytes
    assert replayed_bytes is not None  # the record is whole
    highest = _find_highest(snapshot["device_traces"][0])
    place = describe_place(highest["user_metadata"])
    frames = highest["frames"]
    return Rehearsal(
        allocated_peak_bytes=read.peak_bytes,
        reserved_peak_bytes=read.fragmentation.reserved_bytes,
        expandable_reserved_bytes=replayed_bytes,
        phase=read.peak_phase,
        where=f"{place}: {operation(frames)}{site(frames)}",
        categories={held.category: held.num_bytes for held in read.held},
        notes=walked.notes,
        collectives=walked.collectives,
        snapshot=snapshot,
    )


def _find_highest(events: list[TraceEvent]) -> TraceEvent:
    """Find the allocation that first reaches the peak. Rehearsals begin with nothing."""
    held_bytes = 0
    most_bytes = 0
    highest = events[0]
    for event in events:
        if event["action"] == "alloc":
            held_bytes += rounded(event["size"])
            if held_bytes > most_bytes:
                most_bytes = held_bytes
                highest = event
        elif event["action"] == "free_completed":
            held_bytes -= rounded(event["size"])
    return highest


def main() -> int:
    """Rehearse what standard input asks for. Returns the exit code."""
    request = json.load(sys.stdin)
    plan = resolve(read_command_line(request["flags"]).args, World(**request["world"]), request["vocab_size"])
    try:
        found = rehearse(plan, workspace=request["workspace"])
    except UserError as error:
        print("\n".join(error.lines), file=sys.stderr)
        return error.exit_code
    write_snapshot(Path(request["snapshot"]), found.snapshot)
    names = [field.name for field in fields(found) if field.name != "snapshot"]
    print(json.dumps({name: getattr(found, name) for name in names}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
