"""The contents of a checkpoint: a record of plain values, and tensors under flat names.

model.NAME                          a weight, under Megatron-Core's name, in the run's precision
optimizer.NAME.master               its fp32 master, of a run in fp16 or bf16
optimizer.NAME.exp_avg|exp_avg_sq   AdamW's moments, fp32, and .step, a float32 scalar
optimizer.NAME.momentum_buffer      SGD's
optimizer.good_samples              int64 scalar: samples of all successful steps, the schedule's clock
loss_scale.scale|growth_tracker|hysteresis_tracker
random.RANK.python|numpy|torch|...  every rank's generators
"""

import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite.checkpoint.folder import Manifest
from megatron_lite.checkpoint.megatron_state import Plain
from megatron_lite.config.layout import Part, whole_part
from megatron_lite.config.plan import LearningRatePlan
from megatron_lite.config.shape import ExpertShape, LatentShape, ModelShape, parse_nested
from megatron_lite.errors import CheckpointError

RECORD_FORMAT = 2
# weights with a row per vocabulary entry; padding gives them more rows than the tokenizer has entries
VOCABULARY_TABLES = ("embedding.word_embeddings.weight", "output_layer.weight")
# fields of ModelShape as JSON has them: plain values, and those of its experts in a dict of their own
ShapeFields = dict[str, object]


@dataclass(frozen=True)
class CheckpointRecord:
    """The plain values of a checkpoint."""

    iteration: int
    consumed: int  # samples drawn so far, skipped steps included
    shape: ShapeFields  # fields of ModelShape
    precision: str  # fp32 | fp16 | bf16, of the weights
    vocab_size: int | None = None  # before padding; None: unknown
    schedule: dict[str, Plain] | None = None  # fields of LearningRatePlan; None: unknown
    optimizer: str | None = None  # adam | sgd; None: no optimizer is held
    ranks: int = 0  # whose random states are held
    trainer: str = "megatron_lite"  # or Megatron-LM, whose random states mean nothing here
    versions: dict[str, str] = field(default_factory=dict)
    consumed_valid_samples: int = 0  # of all evaluations; 0 also where they were not counted
    left_out: int = 0  # samples of the consumed ones that --iterations-to-skip named
    # what the last bits depend on: attention, torch_compile; {}: unknown
    kernels: dict[str, str] = field(default_factory=dict)
    format: int = RECORD_FORMAT

    @property
    def model_shape(self) -> ModelShape:
        """The shape as an object. TypeError for a field that this version does not know, or lacks."""
        return build_shape(self.shape)

    @property
    def vocabulary_rows(self) -> int:
        """Entries of the vocabulary with its padding; 0 where the record does not say it."""
        rows = self.shape.get("padded_vocab_size")
        return rows if isinstance(rows, int) else 0

    @property
    def learning_rate(self) -> LearningRatePlan | None:
        """The schedule as an object; None if it is unknown. TypeError as `model_shape`."""
        build: Callable[..., LearningRatePlan] = LearningRatePlan
        return None if self.schedule is None else build(**self.schedule)

    def to_json(self) -> str:
        """The record as RECORD_FILE holds it."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "CheckpointRecord":
        """ValueError if `text` is not a record of this format."""
        values = json.loads(text)
        if not isinstance(values, dict) or values.get("format") != RECORD_FORMAT:
            raise ValueError(
                f"format {values.get('format') if isinstance(values, dict) else None}, not {RECORD_FORMAT}"
            )
        try:
            return cls(**values)
        except TypeError as error:
            raise ValueError(str(error)) from None


def build_shape(fields: Mapping[str, object]) -> ModelShape:
    """The shape of a file's fields. TypeError for a field that this version does not know, or lacks."""
    build: Callable[..., ModelShape] = ModelShape
    experts = parse_nested(ExpertShape, fields, "experts")
    latent = parse_nested(LatentShape, fields, "latent")
    return build(**{**fields, "experts": experts, "latent": latent})


class WriteTensors(Protocol):
    """Writes what a format of checkpoints has beyond the record and the manifest, which all formats have."""

    def __call__(
        self, folder: Path, record: CheckpointRecord, tensors: dict[str, Tensor], group: ProcessGroup | None, /
    ) -> Manifest:
        """Write tensors, and the files that only this format has. Collective over `group`.

        Args:
            folder: The unfinished checkpoint.
            record: Plain values of the checkpoint.
            tensors: Tensors that this rank gives, by flat name.
            group: The ranks that write; None: this process alone.

        Returns:
            The manifest's entries of files that were hashed while they were written; the others are still to be.
        """
        ...


class TensorForm(Protocol):
    """Whatever has the shape and the dtype of a stored tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...


class Stored(ABC):
    """An opened checkpoint, in whichever format. Raises CheckpointError for what cannot be read."""

    record: CheckpointRecord

    def __init__(self, path: Path):
        self.path = path
        self.without_optimizer: str | None = None  # why record.optimizer is None, to go on from "its optimizer"
        self.notes: list[str] = []  # what of it is left out
        self.arguments: dict[str, object] = {}  # the flags that it was trained with, as far as they are plain values
        self.held: Mapping[str, TensorForm] = {}  # by flat name

    def names(self) -> set[str]:
        """The flat names of all tensors that it holds."""
        return set(self.held)

    def size_of(self, name: str) -> tuple[int, ...]:
        """The shape of the tensor of this name, of all ranks."""
        return tuple(self.held[name].shape)

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype in which the tensor of this name is stored."""
        return self.held[name].dtype

    def read_into(self, targets: Mapping[str, Tensor], parts: Mapping[str, Part] = MappingProxyType({})) -> None:
        """Copy the tensor of each name into the one given for it, casting. CheckpointError unless shapes agree.

        A vocabulary table may have another number of rows, since its padding depends on the layout: rows that the
        checkpoint lacks become zeros, as Megatron-Core loads them, and rows that the run lacks are left out.

        Args:
            targets: Tensors to fill, by flat name.
            parts: Parts of the whole that targets hold, by name, where that is not all.
        """
        absent = sorted(set(targets) - self.names())
        if absent:
            raise CheckpointError(
                f"--load {self.path}: lacks {len(absent)} of the tensors that this run needs, such as "
                f"{absent[0]}; give the flags that the checkpoint was trained with."
            )
        fitting: dict[str, Tensor] = {}
        fitting_parts = dict(parts)
        for name, target in targets.items():
            part = parts.get(name) or whole_part(tuple(target.shape))
            stored_shape = self.size_of(name)
            if part.whole == stored_shape:
                fitting[name] = target
            elif _is_vocabulary_table(name) and part.whole[1:] == stored_shape[1:]:
                held = _take_stored_rows(part, stored_shape)
                target[held.shape[0] :].zero_()
                if held.shape[0]:
                    fitting[name] = target[: held.shape[0]]
                    fitting_parts[name] = held
            else:
                raise CheckpointError(
                    f"--load {self.path}: {name} has the shape {list(stored_shape)}, and the run's is "
                    f"{list(part.whole)}; give the flags that the checkpoint was trained with."
                )
        self._copy(fitting, fitting_parts)

    @abstractmethod
    def _copy(self, targets: dict[str, Tensor], parts: Mapping[str, Part]) -> None:
        """Copy tensors that are held in the shapes of `targets`, or of `parts` where a name has one."""


def _is_vocabulary_table(name: str) -> bool:
    """Whether a flat name is that of a vocabulary table, or of the optimizer's state of one."""
    return any(table in name for table in VOCABULARY_TABLES)


def _take_stored_rows(part: Part, stored_shape: tuple[int, ...]) -> Part:
    """The rows of `part` that a stored tensor has, which has fewer or more rows than `part.whole`."""
    rows = 0
    for block in part.blocks:
        end = min(block.offsets[0] + block.sizes[0], stored_shape[0])
        rows += max(end - block.offsets[0], 0)
    # blocks are in the order of the whole tensor, so that the rows to read come first
    return replace(part.cut(0, rows), whole=stored_shape)
