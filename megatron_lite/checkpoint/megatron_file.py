"""Reads and writes model_optim_rng.pt, the one file of Megatron-LM's --ckpt-format torch, with everything it holds.

Keys: args, checkpoint_version, iteration, model, optimizer, opt_param_scheduler, rng_state and
num_floating_point_operations_so_far; "megatron_lite" is ours, and Megatron passes over it.
Source: generate_state_dict and load_checkpoint in Megatron-LM's megatron/training/checkpointing.py.
"""

import argparse
import dataclasses
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import BinaryIO, Final

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.checkpoint import megatron_names, unpickle
from megatron_lite.checkpoint.folder import HashedFile, Manifest
from megatron_lite.checkpoint.megatron_args import (
    MegatronArgs,
    build_namespace,
    build_scheduler,
    plain_arguments,
)
from megatron_lite.checkpoint.megatron_optimizer import (
    FILE,
    Take,
    Unmapped,
    group_settings,
    read_buffers,
    read_loss_scale,
    read_optimizer,
    write_optimizer,
)
from megatron_lite.checkpoint.megatron_state import MegatronState, OptimizerState, RandomState, Scheduler
from megatron_lite.checkpoint.random_states import from_megatron, to_megatron
from megatron_lite.checkpoint.training_state import CheckpointRecord, Stored, WriteTensors
from megatron_lite.config.args import Args
from megatron_lite.config.layout import SPLIT, Part, take_part
from megatron_lite.config.model_size import step_flops
from megatron_lite.errors import CheckpointError
from megatron_lite.model.gpt import DTYPES

MARK: Final = "megatron_lite"
CHECKPOINT_VERSION = 3.0  # checkpoint_version
EMBEDDING = "embedding.word_embeddings.weight"
QKV = (".self_attention.linear_qkv.weight", ".self_attention.linear_qkv.bias")
MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError)
NO_SPLITS = (1, 1, 1)  # MegatronArgs.splits
TORCH_FILE = Path("mp_rank_00") / "model_optim_rng.pt"  # Megatron's name for rank 0 of tensor and pipeline


class MegatronFile(Stored):
    """An opened file. Tensors are read from the disk where they are asked for."""

    def __init__(self, path: Path, splits: tuple[int, int, int] = NO_SPLITS, stage: int = 0):
        """
        Args:
            path: Path of the file.
            splits: Into how many parts its model must be split, as MegatronArgs.splits.
            stage: Stage of its pipeline, counted from 0.

        Raises:
            CheckpointError: The file cannot be read, or is not of a GPT.
        """
        super().__init__(Path(path))
        self._tensors: dict[str, Tensor] = {}  # by flat name
        state = unpickle.load(self.path)
        try:
            self._understand(state, splits, stage)
        except MALFORMED as error:
            raise malformed(self.path, error) from None
        self.held = self._tensors

    def _understand(self, state: MegatronState, splits: tuple[int, int, int], stage: int) -> None:
        """Read record and tensors. Raises CheckpointError, or one of MALFORMED."""
        args = read_arguments(self.path, state)
        self.arguments = args.plain
        if args.given("num_experts", 0):
            raise CheckpointError(
                f"--load {self.path}: holds a mixture of experts, which is read from torch_dist folders only; "
                "save it there with --ckpt-format torch_dist."
            )
        if args.given("multi_latent_attention", False):
            raise CheckpointError(
                f"--load {self.path}: holds a model of latent attention, which is read from torch_dist folders only; "
                "save it there with --ckpt-format torch_dist."
            )
        if args.splits != splits:
            found, expected = (" x ".join(map(str, numbers)) for numbers in (args.splits, splits))
            raise CheckpointError(
                f"--load {self.path}: is of a model in {found} parts (tensor x pipeline x "
                f"expert parallel), not {expected}; give the folder of all of its parts, or merge them "
                "with Megatron-LM's tools/checkpoint/convert.py."
            )
        weights = megatron_names.read_chunks(state, args.chunks)
        self.chunk_layers = megatron_names.count_chunk_layers(state, args.chunks)
        optimizer: dict[str, Tensor] = {}
        try:
            optimizer = self._read_optimizer(state, args, weights)
        except Unmapped as error:
            self.without_optimizer = str(error)
        except MALFORMED:
            self.without_optimizer = "has a form that is not known here"
        weight = weights[EMBEDDING] if stage == 0 else next(iter(weights.values()))
        self.record = read_record(state, args, len(weight), weight.dtype, has_optimizer=self.without_optimizer is None)
        self._tensors = {f"model.{name}": weight for name, weight in weights.items()} | optimizer
        version = state.get("checkpoint_version", 0)
        if version < 2:
            self._sort_qkv_rows(version, args.given("num_attention_heads", 0) // splits[0])
        if MARK in state:
            self._read_own(state)

    def _sort_qkv_rows(self, version: float, heads: int) -> None:
        """Sort the rows of QKV projections, and of their states, as today's files have them.

        Args:
            version: The file's checkpoint_version.
            heads: Query heads of this tensor parallel rank.
        """
        for name, tensor in self._tensors.items():
            if any(kind in name for kind in QKV) and not name.endswith(".step"):
                self._tensors[name] = megatron_names.in_todays_order(tensor, version, heads)

    def _read_own(self, state: MegatronState) -> None:
        """Take the record, and the random states of all ranks, from a file that this trainer wrote."""
        own = state[MARK]
        self.record = CheckpointRecord.from_json(own["record"])
        for rank, entry in enumerate(state.get("rng_state", [])):
            states = from_megatron(entry)
            for kind in own["random"]:
                self._tensors[f"random.{rank}.{kind}"] = states[kind]

    def _read_optimizer(
        self, state: MegatronState, args: MegatronArgs, weights: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """The flat tensors of optimizer, schedule and loss scale. Raises Unmapped, or one of MALFORMED."""
        if "optimizer" not in state:
            raise Unmapped("was not saved (--no-save-optim)")
        optimizer = state["optimizer"]
        if isinstance(optimizer, list):
            raise Unmapped(f"is made of {len(optimizer)} chained ones")
        inner: OptimizerState = optimizer.get("optimizer", optimizer)
        if "state" in inner:
            found = read_optimizer(optimizer, weights)
        else:  # the distributed optimizer keeps it elsewhere
            found = read_buffers(self.path.with_name(FILE), inner, weights, args)
        return found | read_loss_scale(optimizer) | read_clock(state)

    def tensor(self, name: str) -> Tensor:
        """The tensor of a flat name, whole."""
        return self._tensors[name]

    @torch.no_grad()
    def _copy(self, targets: dict[str, Tensor], parts: Mapping[str, Part]) -> None:
        for name, target in targets.items():
            whole = self.tensor(name)
            if name in parts:
                take_part(target, whole, parts[name])
            else:
                target.copy_(whole)


# --- A model that Megatron spread over files, one per tensor-parallel rank and pipeline stage, read as one
#
# mp_rank_TT/model_optim_rng.pt, or mp_rank_TT_SSS/model_optim_rng.pt with stages
#
# Source of how weights are split: megatron/core/tensor_parallel/layers.py (ColumnParallelLinear, RowParallelLinear,
# VocabParallelEmbedding). A gated MLP's fc1 holds, on each rank, its share of the gates and then that of the values.

PART_FOLDER = re.compile(r"^mp_rank_(\d+)(?:_(\d+))?$")
COPIES = ("output_layer.", "word_embeddings_for_head.")  # of the tied embedding, in the last stage


def open_megatron(folder: Path) -> MegatronFile:
    """The checkpoint in SAVE/iter_NNNNNNN or SAVE/release, whole or in parts. Raises CheckpointError."""
    files: dict[tuple[int, int], Path] = {}
    for path in sorted(folder.glob(f"mp_rank_*/{TORCH_FILE.name}")):
        match = PART_FOLDER.match(path.parent.name)
        if match is None:
            raise CheckpointError(
                f"--load {folder}: holds {path.parent.name}, a part of a mixture of experts; load a "
                "checkpoint of a plain GPT."
            )
        files[int(match[1]), int(match[2] or 0)] = path
    if set(files) <= {(0, 0)}:
        return MegatronFile(files.get((0, 0), folder / TORCH_FILE))
    return MegatronParts(folder, files)


class MegatronParts(MegatronFile):
    """The same as a MegatronFile; a tensor is put together when it is asked for."""

    def __init__(self, folder: Path, files: dict[tuple[int, int], Path]):
        """
        Args:
            folder: Folder of the checkpoint.
            files: Files by tensor parallel rank and stage.

        Raises:
            CheckpointError: A part is missing, cannot be read, or is not of a GPT.
        """
        Stored.__init__(self, folder)
        ranks, stages = (max(places) + 1 for places in zip(*files))
        if len(files) != ranks * stages:
            raise CheckpointError(
                f"--load {folder}: holds {len(files)} of {ranks * stages} parts of a model; copy the rest "
                "into it, or load another."
            )
        splits = (ranks, stages, 1)
        parts = [[MegatronFile(files[rank, stage], splits, stage) for rank in range(ranks)] for stage in range(stages)]
        first = parts[0][0]
        self.arguments = first.arguments
        reasons = [part.without_optimizer for row in parts for part in row if part.without_optimizer]
        self.without_optimizer = reasons[0] if reasons else None
        self._gated = first.record.shape["activation"] == "swiglu"
        self._pieces = self._collect_pieces(parts, first.record)
        self.held = {name: self._join(name, [piece.to("meta") for piece in own]) for name, own in self._pieces.items()}
        shape = first.record.shape | {"padded_vocab_size": self.size_of(f"model.{EMBEDDING}")[0]}
        optimizer = None if reasons else first.record.optimizer
        self.record = dataclasses.replace(first.record, shape=shape, optimizer=optimizer)

    def _collect_pieces(self, parts: list[list[MegatronFile]], record: CheckpointRecord) -> dict[str, list[Tensor]]:
        """The tensors of all files, by the flat name that they have in the whole model.

        Args:
            parts: The opened files of each stage, one per tensor parallel rank.
            record: Record of the first of them.

        Returns:
            One tensor per tensor parallel rank.
        """
        numbers = self._number_layers([row[0].chunk_layers for row in parts], record.model_shape.num_layers)
        pieces: dict[str, list[Tensor]] = {}
        for stage, row in enumerate(parts):
            may_copy = stage > 0 and record.shape["tied_embeddings"]
            for name in set.intersection(*(part.names() for part in row)):
                if may_copy and any(copy in name for copy in COPIES):
                    continue
                if not name.startswith("model.") and self.without_optimizer:
                    continue
                whole = name
                layer = megatron_names.OF_LAYER.search(name)
                if layer:
                    # each stage counts its layers from 0
                    number = numbers[stage][int(layer[1])]
                    whole = megatron_names.OF_LAYER.sub(f".layers.{number}.", name)
                pieces.setdefault(whole, [part.tensor(name) for part in row])
        return pieces

    def _number_layers(self, counts: list[list[int]], layers: int) -> list[list[int]]:
        """The numbers that each stage's layers have in the whole model: stage after stage for each chunk.

        Args:
            counts: Layers of each stage's chunks.
            layers: Layers of the whole model.

        Raises:
            CheckpointError: The stages do not have that many layers, or different numbers of chunks.
        """
        by_stage = [sum(chunks) for chunks in counts]
        if sum(by_stage) != layers or len({len(chunks) for chunks in counts}) > 1:
            found = ", ".join(map(str, by_stage))
            raise CheckpointError(
                f"--load {self.path}: its stages have {found} layers, not the {layers} of the model; load another."
            )
        numbers: list[list[int]] = [[] for _ in counts]
        first = 0
        for counts_of_chunk in zip(*counts):
            for own, count in zip(numbers, counts_of_chunk):
                own += range(first, first + count)
                first += count
        return numbers

    def tensor(self, name: str) -> Tensor:
        """The tensor of a flat name, put together from those of all tensor parallel ranks."""
        return self._join(name, self._pieces[name])

    def _join(self, name: str, pieces: list[Tensor]) -> Tensor:
        """The whole tensor of a flat name, a weight or its state in the optimizer, from those of all ranks."""
        dim = next((dim for weight, dim in SPLIT.items() if weight in name), None)
        if dim is None or pieces[0].ndim == 0:
            return pieces[0]
        if self._gated and "linear_fc1." in name:
            gates, values = zip(*(piece.chunk(2) for piece in pieces))
            return torch.cat([*gates, *values])
        return torch.cat(pieces, dim)


# --- what Megatron's two formats have in common


def malformed(path: Path, error: Exception) -> CheckpointError:
    """The error to raise for a file whose contents led to one of MALFORMED."""
    why = f"{type(error).__name__}: {error}".partition("\n")[0]
    return CheckpointError(
        f"--load {path}: has not the form of a checkpoint by Megatron-LM or this trainer ({why}); load one that has."
    )


def read_arguments(path: Path, state: MegatronState) -> MegatronArgs:
    """The arguments that a checkpoint was trained with.

    Raises:
        TypeError: They are no argparse.Namespace.
        CheckpointError: One of them changes what the model computes and cannot be honored here.
    """
    if not isinstance(state["args"], argparse.Namespace):
        raise TypeError(f"args is a {type(state['args']).__name__}")
    args = MegatronArgs(state["args"])
    unsupported = args.find_unsupported()
    if unsupported:
        raise CheckpointError(
            f"--load {path}: its model was trained with {', '.join(unsupported)}, which this trainer does not compute; "
            "load a checkpoint that was trained without."
        )
    return args


def read_record(
    state: MegatronState, args: MegatronArgs, rows: int, dtype: torch.dtype, has_optimizer: bool
) -> CheckpointRecord:
    """The record of a checkpoint by Megatron-LM, which does not tell the vocabulary before padding.

    Args:
        state: The file's contents.
        args: Megatron's arguments, with which the model was trained.
        rows: Rows of the embedding, all ranks' together.
        dtype: Data type of the weights.
        has_optimizer: Whether the optimizer's state is known by names.
    """
    iteration = state.get("iteration", state.get("total_iters", 0))  # converted weights have neither
    precisions = {dtype: name for name, dtype in DTYPES.items()}
    return CheckpointRecord(
        iteration=iteration,
        consumed=args.consumed(iteration),
        consumed_valid_samples=args.given("consumed_valid_samples", 0),
        left_out=args.given("skipped_train_samples", 0),
        shape=args.shape(rows),
        precision=precisions.get(dtype, "fp32"),
        schedule=args.schedule(_get_scheduler(state)),
        optimizer=args.given("optimizer", "adam") if has_optimizer else None,
        trainer="Megatron-LM",
    )


def read_clock(state: MegatronState) -> dict[str, Tensor]:
    """The flat tensor of the scheduler's samples; none where the file has no scheduler."""
    scheduler = _get_scheduler(state)
    samples = scheduler.get("num_steps", scheduler.get("num_iters"))
    return {} if samples is None else {"optimizer.good_samples": torch.tensor(samples)}


def write_values(record: CheckpointRecord, namespace: argparse.Namespace, take: Take) -> MegatronState:
    """All of a checkpoint that is neither model nor optimizer nor random states.

    Args:
        record: Record of the checkpoint.
        namespace: Megatron's arguments.
        take: Gives a flat name's tensor, or None.
    """
    is_gpt = "model" not in record.kernels
    flops = step_flops(record.model_shape, record.consumed, causal=True) if is_gpt else 0
    values: MegatronState = {
        "args": namespace,
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": record.iteration,
        "num_floating_point_operations_so_far": flops,
    }
    clock = take("optimizer.good_samples")
    if clock is not None:
        values["opt_param_scheduler"] = build_scheduler(record.schedule, int(clock))
    return values


def write_rng_state(ranks: Iterable[int], take: Take, seed: int, kinds: list[str]) -> list[RandomState]:
    """Megatron's rng_state.

    Args:
        ranks: Whose states it lists.
        take: Gives a flat name's tensor, or None.
        seed: The value of --seed.
        kinds: Kinds of random states that each of them has.
    """
    entries: list[RandomState] = []
    for rank in ranks:
        found = {kind: take(f"random.{rank}.{kind}") for kind in kinds}
        states = {kind: state for kind, state in found.items() if state is not None}
        entries.append(to_megatron(states, seed))
    return entries


def _get_scheduler(state: MegatronState) -> Scheduler:
    """The scheduler's state, under either of its names; empty where there is none."""
    return state.get("opt_param_scheduler") or state.get("lr_scheduler") or {}


# --- writing --ckpt-format torch: all in one file of the first rank, in Megatron's layout


def write_megatron_file(file: BinaryIO, record: CheckpointRecord, tensors: dict[str, Tensor], args: Args) -> None:
    """Write what Megatron-LM loads with --ckpt-format torch, and MegatronFile reads as it was.

    Args:
        file: Opened for writing.
        record: Record of the checkpoint.
        tensors: Tensors of the checkpoint by flat name, on any device.
        args: Megatron's arguments. With --transformer-impl transformer_engine, the default, names and optimizer are
            those of a Megatron that trains with Transformer Engine; with local, of one without.
    """

    def take(name: str) -> Tensor | None:
        """A tensor on the CPU, and no view: torch would write all that it is a view of."""
        if name not in tensors:
            return None
        tensor = tensors[name].detach().cpu()
        if tensor.untyped_storage().nbytes() == tensor.nbytes:
            return tensor
        return tensor.clone()

    fused = args.model.transformer_impl == "transformer_engine"
    held = [name.removeprefix("model.") for name in tensors if name.startswith("model.")]
    weights: dict[str, Tensor] = {}
    for name in megatron_names.in_file_order(held, fused):
        weight = take(f"model.{name}")
        if weight is not None:
            weights[name] = weight
    model: dict[str, object] = {megatron_names.file_name(name, fused): weight for name, weight in weights.items()}
    model |= dict.fromkeys(megatron_names.extra_states(model))
    namespace = build_namespace(record, plain_arguments(args), "torch")
    kinds = sorted(name.removeprefix("random.0.") for name in tensors if name.startswith("random.0."))
    state = write_values(record, namespace, take)
    state["model"] = model
    state[MARK] = {"record": record.to_json(), "random": kinds}
    if record.optimizer is not None:
        settings = group_settings(namespace, record)
        state["optimizer"] = write_optimizer(
            weights, take, settings, fused, args.optimizer, record.model_shape.mup_width_mult
        )
    if record.ranks:
        state["rng_state"] = write_rng_state(range(record.ranks), take, args.training.seed, kinds)
    torch.save(state, file)


def writer(args: Args) -> WriteTensors:
    """The function that writes this format, for checkpoint.write.Writer. args: the run's flags."""

    def write(
        folder: Path, record: CheckpointRecord, tensors: dict[str, Tensor], group: dist.ProcessGroup | None, /
    ) -> Manifest:
        """The first rank writes; the others send it what they alone have, their random states. Collective."""
        random = {name: value for name, value in tensors.items() if name.startswith("random.")}
        parts = [random] * dist.get_world_size(group)
        dist.all_gather_object(parts, random, group)
        if dist.get_rank(group) != 0:
            return {}
        everything = tensors.copy()
        for part in parts:
            everything |= part
        path = folder / TORCH_FILE
        path.parent.mkdir()
        with HashedFile(path) as file:
            write_megatron_file(file, record, everything, args)
        return {str(TORCH_FILE): file.entry}

    return write
