"""Megatron-LM's torch_dist folders, its default format and ours: read whatever layout wrote them, and written.

    .metadata, __RANK_NUMBER.distcp  tensors and objects, by torch.distributed.checkpoint
    common.pt                        plain values: args, iteration, param groups, schedule, loss scale; Megatron-Core
                                     0.19 puts them among the objects
    metadata.json                    names and versions of the two backends
    training_state.json              ours: the record of checkpoint/training_state.py

Keys of tensors are those of Transformer Engine's layers. A weight of all layers is one tensor, with the layers as its
first dimension, or, where layers differ, one tensor per layer. A key of the optimizer is optimizer.state.KIND.WEIGHT.
What only this trainer reads, each rank's random states, has keys that Megatron passes over.

Source: megatron/core/dist_checkpointing, TransformerBlock.sharded_state_dict, apply_swiglu_sharded_factory in
transformer/mlp.py, and sharded_state_dict of the optimizers, of Megatron-Core 0.16.1 and 0.19.2; save_checkpoint
and load_checkpoint in Megatron-LM's megatron/training/checkpointing.py.
"""

import argparse
import itertools
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TypeGuard

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megatron_lite.checkpoint import dcp, megatron_names, unpickle
from megatron_lite.checkpoint.dcp import Region, TensorPiece
from megatron_lite.checkpoint.folder import Manifest
from megatron_lite.checkpoint.megatron_args import MegatronArgs, build_namespace
from megatron_lite.checkpoint.megatron_file import (
    EMBEDDING,
    MALFORMED,
    malformed,
    read_arguments,
    read_clock,
    read_record,
    write_rng_state,
    write_values,
)
from megatron_lite.checkpoint.megatron_names import FolderNames
from megatron_lite.checkpoint.megatron_optimizer import (
    KEYS,
    SHARDING,
    Unmapped,
    bucket_sizes,
    group_settings,
    layout,
    read_group_flags,
    read_settings,
    write_settings,
)
from megatron_lite.checkpoint.megatron_state import Content, GradScaler, MegatronState, OptimizerState
from megatron_lite.checkpoint.training_state import CheckpointRecord, Stored, WriteTensors
from megatron_lite.config.layout import Block, Part, is_of_experts, take_part, whole_part
from megatron_lite.run_folder import METADATA_FILE, RECORD_FILE, write_atomically
from megatron_lite.shared_files import read_foreign_text

COMMON_FILE = "common.pt"
COMMON_OBJECT = "common_state/shard_0_1"  # the same from Megatron-Core 0.19 on, in a list of one
BACKENDS_FILE = "metadata.json"
BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
# what Megatron's sharded_state_dict is told, to ask for what is here
CONTENT: Content = {
    "distrib_optim_sharding_type": SHARDING,
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}
STATE = re.compile(r"^optimizer\.state\.(\w+)\.(.+)$")
# names of masters by Megatron's optimizer for halves, its distributed one, its exact one
MASTERS = ("fp32_param", "param", "master_param")
BUCKET = re.compile(
    r"^(optimizer\.distributed\.dp_group_idx_(\d+))\.gbuf_idx_(\d+)\.dtype_\(.*\)\.bucket_idx_(\d+)\.(\w+)$"
)
GATED = re.compile(r"^(.*\.mlp\.linear_fc1\.(?:weight|bias))(_w|_v)$")  # gates and values, stored apart
HALVES = ("", "_w", "_v")
RANDOM = "random."
MAX_CHECKPOINT_LAYERS = 2**12
MAX_EXPERTS = 2**16
# Megatron asks for each module's own state. It is empty but for FP8: all are one object
MODULES_OF_A_LAYER = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "self_attention.core_attention",
    "self_attention.q_layernorm",
    "self_attention.k_layernorm",
    "self_attention.linear_q_proj",
    "self_attention.linear_q_down_proj",
    "self_attention.linear_q_up_proj",
    "self_attention.linear_kv_down_proj",
    "self_attention.linear_kv_up_proj",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
    "mlp.shared_experts.linear_fc1",
    "mlp.shared_experts.linear_fc2",
)
# and those of a layer with experts, of each expert
MODULES_OF_AN_EXPERT = ("mlp.experts.experts.linear_fc1", "mlp.experts.experts.linear_fc2")
EMPTY_STATE = "decoder.final_layernorm._extra_state/shard_0_1"


# what the distributed optimizer keeps as objects, in lists of one
OPTIMIZER_OBJECT = "optimizer.distributed.dp_group_idx_0.optimizer/shard_0_1"
SCALER_OBJECT = "optimizer.distributed.dp_group_idx_0.grad_scaler/shard_0_1"
Wanted = list[tuple[Region, Tensor]]  # what is read, and into what


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor of `shape` is stored: the regions, one after another, along its first dimension."""

    shape: torch.Size
    dtype: torch.dtype
    regions: list[Region]

    @property
    def is_flat(self) -> bool:
        """Whether it lies in a bucket, as numbers one after another."""
        return len(self.regions[0].sizes) < len(self.shape)


@dataclass(frozen=True)
class FlatBucket:
    """A flat tensor of the distributed optimizer, which holds states of many parameters."""

    key: str
    group: int  # of data parallel ranks
    buffer: int  # among those of the group
    number: int  # among those of the buffer
    kind: str  # param, exp_avg or exp_avg_sq


def _is_optimizer(value: object) -> TypeGuard[OptimizerState]:
    return isinstance(value, dict)


def _is_state(value: object) -> TypeGuard[MegatronState]:
    return isinstance(value, dict)


def _is_scaler(value: object) -> TypeGuard[GradScaler]:
    return isinstance(value, dict)


class DistFile(Stored):
    """An opened folder. Tensors are read from the disk where they are asked for."""

    def __init__(self, folder: Path):
        """Raises CheckpointError for a folder that cannot be read, or is not of a GPT."""
        super().__init__(folder)
        self._values: dict[str, Tensor] = {}  # of common.pt
        self._places: dict[str, StoredTensor] = {}  # of all other tensors, by flat name
        own: CheckpointRecord | None = None
        if (folder / RECORD_FILE).exists():
            with dcp.readable(folder / RECORD_FILE):
                own = CheckpointRecord.from_json(read_foreign_text(folder / RECORD_FILE))
        with dcp.readable(folder / METADATA_FILE):
            self._reader = dcp.Reader(folder)
        entries = self._reader.metadata.state_dict_metadata
        self._entries = {key: entry for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
        try:
            self._understand(self._read_common(), own)
        except MALFORMED as error:
            raise malformed(folder, error) from None
        self.held = {**self._places, **self._values}
        if own is not None:
            self.record = own
            self.without_optimizer = None if own.optimizer else "was not saved (--no-save-optim, or a conversion)"

    @torch.no_grad()
    def _copy(self, targets: dict[str, Tensor], parts: Mapping[str, Part]) -> None:
        wanted: Wanted = []
        read_whole: list[tuple[Tensor, Tensor, Part]] = []  # target, the whole tensor, what the target holds of it
        for name, whole_target in targets.items():
            target = whole_target.detach()
            if name in self._values:
                target.copy_(self._values[name])
                continue
            place = self._places[name]
            part = parts.get(name)
            if part is not None and place.is_flat and part.shape[1:] != part.whole[1:]:
                # its columns lie apart
                whole = torch.empty(part.whole, dtype=target.dtype)
                read_whole.append((target, whole, part))
                wanted += _cut(place, whole, whole_part(part.whole))
            else:
                wanted += _cut(place, target, part or whole_part(tuple(target.shape)))
        if wanted:
            with dcp.readable(self.path):
                self._reader.read(wanted)
        for target, whole, part in read_whole:
            take_part(target, whole, part)

    def _understand(self, common: MegatronState, own: CheckpointRecord | None) -> None:
        """Find where all tensors are and, for a folder of Megatron's, what the record would say.

        Args:
            common: The plain values.
            own: This trainer's record, if the folder has one.

        Raises:
            CheckpointError: The model is one that this trainer does not compute.
            Exception: One of MALFORMED, for what is not as Megatron writes it.
        """
        args = read_arguments(self.path, common)
        self.arguments = args.plain
        self._places = find_places(self._entries)
        weights = {
            name.removeprefix("model."): place for name, place in self._places.items() if name.startswith("model.")
        }
        try:
            self._understand_optimizer(common, args, weights)
            # judged by norms and biases: they are small, and everywhere
            vectors = [
                name
                for name, weight in weights.items()
                if len(weight.shape) == 1 and f"optimizer.{name}.master" in self._places
            ]
            if own is None and not self._are_masters(self._places, weights, vectors):
                raise Unmapped(
                    "holds masters that are not its weights', as Megatron-Core 0.16.1 stores them from several padded "
                    "buckets with --dist-ckpt-optim-fully-reshardable; save it there without that flag"
                )
        except Unmapped as error:
            self._leave_optimizer_out(str(error))
        except MALFORMED:
            self._leave_optimizer_out("has a form that is not known here")
        for name, weight in weights.items():
            if weight.dtype == torch.float32:
                self._places.pop(f"optimizer.{name}.master", None)  # the weight itself
        if own is None:
            self._note_extra_states()
            embedding = weights[EMBEDDING]
            self.record = read_record(common, args, embedding.shape[0], embedding.dtype, self.without_optimizer is None)

    def _read_common(self) -> MegatronState:
        """The plain values, which stand in a file or, where there is none, among the objects."""
        is_object = COMMON_OBJECT in self._reader.metadata.state_dict_metadata
        if not is_object or (self.path / COMMON_FILE).exists():
            return unpickle.load(self.path / COMMON_FILE)
        common = self._read_object(COMMON_OBJECT)
        if not _is_state(common):
            raise TypeError(f"{COMMON_OBJECT} is no dict")
        return common

    def _leave_optimizer_out(self, why: str) -> None:
        """Go on without the optimizer's tensors. why: to go on from "its optimizer"."""
        self.without_optimizer = why
        self._values = {}
        self._places = {name: place for name, place in self._places.items() if not name.startswith("optimizer.")}

    def _note_extra_states(self) -> None:
        """Note that states of Transformer Engine's modules are not read, if there are any."""
        count = sum("_extra_state" in key for key in self._reader.metadata.state_dict_metadata)
        if count:
            self.notes.append(
                f"{count} _extra_state entries, Transformer Engine's own (FP8 scales, or empty), are left out"
            )

    def _understand_optimizer(
        self, common: MegatronState, args: MegatronArgs, weights: dict[str, StoredTensor]
    ) -> None:
        """Find steps, loss scale and schedule, and check that the moments are the weights'. Raises Unmapped."""
        buckets = list_buckets(self._entries)
        if buckets:
            self._find_in_buckets(buckets, args, weights)
            optimizer = self._read_optimizer_objects()
        else:
            stored = common.get("optimizer")
            if not stored:
                raise Unmapped("was not saved (--no-save-optim)")
            if isinstance(stored, list):
                raise TypeError("the optimizer is a list")
            optimizer = stored
        for name, place in self._places.items():
            if not name.startswith("optimizer."):
                continue
            owner = name.removeprefix("optimizer.").rpartition(".")[0]
            if owner not in weights or place.shape != weights[owner].shape:
                raise Unmapped(
                    "is stored in another shape than its weights: flat, as before Megatron-Core 0.14, or of "
                    "several optimizers"
                )
        stepping = [name for name in weights if f"optimizer.{name}.exp_avg" in self._places]
        self._values = read_settings(optimizer, stepping) | read_clock(common)

    def _read_optimizer_objects(self) -> OptimizerState:
        """The state that the distributed optimizer keeps besides its buckets; empty dicts for what is not there."""
        inner = self._read_object(OPTIMIZER_OBJECT)
        scaler = self._read_object(SCALER_OBJECT)
        if not _is_optimizer(inner) or not _is_scaler(scaler):
            raise TypeError("the optimizer's objects are no dicts")
        return {"optimizer": inner, "grad_scaler": scaler}

    def _read_object(self, key: str) -> object:
        """The one object in the list that is stored under a key; an empty dict if there is no such key."""
        if key not in self._reader.metadata.state_dict_metadata:
            return {}
        stored = unpickle.load_object(self.path / METADATA_FILE, self._reader.read_object(key))
        if not isinstance(stored, (list, tuple)):
            raise TypeError(f"{key} is a {type(stored).__name__}")
        made: object
        [made] = stored
        return made

    def _find_in_buckets(self, buckets: list[FlatBucket], args: MegatronArgs, weights: dict[str, StoredTensor]) -> None:
        """Add places in the distributed optimizer's flat buckets, which tell no names. Raises Unmapped.

        That the layout is understood is proved by the weights: each must be its master, rounded.
        """
        if any(bucket.group != 0 or bucket.buffer != 0 for bucket in buckets):
            raise Unmapped(
                "lies in the buckets of a model in several parts; save it there with "
                "--dist-ckpt-optim-fully-reshardable"
            )
        by_kind: dict[str, dict[int, str]] = {}
        for bucket in buckets:
            by_kind.setdefault(bucket.kind, {})[bucket.number] = bucket.key
        for fused, bucket_size in itertools.product((True, False), bucket_sizes(args)):
            names = megatron_names.in_file_order(weights, fused)
            starts, total = layout({name: weights[name].shape.numel() for name in names}, bucket_size)
            found: dict[str, StoredTensor] = {}
            for theirs, ours in KEYS.items():
                for name, place in self._slices(by_kind[theirs], starts, total, weights).items():
                    found[f"optimizer.{name}.{ours}"] = place
            if found and all(self._are_masters(found, weights, [name]) for name in names):
                self._places |= found
                return
        raise Unmapped(
            "lies in buckets that do not fit these weights; save it there with --dist-ckpt-optim-fully-reshardable"
        )

    def _slices(
        self, keys: dict[int, str], starts: dict[str, int], total: int, weights: dict[str, StoredTensor]
    ) -> dict[str, StoredTensor]:
        """Places of one kind of state in buckets, laid end to end.

        Args:
            keys: Keys of the buckets, by number.
            starts: The first element of each parameter.
            total: Elements of all buckets.
            weights: Where the parameters are.

        Returns:
            Places by the parameter's name; none if the buckets have another length, or a parameter lies in two.
        """
        ends = list(itertools.accumulate(self._entries[keys[number]].size[0] for number in range(len(keys))))
        if not ends or ends[-1] != total:
            return {}
        places: dict[str, StoredTensor] = {}
        for name, start in starts.items():
            shape = weights[name].shape
            number = next(number for number, end in enumerate(ends) if start < end)
            bucket_start = ends[number - 1] if number else 0
            first = start - bucket_start
            entry = self._entries[keys[number]]
            if first + shape.numel() > entry.size[0]:
                return {}
            region = Region(keys[number], (first,), (shape.numel(),))
            places[name] = StoredTensor(shape, entry.properties.dtype, [region])
        return places

    def _are_masters(
        self, masters: dict[str, StoredTensor], weights: dict[str, StoredTensor], names: list[str]
    ) -> bool:
        """Whether the weights of these names are their masters, rounded. Reads both."""
        held: list[tuple[Tensor, Tensor]] = []
        wanted: Wanted = []
        for name in names:
            master_place = masters[f"optimizer.{name}.master"]
            master = torch.empty(master_place.shape, dtype=master_place.dtype)
            wanted += _cut(master_place, master, whole_part(tuple(master_place.shape)))
            weight = torch.empty(weights[name].shape, dtype=weights[name].dtype)
            wanted += _cut(weights[name], weight, whole_part(tuple(weights[name].shape)))
            held.append((master, weight))
        with dcp.readable(self.path):
            self._reader.read(wanted)
        return all(torch.equal(master.to(weight.dtype), weight) for master, weight in held)


def list_buckets(keys: Iterable[str]) -> list[FlatBucket]:
    """The buckets among the keys of a folder."""
    buckets: list[FlatBucket] = []
    for key in keys:
        match = BUCKET.match(key)
        if match:
            buckets.append(FlatBucket(key, int(match[2]), int(match[3]), int(match[4]), match[5]))
    return buckets


def find_places(entries: Mapping[str, TensorStorageMetadata]) -> dict[str, StoredTensor]:
    """Places by flat name of all weights and what the optimizer holds of them, and of this trainer's random states."""
    parts: dict[str, dict[str, StoredTensor]] = {}  # by flat name, then by which of HALVES they are
    for key, entry in entries.items():
        if key.startswith(RANDOM):
            parts[key] = {"": _place_whole(key, entry)}
            continue
        if key.startswith("optimizer.distributed."):
            continue
        state = STATE.match(key)
        weight = state[2] if state else key
        gated = GATED.match(weight)
        half = ""
        if gated:
            weight = gated[1]
            half = gated[2]
        for name, place in _place_layers(key, entry, weight).items():
            flat = f"model.{name}"
            if state:
                kind = "master" if state[1] in MASTERS else state[1]
                flat = f"optimizer.{name}.{kind}"
            parts.setdefault(flat, {})[half] = place
    return {name: _join([by_half[half] for half in HALVES if half in by_half]) for name, by_half in parts.items()}


def _place_whole(key: str, entry: TensorStorageMetadata) -> StoredTensor:
    """The place of a tensor that has a key of its own."""
    size = entry.size
    return StoredTensor(size, entry.properties.dtype, [Region(key, (0,) * len(size), tuple(size))])


def _place_layers(key: str, entry: TensorStorageMetadata, weight: str) -> dict[str, StoredTensor]:
    """The places of what is stored under a key.

    Args:
        key: Key of a weight, or of its state in the optimizer.
        entry: What the metadata says of it.
        weight: The weight's own key.

    Returns:
        Places by our names of weights: one for each layer of a stacked tensor.

    Raises:
        ValueError: There are more layers than any model has.
    """
    if not megatron_names.is_stacked(weight):
        whole = _place_whole(key, entry)
        return {megatron_names.ours(weight): _place_experts(whole) if megatron_names.is_of_experts(weight) else whole}
    count, *sizes = entry.size
    if count > MAX_CHECKPOINT_LAYERS:
        raise ValueError(f"{key} is of {count} layers")
    shape = torch.Size(sizes)
    places: dict[str, StoredTensor] = {}
    for layer in range(count):
        region = Region(key, (layer, *[0] * len(shape)), (1, *shape))
        place = StoredTensor(shape, entry.properties.dtype, [region])
        name = megatron_names.unstacked_name(weight, layer)
        places[name] = _place_experts(place) if megatron_names.is_of_experts(weight) else place
    return places


def _place_experts(place: StoredTensor) -> StoredTensor:
    """The place of matrices of experts that lie one below the other, where they are stored as (experts, rows, columns).

    Raises:
        ValueError: They are not stored so.
    """
    if len(place.shape) != 3 or place.shape[0] > MAX_EXPERTS:
        raise ValueError(f"{place.regions[0].key} is of the shape {list(place.shape)}")
    experts, rows, columns = place.shape
    region = place.regions[0]
    above = len(region.sizes) - 3  # the dimension of layers
    regions: list[Region] = []
    for expert in range(experts):
        offsets = (*region.offsets[:above], expert, 0, 0)
        regions.append(Region(region.key, offsets, (*region.sizes[:above], 1, rows, columns)))
    return StoredTensor(torch.Size((experts * rows, columns)), place.dtype, regions)


def _join(parts: list[StoredTensor]) -> StoredTensor:
    """The place of a tensor whose halves, along the first dimension, are stored apart; or of one that is whole."""
    first = parts[0]
    if len(parts) == 1:
        return first
    regions = [region for part in parts for region in part.regions]
    rows = len(parts) * first.shape[0]
    return StoredTensor(torch.Size([rows, *first.shape[1:]]), first.dtype, regions)


def _cut(place: StoredTensor, target: Tensor, part: Part) -> Iterator[tuple[Region, Tensor]]:
    """Find the regions to read of a stored tensor.

    Args:
        place: Where it is.
        target: Holds `part` of it.
        part: Blocks of its rows.

    Yields:
        A region, and the view of `target` that it belongs into.
    """
    if target.ndim == 0:
        yield place.regions[0], target
        return
    each = place.shape[0] // len(place.regions)  # rows of a region
    row = 0  # of the target, where the block begins
    for block in part.blocks:
        block_start = block.offsets[0]
        block_end = block_start + block.sizes[0]
        for number, region in enumerate(place.regions):
            region_start = number * each
            first = max(block_start, region_start)
            end = min(block_end, region_start + each)
            if first < end:
                inside = Block((first - region_start, *block.offsets[1:]), (end - first, *block.sizes[1:]))
                stored = _narrow(place, region, inside)
                start = row + first - block_start
                yield stored, target[start : start + end - first].view(stored.sizes)
        row += block.sizes[0]


def _narrow(place: StoredTensor, region: Region, block: Block) -> Region:
    """The region of a block of what `region` holds; of a flat one the block has whole rows."""
    if place.is_flat:
        width = math.prod(place.shape[1:])
        return Region(region.key, (region.offsets[0] + block.offsets[0] * width,), (block.sizes[0] * width,))
    above = len(region.sizes) - len(place.shape)  # the dimension of layers
    offsets = tuple(start + more for start, more in zip(region.offsets[above:], block.offsets))
    return Region(region.key, (*region.offsets[:above], *offsets), (*region.sizes[:above], *block.sizes))


def writer(arguments: Mapping[str, object], parts: Mapping[str, Part] = MappingProxyType({})) -> WriteTensors:
    """The function that writes this format, for checkpoint.write.Writer.

    Args:
        arguments: Flags by name, for common.pt.
        parts: Parts of tensors that a rank gives, by flat name, where that is not all.
    """

    def write(
        folder: Path, record: CheckpointRecord, tensors: dict[str, Tensor], group: ProcessGroup | None, /
    ) -> Manifest:
        """Each rank writes its tensors; the first one, which has all scalars, the values too. Collective."""
        is_first = group is None or torch.distributed.get_rank(group) == 0
        namespace = build_namespace(record, arguments, "torch_dist")
        names = _name_layers(record, arguments)
        experts = record.model_shape.experts
        # what Megatron asks for besides tensors, each in a list: modules' empty states, and a rank's random states
        objects: dict[str, object] = {}
        if is_first:
            objects[EMPTY_STATE] = [None]
        if is_first and record.ranks:
            kinds = [name.removeprefix("random.0.") for name in tensors if name.startswith("random.0.")]
            objects["rng_state/shard_0.0_1.1"] = [write_rng_state([0], tensors.get, namespace.seed, kinds)]
        pieces: list[TensorPiece] = []
        for name, tensor in tensors.items():
            # the optimizer's scalars stand in common.pt
            if tensor.ndim > 0 or name.startswith("model."):
                part = parts.get(name) or whole_part(tuple(tensor.shape))
                cut = _cut_pieces(name, tensor, names, part)
                if experts is not None and is_of_experts(name):
                    cut = _part_experts(cut, experts.number, part.whole[0] // experts.number)
                pieces += cut
        entries = dcp.write(folder, pieces, objects, partial(_find_aliases, names), group)
        if is_first:
            # a failure before would leave the others waiting
            _write_common(folder, record, tensors, namespace)
        return entries

    return write


def _write_common(
    folder: Path, record: CheckpointRecord, tensors: dict[str, Tensor], namespace: argparse.Namespace
) -> None:
    """Write COMMON_FILE and BACKENDS_FILE.

    Args:
        folder: The unfinished checkpoint.
        record: Plain values of the checkpoint.
        tensors: Tensors of the first rank, by flat name.
        namespace: Megatron's arguments.
    """

    def take(name: str) -> Tensor | None:
        return tensors[name].detach().cpu() if name in tensors else None

    values = write_values(record, namespace, take)
    values["content_metadata"] = CONTENT
    if record.optimizer is not None:
        step = max((tensor.item() for name, tensor in tensors.items() if name.endswith(".step")), default=None)
        fused = namespace.transformer_impl == "transformer_engine"
        settings = group_settings(namespace, record)
        values["optimizer"] = write_settings(
            step, take, settings, fused, read_group_flags(namespace), record.model_shape.mup_width_mult
        )
    with open(folder / COMMON_FILE, "wb") as file:
        torch.save(values, file)
        file.flush()
        os.fsync(file.fileno())
    write_atomically(folder / BACKENDS_FILE, json.dumps(BACKENDS))


def _name_layers(record: CheckpointRecord, arguments: Mapping[str, object]) -> FolderNames:
    """How the folder has the layers. As in Megatron-Core they are not stacked where layers with experts follow a
    pattern, or not each layer has some."""
    shape = record.model_shape
    if shape.experts is None:
        return FolderNames(shape)
    has_no_pattern = str(arguments.get("moe_layer_freq", "1")).strip() == "1"
    return FolderNames(shape, stacks=has_no_pattern and all(shape.experts.layers))


def _find_aliases(names: FolderNames, metadata: Metadata) -> dict[str, str]:
    """Name every module's empty state, and masters as the distributed optimizer calls them.

    There a weight in fp32 is a master, too.

    Args:
        names: How the folder has the layers.
        metadata: What is stored.

    Returns:
        {further key: stored key}.
    """
    empty = itertools.product(MODULES_OF_A_LAYER, range(names.shape.num_layers))
    aliases = {names.find_state_key(module, layer): EMPTY_STATE for module, layer in empty}
    aliases["output_layer._extra_state/shard_0_1"] = EMPTY_STATE
    for layer in names.list_layers_with_experts():
        for module, expert in itertools.product(MODULES_OF_AN_EXPERT, range(names.experts)):
            aliases[names.find_state_key(module, layer, expert)] = EMPTY_STATE
    for key in names.list_further_state_keys(MODULES_OF_A_LAYER, MODULES_OF_AN_EXPERT):
        aliases[key] = EMPTY_STATE
    held = metadata.state_dict_metadata
    for key in list(held):
        state = STATE.match(key)
        if state and state[1] == "exp_avg":
            weight = state[2]
            master = f"optimizer.state.{MASTERS[0]}.{weight}"
            aliases[f"optimizer.state.{MASTERS[1]}.{weight}"] = master if master in held else weight
    # the norm before experts has a key of its own with Transformer Engine's layers, not with Megatron-Core's local ones
    for key in [*held, *aliases]:
        if megatron_names.NORM_BEFORE_EXPERTS in key:
            local = key.replace(megatron_names.NORM_BEFORE_EXPERTS, megatron_names.NORM_IN_FC1)
            aliases[local] = aliases.get(key, key)
    if names.shape.latent is not None:
        for key in [*held, *aliases]:
            for local in megatron_names.list_local_names(key):
                aliases[local] = aliases.get(key, key)
    return aliases


def _cut_pieces(name: str, tensor: Tensor, names: FolderNames, part: Part) -> Iterator[TensorPiece]:
    """Cut what is to be written of a tensor into pieces, one per block.

    Args:
        name: Flat name of the tensor.
        tensor: What this rank gives of it.
        names: How the folder has the layers.
        part: Part of the whole tensor that it is.
    """
    key, layer = _find_key(name, names)
    whole = part.whole if layer is None else (names.shape.num_layers, *part.whole)
    start = 0
    for block in part.blocks:
        rows = tensor
        if tensor.ndim:
            rows = tensor[start : start + block.sizes[0]]
            start += rows.shape[0]
        region = Region(key, block.offsets, block.sizes)
        if layer is not None:
            region = Region(key, (layer, *block.offsets), (1, *block.sizes))
        if rows.numel():
            yield TensorPiece(region, whole, rows)


def _part_experts(pieces: Iterable[TensorPiece], experts: int, rows: int) -> Iterator[TensorPiece]:
    """The same pieces of matrices of experts, in a tensor where experts are a dimension.

    Args:
        pieces: Pieces of the matrices, which lie one below the other.
        experts: How many there are.
        rows: Rows of each matrix.
    """
    for piece in pieces:
        region = piece.region
        above = len(region.sizes) - 2  # the dimension of layers
        first = region.offsets[above]
        end = first + region.sizes[above]
        start = first
        while start < end:
            expert = start // rows
            stop = min(end, (expert + 1) * rows)
            offsets = (*region.offsets[:above], expert, start - expert * rows, region.offsets[-1])
            sizes = (*region.sizes[:above], 1, stop - start, region.sizes[-1])
            whole = (*piece.whole[:above], experts, rows, piece.whole[-1])
            yield TensorPiece(Region(region.key, offsets, sizes), whole, piece.tensor[start - first : stop - first])
            start = stop


def _find_key(name: str, names: FolderNames) -> tuple[str, int | None]:
    """The key of a flat name, and its layer where that key has the weights of all layers."""
    if name.startswith(RANDOM):
        return name, None
    kind, _, weight = name.partition(".")
    if kind != "optimizer":
        return names.find_key(weight)
    weight, _, state = weight.rpartition(".")
    key, layer = names.find_key(weight)
    theirs = MASTERS[0] if state == "master" else state
    return f"optimizer.state.{theirs}.{key}", layer
