"""model_optim_rng.pt, the one file of Megatron-LM's --ckpt-format torch: read with everything it holds, and written.

Keys: args, checkpoint_version, iteration, model, optimizer, opt_param_scheduler, rng_state and
num_floating_point_operations_so_far; "megatron_lite" is ours, and Megatron passes over it.
Source: generate_state_dict and load_checkpoint in Megatron-LM's megatron/training/checkpointing.py.
"""

import argparse
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.checkpoint import megatron_names, megatron_unpickle
from megatron_lite.checkpoint.megatron_args import (
    DTYPES,
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
from megatron_lite.checkpoint.random_states import from_megatron, to_megatron
from megatron_lite.checkpoint.training_state import Record
from megatron_lite.config.args import Args
from megatron_lite.config.flops import step_flops
from megatron_lite.config.shape import ModelShape
from megatron_lite.errors import CheckpointError

MARK = "megatron_lite"
VERSION = 3.0  # checkpoint_version
EMBEDDING = "embedding.word_embeddings.weight"
QKV = (".self_attention.linear_qkv.weight", ".self_attention.linear_qkv.bias")
MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError)
WHOLE = (1, 1, 1)  # MegatronArgs.splits


class MegatronFile:
    """An opened file, a training_state.Stored. Tensors are read from the disk where they are asked for.

    without_optimizer: why record.optimizer is None, to go on from "its optimizer"; None where there is one.
    """

    def __init__(self, path: Path, splits: tuple[int, int, int] = WHOLE, stage: int = 0):
        """Raises CheckpointError for a file that cannot be read, or is not of a GPT.

        splits: what the model must be split into, as MegatronArgs.splits. stage: of its pipeline.
        """
        self.path, self.splits, self.stage, self.without_optimizer = Path(path), splits, stage, None
        self.notes: list[str] = []
        state = megatron_unpickle.load(self.path)
        try:
            self._understand(state)
        except MALFORMED as error:
            raise malformed(self.path, error) from None

    def _understand(self, state: dict):
        args = read_arguments(state)
        self.arguments = args.plain
        if args.splits != self.splits:
            found, expected = (" x ".join(map(str, splits)) for splits in (args.splits, self.splits))
            raise CheckpointError(
                f"--load {self.path}: is of a model in {found} parts (tensor x pipeline x virtual or "
                f"expert parallel), not {expected}; give the folder of all of its parts, or merge them "
                "with Megatron-LM's tools/checkpoint/convert.py."
            )
        self._weights = megatron_names.read_names(state["model"])
        optimizer = self._optimizer(state, args)
        weight = self._weights[EMBEDDING] if self.stage == 0 else next(iter(self._weights.values()))
        self.record = read_record(state, args, len(weight), weight.dtype, has_optimizer=self.without_optimizer is None)
        self._tensors = {f"model.{name}": weight for name, weight in self._weights.items()} | optimizer
        self._reorder(state.get("checkpoint_version", 0))
        if MARK in state:
            self.record = Record.from_json(state[MARK]["record"])
            self._tensors |= _random_states(state)

    def names(self) -> set[str]:
        return set(self._tensors)

    def size_of(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensor(name).shape)

    def dtype_of(self, name: str) -> torch.dtype:
        return self._tensor(name).dtype

    @torch.no_grad()
    def read_into(self, targets: dict[str, Tensor]):
        for name, target in targets.items():
            source = self._tensor(name)
            if source.shape != target.shape:
                raise CheckpointError(
                    f"--load {self.path}: {name} has the shape {tuple(source.shape)}, this run's "
                    f"{tuple(target.shape)}; give the flags of the model that was saved."
                )
            target.copy_(source)

    def _tensor(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise CheckpointError(f"--load {self.path}: holds no {name}; give the flags of the model that was saved.")
        return self._tensors[name]

    def _optimizer(self, state: dict, args: MegatronArgs) -> dict[str, Tensor]:
        """The flat tensors of optimizer, schedule and loss scale; none, and the reason kept, if they have no names."""
        try:
            return self._optimizer_by_name(state, args)
        except Unmapped as error:
            self.without_optimizer = str(error)
        except MALFORMED:
            self.without_optimizer = "has a form that is not known here"
        return {}

    def _optimizer_by_name(self, state: dict, args: MegatronArgs) -> dict[str, Tensor]:
        if "optimizer" not in state:
            raise Unmapped("was not saved (--no-save-optim)")
        optimizer = state["optimizer"]
        if isinstance(optimizer, list):
            raise Unmapped(f"is made of {len(optimizer)} chained ones")
        inner = optimizer.get("optimizer", optimizer)
        if "state" in inner:
            found = read_optimizer(optimizer, self._weights)
        else:  # the distributed optimizer keeps it elsewhere
            found = read_buffers(self.path.with_name(FILE), inner, self._weights, args)
        return found | read_loss_scale(optimizer) | read_clock(state)

    def _reorder(self, version: float):
        heads = self.record.shape["num_attention_heads"] // self.splits[0]
        for name in self._tensors if version < 2 else ():
            if any(kind in name for kind in QKV) and not name.endswith(".step"):
                self._tensors[name] = megatron_names.in_todays_order(self._tensors[name], version, heads)


def malformed(path: Path, error: Exception) -> CheckpointError:
    why = f"{type(error).__name__}: {error}".partition("\n")[0]
    return CheckpointError(
        f"--load {path}: has not the form of a checkpoint by Megatron-LM or this trainer ({why}); load one that has."
    )


def read_arguments(state: dict) -> MegatronArgs:
    if not isinstance(state["args"], argparse.Namespace):
        raise TypeError(f"args is a {type(state['args']).__name__}")
    return MegatronArgs(state["args"])


def read_record(state: dict, args: MegatronArgs, rows: int, dtype: torch.dtype, has_optimizer: bool) -> Record:
    """As far as Megatron-LM tells. The vocabulary before padding is not in it. rows, dtype: of the embedding."""
    iteration = state.get("iteration", state.get("total_iters", 0))  # converted weights have neither
    return Record(
        iteration=iteration,
        consumed=args.consumed(iteration),
        consumed_valid_samples=args.given("consumed_valid_samples", 0),
        shape=args.shape(rows),
        precision={dtype: name for name, dtype in DTYPES.items()}.get(dtype, "fp32"),
        schedule=args.schedule(_scheduler(state)),
        optimizer=args.given("optimizer", "adam") if has_optimizer else None,
        trainer="Megatron-LM",
    )


def read_clock(state: dict) -> dict[str, Tensor]:
    """The flat tensor of the scheduler's samples."""
    samples = _scheduler(state).get("num_steps", _scheduler(state).get("num_iters"))
    return {} if samples is None else {"optimizer.good_samples": torch.tensor(samples)}


def write_megatron_file(file: BinaryIO, record: Record, tensors: dict[str, Tensor], args: Args):
    """Write what Megatron-LM loads with --ckpt-format torch, and MegatronFile reads as it was.

    tensors: by flat name, on any device. With --transformer-impl transformer_engine, the default, names and optimizer are
    those of a Megatron that trains with Transformer Engine; with local, of one without.
    """

    def take(name: str) -> Tensor | None:
        return _for_file(tensors[name]) if name in tensors else None

    fused = args.model.transformer_impl == "transformer_engine"
    names = megatron_names.in_file_order((n.removeprefix("model.") for n in tensors if n.startswith("model.")), fused)
    weights = {name: take(f"model.{name}") for name in names}
    model = {megatron_names.file_name(name, fused): weight for name, weight in weights.items()}
    namespace = build_namespace(record, plain_arguments(args), "torch")
    state = write_values(record, namespace, take) | {
        "model": model | dict.fromkeys(megatron_names.extra_states(model)),
        MARK: {"record": record.to_json(), "random": _kinds(tensors)},
    }
    if record.optimizer is not None:
        state["optimizer"] = write_optimizer(weights, take, group_settings(namespace, record), fused)
    if record.ranks:
        state["rng_state"] = write_rng_state(range(record.ranks), take, args.training.seed, _kinds(tensors))
    torch.save(state, file)


def write_values(record: Record, namespace: argparse.Namespace, take: Take) -> dict:
    """All of a checkpoint that is neither model nor optimizer nor random states."""
    values = {
        "args": namespace,
        "checkpoint_version": VERSION,
        "iteration": record.iteration,
        "num_floating_point_operations_so_far": step_flops(ModelShape(**record.shape), record.consumed, causal=True),
    }
    clock = take("optimizer.good_samples")
    if clock is not None:
        values["opt_param_scheduler"] = build_scheduler(record.schedule, int(clock))
    return values


def _for_file(tensor: Tensor) -> Tensor:
    """On the CPU, and no view: torch would write all that it is a view of."""
    tensor = tensor.detach().cpu()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _kinds(tensors: dict[str, Tensor]) -> list[str]:
    """Of random states: python, numpy, ..."""
    return sorted(name.removeprefix("random.0.") for name in tensors if name.startswith("random.0."))


def write_rng_state(ranks: Iterable[int], take: Take, seed: int, kinds: list[str]) -> list[dict]:
    return [to_megatron({kind: take(f"random.{rank}.{kind}") for kind in kinds}, seed) for rank in ranks]


def _random_states(state: dict) -> dict[str, Tensor]:
    kinds = state[MARK]["random"]
    ranks = [from_megatron(entry) for entry in state.get("rng_state", [])]
    return {f"random.{rank}.{kind}": states[kind] for rank, states in enumerate(ranks) for kind in kinds}


def _scheduler(state: dict) -> dict:
    return state.get("opt_param_scheduler") or state.get("lr_scheduler") or {}


# --- --ckpt-format torch: all in one file of the first rank, in Megatron's layout

TORCH_FILE = Path("mp_rank_00") / "model_optim_rng.pt"  # Megatron's name for rank 0 of tensor and pipeline


def writer(args: Args) -> Callable:
    """A write_tensors for checkpoint.write.Writer."""

    def write(folder: Path, record: Record, tensors: dict[str, Tensor], group):
        """The first rank writes; the others send it what they alone have, their random states."""
        parts: list = [{}] * dist.get_world_size(group)
        dist.all_gather_object(
            parts, {name: value for name, value in tensors.items() if name.startswith("random.")}, group
        )
        if dist.get_rank(group) != 0:
            return
        everything = tensors | {name: value for part in parts for name, value in part.items()}
        path = folder / TORCH_FILE
        path.parent.mkdir()
        with open(path, "wb") as file:
            write_megatron_file(file, record, everything, args)
            file.flush()
            os.fsync(file.fileno())

    return write
