"""Which checkpoint to load, and opening it."""

import dataclasses
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatron_lite.checkpoint import folder
from megatron_lite.checkpoint.dcp import METADATA_FILE
from megatron_lite.checkpoint.folder import CheckpointDir
from megatron_lite.checkpoint.megatron_dist import DistFile
from megatron_lite.checkpoint.megatron_file import EMBEDDING, WHOLE, MegatronFile
from megatron_lite.checkpoint.training_state import Stored
from megatron_lite.errors import CheckpointError
from megatron_lite.run_folder import RECORD_FILE, TRACKER_FILE, checkpoint_name, iteration_of

# --- A model that Megatron spread over files, one per tensor-parallel rank and pipeline stage, read as one
#
# mp_rank_TT/model_optim_rng.pt, or mp_rank_TT_SSS/model_optim_rng.pt with stages
#
# Source of how weights are split: megatron/core/tensor_parallel/layers.py (ColumnParallelLinear, RowParallelLinear,
# VocabParallelEmbedding). A gated MLP's fc1 holds, on each rank, its share of the gates and then that of the values.

FILE = "model_optim_rng.pt"
FOLDER = re.compile(r"^mp_rank_(\d+)(?:_(\d+))?$")
BY_ROWS = ("linear_qkv.", "linear_fc1.", "word_embeddings.", "output_layer.")
BY_COLUMNS = ("linear_proj.weight", "linear_fc2.weight")  # their biases are whole on every rank
COPIES = ("output_layer.", "word_embeddings_for_head.")  # of the tied embedding, in the last stage


def open_megatron(folder: Path) -> MegatronFile:
    """The checkpoint in SAVE/iter_NNNNNNN or SAVE/release, whole or in parts. Raises CheckpointError."""
    files = {}
    for path in sorted(folder.glob(f"mp_rank_*/{FILE}")):
        match = FOLDER.match(path.parent.name)
        if match is None:
            raise CheckpointError(
                f"--load {folder}: holds {path.parent.name}, a part of a mixture of experts; load a "
                "checkpoint of a plain GPT."
            )
        files[int(match[1]), int(match[2] or 0)] = path
    if set(files) <= {(0, 0)}:
        return MegatronFile(files.get((0, 0), folder / "mp_rank_00" / FILE))
    return MegatronParts(folder, files)


class MegatronParts(MegatronFile):
    """The same as a MegatronFile; a tensor is put together when it is asked for."""

    def __init__(self, folder: Path, files: dict[tuple[int, int], Path]):
        """files: by (tensor-parallel rank, stage)."""
        ranks, stages = (max(places) + 1 for places in zip(*files))
        if len(files) != ranks * stages:
            raise CheckpointError(
                f"--load {folder}: holds {len(files)} of {ranks * stages} parts of a model; copy the rest "
                "into it, or load another."
            )
        splits = (ranks, stages, 1)
        parts = [[MegatronFile(files[rank, stage], splits, stage) for rank in range(ranks)] for stage in range(stages)]
        first = parts[0][0]
        self.path, self.splits, self.stage, self.notes, self.arguments = folder, WHOLE, 0, [], first.arguments
        self.without_optimizer = next(
            (part.without_optimizer for row in parts for part in row if part.without_optimizer), None
        )
        self._gated = first.record.shape["activation"] == "swiglu"
        self._pieces = _pieces(parts, first.record.shape["tied_embeddings"])
        if self.without_optimizer:
            self._pieces = {name: pieces for name, pieces in self._pieces.items() if name.startswith("model.")}
        rows = self.size_of(f"model.{EMBEDDING}")[0]
        self.record = dataclasses.replace(
            first.record,
            shape=first.record.shape | {"padded_vocab_size": rows},
            optimizer=None if self.without_optimizer else first.record.optimizer,
        )

    def names(self) -> set[str]:
        return set(self._pieces)

    def size_of(self, name: str) -> tuple[int, ...]:
        return tuple(joined(name, [piece.to("meta") for piece in self._pieces_of(name)], self._gated).shape)

    def dtype_of(self, name: str) -> torch.dtype:
        return self._pieces_of(name)[0].dtype

    def _tensor(self, name: str) -> Tensor:
        return joined(name, self._pieces_of(name), self._gated)

    def _pieces_of(self, name: str) -> list[Tensor]:
        if name not in self._pieces:
            raise CheckpointError(f"--load {self.path}: holds no {name}; give the flags of the model that was saved.")
        return self._pieces[name]


def joined(name: str, pieces: list[Tensor], gated: bool) -> Tensor:
    """The whole tensor of a flat name, a weight or its state in the optimizer, from those of all ranks."""
    by_rows, by_columns = (any(kind in name for kind in kinds) for kinds in (BY_ROWS, BY_COLUMNS))
    if len(pieces) == 1 or pieces[0].ndim == 0 or not (by_rows or by_columns):
        return pieces[0]
    if gated and "linear_fc1." in name:
        gates, values = zip(*(piece.chunk(2) for piece in pieces))
        return torch.cat([*gates, *values])
    return torch.cat(pieces, dim=1 if by_columns else 0)


def _pieces(parts: list[list[MegatronFile]], tied: bool) -> dict[str, list[Tensor]]:
    """Every rank's tensor by name; each stage counts its layers from 0."""
    pieces: dict[str, list[Tensor]] = {}
    layers_before = 0
    for stage, ranks in enumerate(parts):
        for name in set.intersection(*(part.names() for part in ranks)):
            if not (stage and tied and any(copy in name for copy in COPIES)):
                pieces.setdefault(_shifted(name, layers_before), [part._tensor(name) for part in ranks])
        layers_before += len({match[0] for name in ranks[0].names() if (match := re.search(r"\.layers\.\d+\.", name))})
    return pieces


def _shifted(name: str, by: int) -> str:
    return re.sub(r"\.layers\.(\d+)\.", lambda match: f".layers.{int(match[1]) + by}.", name)


def chosen(source: Path, step: int | None, flag: str = "--load") -> CheckpointDir | None:
    """The checkpoint that --load and --ckpt-step name; None if the folder holds none. CheckpointError if it is gone.

    flag: the one that names `source`.
    """
    if step is not None:
        slot = CheckpointDir(source, checkpoint_name(step))
        if slot.folder is None:
            raise CheckpointError(f"--ckpt-step {step}: there is no {slot.final}; {_those_there_are(source)}.")
        return slot
    try:
        slot = folder.newest(source)
    except ValueError:
        raise CheckpointError(
            f"{flag} {source}: {TRACKER_FILE} holds no iteration; write the number of a checkpoint into "
            f"it, {_those_there_are(source)}."
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"{flag} {source}: {TRACKER_FILE} cannot be read ({error.strerror}); make it readable, or "
            "choose another folder."
        ) from None
    if slot is None and _is_checkpoint(source):
        raise CheckpointError(
            f"{flag} {source}: is a checkpoint itself; give the folder around it, {source.parent}, with a "
            f"{TRACKER_FILE} that names it."
        )
    if slot is None and folder.complete(source):
        raise CheckpointError(
            f"{flag} {source}: holds checkpoints, but no {TRACKER_FILE}; give --ckpt-step, {_those_there_are(source)}."
        )
    if slot is not None and slot.folder is None:
        raise CheckpointError(
            f"{flag} {source}: {TRACKER_FILE} names {slot.name}, which is not there; give --ckpt-step, "
            f"{_those_there_are(source)}."
        )
    return slot


def find_latest_valid(
    source: Path,
    step: int | None,
    damage: Callable[[Path], str | None],
    say: Callable,
    agree: Callable = lambda look: look(),
    flag: str = "--load",
) -> CheckpointDir | None:
    """`chosen`, or the newest earlier one whose contents are what was written.

    damage(folder): what is wrong with a checkpoint, the same on all ranks. agree(look): what look() gives one of them, or
    raises, on all. What is passed over is said. CheckpointError if the one that --ckpt-step names, or every one, is damaged.
    """
    slot = agree(partial(chosen, source, step, flag))
    if slot is None:
        return None
    wrong = damage(slot.expected)
    if wrong is None:
        return slot
    if (
        step is None and agree(partial(chosen, source, step, flag)) != slot
    ):  # a run that saves here has gone on meanwhile
        return find_latest_valid(source, step, damage, say, agree, flag)
    if step is not None:
        raise CheckpointError(
            f"--ckpt-step {step}: {slot.final} is damaged: {wrong}; choose another, "
            f"{_those_there_are(source, besides=slot)}."
        )
    for earlier in agree(partial(_earlier, source, slot)):
        say(f"  {slot.final} is damaged: {wrong}; going back to {earlier.name}")
        slot, wrong = earlier, damage(earlier.expected)
        if wrong is None:
            return slot
    raise CheckpointError(
        f"{flag} {source}: {slot.name} is damaged: {wrong}; there is no earlier one. Load another folder, "
        "or start afresh without --load."
    )


def open_checkpoint(path: Path) -> Stored:
    """A checkpoint's folder in one of the formats: Megatron-LM's torch_dist, which is ours too, or its torch file."""
    if (path / METADATA_FILE).exists():
        return DistFile(path)
    return open_megatron(path)


def open_newest(source: Path, step: int | None = None, say: Callable = print) -> Stored:
    """The newest sound checkpoint of a folder, or iteration `step`, by this process alone. CheckpointError if none."""
    slot = find_latest_valid(Path(source), step, folder.wrong, say)
    if slot is None:
        raise CheckpointError(f"--load {source}: holds no {TRACKER_FILE}; give the folder that --save wrote to.")
    stored = open_checkpoint(slot.expected)
    for text in stored.notes:
        say(f"  note: --load {stored.path}: {text}")
    return stored


def _is_checkpoint(path: Path) -> bool:
    return any((path / name).exists() for name in (METADATA_FILE, RECORD_FILE, "mp_rank_00", "mp_rank_00_000"))


def _earlier(source: Path, slot: CheckpointDir) -> list[CheckpointDir]:
    iteration = iteration_of(slot.name)
    return [
        other for other in folder.complete(source) if iteration is not None and iteration_of(other.name) < iteration
    ]


def _those_there_are(source: Path, besides: CheckpointDir | None = None) -> str:
    names = [str(iteration_of(slot.name)) for slot in folder.complete(source) if slot != besides]
    return f"there are complete ones of iteration {', '.join(names)}" if names else "there is no complete one"
