"""One line that says which run this is: name, ranks, device, model."""

from collections.abc import Sequence
from pathlib import Path

from megatron_lite.analysis.contradictions import missing_gpu_work
from megatron_lite.analysis.run_facts import Facts


def title_of(paths: Sequence[Path | str], facts: Facts) -> str:
    """ "run-1: 2 ranks, NVIDIA H100, GPT 24 x 1024"; parts that are not known are left out."""
    parts = [_ranks(facts), _device(facts), _model(facts.plan)]
    return f"{_name(paths)}: {', '.join(part for part in parts if part)}".removesuffix(": ")


def _name(paths: Sequence[Path | str]) -> str:
    first = Path(paths[0])
    name = first.name or first.resolve().name or str(first)
    return name if len(paths) == 1 else f"{name} and {len(paths) - 1} more"


def _ranks(facts: Facts) -> str:
    seen = len(facts.ranks_seen)
    world = facts.ranks.world_size if facts.ranks else None
    world = world or next((rank.trace.world_size for rank in facts.ranks_seen if rank.trace.world_size), None)
    world = world or (facts.run.world_size if facts.run else None)
    if world and seen and seen < world:
        return f"{seen} of {world} ranks"
    if not world and all(rank.time.rank is None for rank in facts.ranks_seen):
        return _counted(seen, "process", "es") or _counted(len(facts.snapshots), "snapshot", "s")
    return _counted(world or seen, "rank", "s")


def _counted(number: int, what: str, plural: str) -> str:
    return f"{number} {what}{plural if number > 1 else ''}" if number else ""


def _device(facts: Facts) -> str:
    if facts.critical:
        one = facts.critical
        missing = missing_gpu_work(one, facts.run)
        if missing:
            return f"{one.trace.devices[0] if one.trace.devices else 'unknown device'} without its work"
        return one.time.device or ("GPU" if one.time.on_gpu else "CPU")
    hardware = facts.run.record.get("hardware") if facts.run else None
    device = hardware.get("device") if isinstance(hardware, dict) else None
    return "CPU" if device == "cpu" else str(device or "")


def _model(plan: dict) -> str:
    shape = plan.get("shape")
    if not isinstance(shape, dict) or "num_layers" not in shape or "hidden_size" not in shape:
        return ""
    return f"GPT {shape['num_layers']} x {shape['hidden_size']}"
