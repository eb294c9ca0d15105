"""What differs in how two runs were started, and whether they are comparable at all."""

from collections.abc import Iterator
from statistics import median

from megatron_lite.analysis.compare.compare_results import Flag
from megatron_lite.analysis.run.run_results import Run
from megatron_lite.analysis.run_facts import Facts

# where things are written to: no setting of the run
PLACES = ("run_dir", "save", "load", "tensorboard_dir", "memory_snapshot_path", "master_port", "nsys_output")
MODEL_FLAGS = {  # of the plan's shape: the flags that decide it
    "num_layers": "--num-layers",
    "hidden_size": "--hidden-size",
    "num_attention_heads": "--num-attention-heads",
    "num_query_groups": "--num-query-groups",
    "kv_channels": "--kv-channels",
    "ffn_hidden_size": "--ffn-hidden-size",
    "seq_length": "--seq-length",
    "padded_vocab_size": "--make-vocab-size-divisible-by",
    "position_embedding": "--position-embedding-type",
    "normalization": "--normalization",
    "activation": "--swiglu",
    "tied_embeddings": "--untie-embeddings-and-output-weights",
}


def flags_that_differ(a: Facts, b: Facts) -> tuple[Flag, ...]:
    """Settings of runs of this trainer, as typed or filled in; then precision, versions, hardware and variables."""
    if a.run is None or b.run is None:
        return ()
    flags = _differing(a.run.args, b.run.args, lambda name: f"--{name.replace('_', '-')}", skip=PLACES)
    plain = [
        Flag(key, _words(a.plan.get(key)), _words(b.plan.get(key)))
        for key in ("precision", "device", "backend")
        if a.plan.get(key) != b.plan.get(key)
    ]
    sizes = (
        [Flag("ranks", str(a.run.world_size), str(b.run.world_size))] if a.run.world_size != b.run.world_size else []
    )
    records = [
        flag
        for part in ("versions", "hardware", "environment")
        for flag in _differing(_part(a.run, part), _part(b.run, part), str)
    ]
    return (*flags, *plain, *sizes, *records)


def objections(a: Facts, b: Facts) -> list[str]:
    """Why the two do not do the same work, a sentence each with its flag; [] if they do or nothing says."""
    return [*_other_model(a, b), *_other_batch(a.run, b.run)]


def _other_model(a: Facts, b: Facts) -> Iterator[str]:
    one, other = a.plan.get("shape"), b.plan.get("shape")
    if isinstance(one, dict) and isinstance(other, dict):
        told = [
            f"{flag} {_words(one[name])} against {_words(other[name])}"
            for name, flag in MODEL_FLAGS.items()
            if name in one and name in other and one[name] != other[name]
        ]
        if told:
            yield f"{', '.join(told)}: another model"


def _other_batch(a: Run | None, b: Run | None) -> Iterator[str]:
    if a is None or b is None:
        return
    sizes = [_batch(run) for run in (a, b)]
    if None not in sizes and sizes[0] != sizes[1]:
        yield f"--global-batch-size {sizes[0]:g} against {sizes[1]:g} samples per step: another batch"


def _batch(run: Run) -> float | None:
    seen = [size for size, plain in zip(run.batch_sizes, run.ordinary) if plain and size > 0]
    return median(seen) if seen else None


def _part(run: Run, name: str) -> dict:
    part = run.record.get(name)
    return part if isinstance(part, dict) else {}


def _differing(a: dict, b: dict, title, skip=()) -> list[Flag]:
    names = [name for name in {**a, **b} if name not in skip and a.get(name) != b.get(name)]
    return [Flag(title(name), _words(a.get(name)), _words(b.get(name))) for name in names]


def _words(value) -> str:
    if value is None or value == []:
        return "not given"
    if isinstance(value, bool):
        return "on" if value else "off"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
