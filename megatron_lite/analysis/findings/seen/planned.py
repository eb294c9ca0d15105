"""What the run's own record says of its plan and machine; None for what it does not say. Foreign runs say nothing."""

from megatron_lite.analysis.run_facts import Facts


def argument(facts: Facts, name: str):
    """A flag as resolved ("micro_batch_size"); None for unknown."""
    return facts.run.args.get(name) if facts.run else None


def part(facts: Facts, group: str, name: str):
    """plan[group][name]: ("world", "size"), ("shape", "hidden_size"), ("batch", "final")."""
    values = facts.plan.get(group)
    return values.get(name) if isinstance(values, dict) else None


def compiles(facts: Facts) -> bool | None:
    """Layers through torch.compile, as the run decided; None for unknown. Runs of before that wrote the flag: true or false."""
    found = part(facts, "compilation", "layers")
    return found if found is not None else compiled_as_asked(facts)


def compiled_as_asked(facts: Facts) -> bool | None:
    """The same of runs of before, which compiled where the flag was true, and no loss; None of others."""
    flag = argument(facts, "torch_compile")
    return flag if isinstance(flag, bool) else None


def loader_workers(facts: Facts) -> int | None:
    """Processes per rank, as the run decided; runs of before wrote the flag only."""
    found = facts.plan.get("loader_workers", argument(facts, "num_workers"))
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def hardware(facts: Facts, name: str):
    """run.json's hardware: "cpus", "memory_bytes", "threads"."""
    values = facts.run.record.get("hardware") if facts.run else None
    return values.get(name) if isinstance(values, dict) else None


def variable(facts: Facts, name: str) -> str | None:
    """An environment variable that the run wrote down."""
    return variables(facts).get(name)


def variables(facts: Facts) -> dict[str, str]:
    """All that it wrote down."""
    values = facts.run.record.get("environment") if facts.run else None
    values = values if isinstance(values, dict) else {}
    return {name: value for name, value in values.items() if isinstance(value, str)}


def whole(value) -> int | None:
    """A number of things: a positive int, or None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def micro_batches(facts: Facts) -> int | None:
    """Per rank and step, after a ramp-up; None for unknown."""
    size, batch = whole(argument(facts, "micro_batch_size")), whole(part(facts, "batch", "final"))
    world = whole(part(facts, "world", "size"))
    return batch // (size * world) if size and batch and world else None


def on_gpu(facts: Facts) -> bool | None:
    """None for unknown."""
    device, one = facts.plan.get("device"), facts.critical
    if one is not None and (one.time.on_gpu or not device):
        return one.time.on_gpu
    return device == "cuda" if device else None
