"""Makes what the ranks of a command would record for a proof: right, or with an error that a test plants.

The gradient of a batch is the mean of its samples' gradients, and outputs of modules are rows of samples, so that any
layout follows from a table of random numbers.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from megatron_lite.analysis.equality.proved_run import Array, ProvedRun, RankRun
from megatron_lite.formats.prove_record import (
    Clipping,
    LoaderRecord,
    ModuleOutput,
    ProvedStep,
    ProveRecord,
    SeenMicroBatch,
    TensorPart,
)

SHAPES = {
    "0.weight": (8, 6),
    "0.bias": (8,),
    "1.weight": (8,),
    "1.bias": (8,),
    "2.weight": (8, 8),
    "2.bias": (8,),
    "3.weight": (8,),
    "4.weight": (4, 8),
    "4.bias": (4,),
}
CONSTANTS = {"1.weight": 1.0, "1.bias": 0.0, "3.weight": 1.0}
MODULES = {"0": (8, "Linear"), "1": (8, "LayerNorm"), "2": (8, "Linear"), "3": (8, "RMSNorm"), "4": (4, "Linear")}
RATE = 0.1
NOISE = {"float64": 2e-16, "float32": 1e-7, "bfloat16": 2e-3}


@dataclass
class Part:
    """A rank's part of a tensor, before it is recorded."""

    array: Array
    whole: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    is_placed: bool = False
    is_partial: bool = False


@dataclass
class Output:
    """What a module returned for a micro-batch."""

    module: str
    class_name: str
    micro_batch: int
    part: Part
    has_local_statistics: bool = False


@dataclass
class StepDraft:
    """A step of a rank, before it is recorded; parts by name."""

    batches: list[SeenMicroBatch] = field(default_factory=list)
    gradients: dict[str, Part | None] = field(default_factory=dict)
    local: dict[str, Part] = field(default_factory=dict)
    after: dict[str, Part] = field(default_factory=dict)
    norm: float | None = None
    # what clipping multiplies gradients with
    shortened: float = 1.0


@dataclass
class Draft:
    """A rank, before it is recorded: what a test may plant errors in."""

    rank: int
    weights: dict[str, Part] = field(default_factory=dict)
    steps: list[StepDraft] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    loaders: list[LoaderRecord] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    dropouts: dict[str, float] = field(default_factory=dict)
    engines: tuple[str, ...] = ()


Plant = Callable[[list[Draft]], None]


class Truth:
    """A model and its samples: weights, and each sample's gradients and outputs."""

    def __init__(self, seed: int = 0, samples: int = 64) -> None:
        drawn = np.random.default_rng(seed)
        self.samples = samples
        self.weights = {
            name: np.full(shape, CONSTANTS[name])
            if name in CONSTANTS
            else drawn.normal(size=shape).astype("f4").astype("f8")
            for name, shape in SHAPES.items()
        }
        self.gradients = {name: drawn.normal(size=(samples, *shape)) for name, shape in SHAPES.items()}
        self.outputs = {module: drawn.normal(size=(samples, width)) for module, (width, _) in MODULES.items()}
        self.losses = drawn.uniform(1, 2, size=samples)

    def mean_gradient(self, name: str, samples: Iterable[int]) -> Array:
        """The gradient of the mean loss of samples."""
        return self.gradients[name][list(samples)].mean(axis=0)

    def draw_batch(self, step: int, size: int = 12) -> list[int]:
        """Samples of a step's batch."""
        return [(step * size + number) % self.samples for number in range(size)]


def split_evenly(samples: Sequence[int], ranks: int) -> list[list[int]]:
    """A batch in as many parts, every N-th sample to one."""
    return [list(samples[rank::ranks]) for rank in range(ranks)]


@dataclass
class Layout:
    """How ranks divide the work."""

    data: int = 1
    tensor: int = 1
    # whether the data-parallel ranks shard weights by rows, as fully_shard does
    shards_rows: bool = False
    # whether tensor ranks tell where their parts lie
    is_placed: bool = True
    # whether a pipeline of two stages calls its first layer "0" on both
    pipeline: bool = False
    micro_batches: int = 1
    # parameters that tensor ranks split
    splits: tuple[str, ...] = ("0.weight", "0.bias", "2.weight")


CUTS = {"0.weight": 0, "0.bias": 0, "2.weight": 1}  # of tensor ranks: dimension


def make_run(
    truth: Truth,
    layout: Layout | None = None,
    plant: Plant | None = None,
    dtype: str = "float32",
    steps: int = 2,
    batches: Sequence[Sequence[int]] | None = None,
    seed: int = 1,
    has_clipping: bool = True,
) -> ProvedRun:
    """Records of the ranks of a layout.

    `batches` has the samples of each step, with those of all ranks.
    """
    layout = layout or Layout()
    drawn = np.random.default_rng(seed)
    stages = 2 if layout.pipeline else 1
    drafts = []
    chosen = batches or [truth.draw_batch(step) for step in range(steps)]
    ranks = itertools.product(range(stages), range(layout.data), range(layout.tensor))
    for number, (stage, data, tensor) in enumerate(ranks):
        drafts.append(_draft_rank(truth, layout, number, stage, data, tensor, chosen, has_clipping))
    if plant is not None:
        plant(drafts)
    return freeze(drafts, dtype, drawn)


def _draft_rank(
    truth: Truth,
    layout: Layout,
    number: int,
    stage: int,
    data: int,
    tensor: int,
    batches: Sequence[Sequence[int]],
    clips: bool,
) -> Draft:
    draft = Draft(number, engines=("fully_shard",) if layout.shards_rows else ("DistributedDataParallel",))
    rename = {name: name for name in truth.weights}
    if layout.pipeline:
        first = {"0", "1", "2"}
        rename = {name: name for name in truth.weights if name.split(".")[0] in first}
        if stage:
            rename = {name: f"{int(name[0]) - 3}{name[1:]}" for name in truth.weights if name[0] not in first}

    def cut(name: str, array: Array) -> Part:
        return cut_part(layout, name, array, data, tensor)

    draft.weights = {own: cut(name, truth.weights[name]) for name, own in rename.items()}
    before = {name: truth.weights[name] for name in rename}
    for step, batch in enumerate(batches):
        mine = split_evenly(batch, layout.data)[data]
        found = StepDraft()
        for chunk in split_evenly(mine, layout.micro_batches):
            rows = tuple(f"stage{stage} {row}" if stage else f"row {row}" for row in chunk)
            loss = float(truth.losses[chunk].mean()) / layout.micro_batches
            found.batches.append(
                SeenMicroBatch(rows=rows, indices=tuple(chunk), random_state=f"state {data}", loss=loss)
            )
        whole = {name: truth.mean_gradient(name, batch) for name in rename}
        norm = float(np.sqrt(sum(np.square(truth.mean_gradient(name, batch)).sum() for name in truth.weights)))
        shorten = min(1.0, 1.0 / norm) if clips else 1.0
        for name, own in rename.items():
            found.gradients[own] = cut(name, whole[name])
            if not layout.shards_rows and layout.tensor == 1:
                found.local[own] = Part(truth.mean_gradient(name, mine))
            before[name] = before[name] - RATE * shorten * whole[name]
            found.after[own] = cut(name, before[name])
        found.norm = norm if clips else None
        found.shortened = shorten
        draft.steps.append(found)
    modules = {module: module for module in MODULES}
    if layout.pipeline:
        modules = {module: str(int(module) - 3 * stage) for module in MODULES if (int(module) >= 3) == bool(stage)}
    first_rows = [list(batch.indices) for batch in draft.steps[0].batches] if draft.steps else []
    for micro_batch, rows in enumerate(first_rows):
        for module, own in modules.items():
            array = truth.outputs[module][rows]
            part = Part(array)
            if layout.tensor > 1 and module == "0":
                width = array.shape[1] // layout.tensor
                part = Part(array[:, tensor * width : (tensor + 1) * width])
            draft.outputs.append(Output(own, MODULES[module][1], micro_batch, part))
    return draft


def cut_part(layout: Layout, name: str, array: Array, data: int, tensor: int) -> Part:
    """The part of a tensor that a rank of a layout holds."""
    if layout.shards_rows:
        bounds = np.linspace(0, array.shape[0], layout.data + 1).round().astype(int)
        part = array[bounds[data] : bounds[data + 1]]
        return Part(part, array.shape, (int(bounds[data]), *(0,) * (array.ndim - 1)), True)
    if layout.tensor > 1 and name in layout.splits:
        dim = CUTS[name]
        length = array.shape[dim] // layout.tensor
        part = np.take(array, range(tensor * length, (tensor + 1) * length), axis=dim)
        starts = tuple(tensor * length if one == dim else 0 for one in range(array.ndim))
        return Part(part, array.shape, starts, True) if layout.is_placed else Part(part)
    return Part(array, array.shape, (0,) * array.ndim, layout.tensor > 1 and layout.is_placed)


class _Keys:
    """A rank's arrays by key, with the rounding of a dtype."""

    def __init__(self, dtype: str, drawn: np.random.Generator) -> None:
        self.dtype = dtype
        self.drawn = drawn
        self.arrays: dict[str, Array] = {}
        self.noise: dict[bytes, Array] = {}

    def keep(self, name: str, part: Part | None, is_exact: bool = False) -> TensorPart:
        if part is None:
            return TensorPart(name=name, key="")
        array = np.asarray(part.array, dtype="f8")
        if not is_exact:
            content = array.tobytes()
            if content not in self.noise:
                self.noise[content] = array * (1 + NOISE[self.dtype] * self.drawn.normal(size=array.shape))
            array = self.noise[content]
        key = f"t{len(self.arrays)}"
        self.arrays[key] = array.astype("f8" if self.dtype == "float64" else "f4")
        return TensorPart(
            name=name,
            key=key,
            dtype=self.dtype,
            whole=part.whole or array.shape,
            starts=part.starts or (0,) * array.ndim,
            is_placed=part.is_placed,
            is_partial=part.is_partial,
        )


def freeze(drafts: Sequence[Draft], dtype: str = "float32", drawn: np.random.Generator | None = None) -> ProvedRun:
    """Make records of drafts."""
    drawn = drawn or np.random.default_rng(0)
    ranks = {}
    keys = _Keys(dtype, drawn)
    for draft in drafts:
        keys.arrays = {}
        steps = []
        weights = tuple(keys.keep(name, part, True) for name, part in draft.weights.items())
        for step in draft.steps:
            squares = sum(np.square(part.array).sum() for part in step.gradients.values() if part is not None)
            steps.append(
                ProvedStep(
                    micro_batches=tuple(step.batches),
                    gradients=tuple(keys.keep(name, part) for name, part in step.gradients.items()),
                    local_gradients=tuple(keys.keep(name, part) for name, part in step.local.items()),
                    clipping=None if step.norm is None else Clipping(norm=step.norm, max_norm=1.0),
                    kept_norm=float(np.sqrt(squares)),
                    updated_norm=float(np.sqrt(squares)) * step.shortened,
                    weights=tuple(keys.keep(name, part, True) for name, part in step.after.items()),
                )
            )
        outputs = []
        for call, output in enumerate(draft.outputs):
            outputs.append(
                ModuleOutput(
                    module=output.module,
                    class_name=output.class_name,
                    call=call,
                    micro_batch=output.micro_batch,
                    parts=(keys.keep(f"{output.module}#0", output.part),),
                    has_local_statistics=output.has_local_statistics,
                )
            )
        record = ProveRecord(
            rank=draft.rank,
            ranks=len(drafts),
            weights=weights,
            aliases=draft.aliases,
            steps=tuple(steps),
            outputs=tuple(outputs),
            loaders=tuple(draft.loaders),
            dropouts=draft.dropouts,
            engines=draft.engines,
        )
        ranks[draft.rank] = RankRun(record, dict(keys.arrays))
    return ProvedRun(ranks, len(drafts))


def scale(part: Part | None, factor: float) -> Part | None:
    """A part times a factor."""
    return None if part is None else replace(part, array=part.array * factor)
