"""Megatron-LM's torch_dist folders, its default format and ours: read whatever layout wrote them, and written.

    .metadata, __RANK_NUMBER.distcp  tensors and objects, by torch.distributed.checkpoint
    common.pt                        plain values: args, iteration, param groups, schedule, loss scale
    metadata.json                    names and versions of the two backends
    training_state.json              ours: the record of checkpoint/training_state.py

Keys of tensors are those of Transformer Engine's layers. A weight of all layers is one tensor, with the layers as its
first dimension, or, where layers differ, one tensor per layer. A key of the optimizer is optimizer.state.KIND.WEIGHT.
What only this trainer reads, each rank's random states, has keys that Megatron passes over.

Source: megatron/core/dist_checkpointing, TransformerBlock.sharded_state_dict, apply_swiglu_sharded_factory in
transformer/mlp.py, and sharded_state_dict of the optimizers, of Megatron-Core 0.16.1; save_checkpoint and
load_checkpoint in Megatron-LM's megatron/training/checkpointing.py.
"""

import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megatron_lite.checkpoint import dcp, megatron_names, unpickle
from megatron_lite.checkpoint.dcp import Piece, Region
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
from megatron_lite.checkpoint.training_state import CheckpointRecord, Stored
from megatron_lite.config.layout import Block, Part, take_part, whole_part
from megatron_lite.run_folder import METADATA_FILE, RECORD_FILE, write_atomically
from megatron_lite.shared_files import read_foreign_text

COMMON_FILE, BACKENDS_FILE = "common.pt", "metadata.json"
BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
# what Megatron's sharded_state_dict is told, to ask for what is here
CONTENT = {
    "distrib_optim_sharding_type": SHARDING,
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}
STATE = re.compile(r"^optimizer\.state\.(\w+)\.(.+)$")
MASTERS = (
    "fp32_param",
    "param",
    "master_param",
)  # by Megatron's optimizer for halves, its distributed one, its exact one
BUCKET = re.compile(
    r"^(optimizer\.distributed\.dp_group_idx_(\d+))\.gbuf_idx_(\d+)\.dtype_\(.*\)\.bucket_idx_(\d+)\.(\w+)$"
)
GATED = re.compile(r"^(.*\.mlp\.linear_fc1\.(?:weight|bias))(_w|_v)$")  # gates and values, stored apart
HALVES = ("", "_w", "_v")
RANDOM = "random."
MAX_LAYERS = 2**12
# Megatron asks for each module's own state. It is empty but for FP8: all are one object
MODULES_OF_A_LAYER = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "self_attention.core_attention",
    "self_attention.q_layernorm",
    "self_attention.k_layernorm",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
EMPTY_STATE = "decoder.final_layernorm._extra_state/shard_0_1"


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor of `shape` is stored: the regions, one after another, along its first dimension."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    regions: list[Region]

    @property
    def is_flat(self) -> bool:
        """Whether it lies in a bucket, as numbers one after another."""
        return len(self.regions[0].sizes) < len(self.shape)


class DistFile(Stored):
    """An opened folder. Tensors are read from the disk where they are asked for."""

    def __init__(self, folder: Path):
        """Raises CheckpointError for a folder that cannot be read, or is not of a GPT."""
        super().__init__(folder)
        self._values: dict[str, Tensor] = {}  # of common.pt
        own = None
        if (folder / RECORD_FILE).exists():
            with dcp.readable(folder / RECORD_FILE):
                own = CheckpointRecord.from_json(read_foreign_text(folder / RECORD_FILE))
        with dcp.readable(folder / METADATA_FILE):
            self._reader = dcp.Reader(folder)
        entries = self._reader.metadata.state_dict_metadata
        self._entries = {key: entry for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
        common = unpickle.load(folder / COMMON_FILE)
        try:
            self._understand(common, own)
        except MALFORMED as error:
            raise malformed(folder, error) from None
        self.held = self._places | self._values
        if own is not None:
            self.record = own
            self.without_optimizer = None if own.optimizer else "was not saved (--no-save-optim, or a conversion)"

    @torch.no_grad()
    def _copy(self, targets: dict[str, Tensor], parts: Mapping[str, Part]):
        wanted, read_whole = [], []
        for name, target in targets.items():
            target, part = target.detach(), parts.get(name)
            if name in self._values:
                target.copy_(self._values[name])
                continue
            place = self._places[name]
            if part is not None and part.shape[1:] != part.whole[1:] and place.is_flat:  # its columns lie apart
                read_whole.append((target, torch.empty(part.whole, dtype=target.dtype), part))
                target, part = read_whole[-1][1], None
            wanted += _cut(place, target, part or whole_part(tuple(target.shape)))
        if wanted:
            with dcp.readable(self.path):
                self._reader.read(wanted)
        for target, whole, part in read_whole:
            take_part(target, whole, part)

    def _understand(self, common: dict, own: CheckpointRecord | None):
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
        except (Unmapped, *MALFORMED) as error:
            known = isinstance(error, Unmapped)
            self.without_optimizer = str(error) if known else "has a form that is not known here"
            self._values = {}
            self._places = {name: place for name, place in self._places.items() if not name.startswith("optimizer.")}
        for name in [name for name, weight in weights.items() if weight.dtype == torch.float32]:
            self._places.pop(f"optimizer.{name}.master", None)  # the weight itself
        if own is None:
            count = sum("_extra_state" in key for key in self._reader.metadata.state_dict_metadata)
            if count:
                self.notes.append(
                    f"{count} _extra_state entries, Transformer Engine's own (FP8 scales, or empty), are left out"
                )
            embedding = weights[EMBEDDING]
            self.record = read_record(common, args, embedding.shape[0], embedding.dtype, self.without_optimizer is None)

    def _understand_optimizer(self, common: dict, args: MegatronArgs, weights: dict[str, StoredTensor]):
        """Find steps, loss scale and schedule, and check that the moments are the weights'. Raises Unmapped."""
        buckets = {match: key for key in self._entries if (match := BUCKET.match(key))}
        optimizer = common.get("optimizer")
        if buckets:
            self._find_in_buckets(buckets, args, weights)
            optimizer = {}
            for kind in ("optimizer", "grad_scaler"):
                key = f"optimizer.distributed.dp_group_idx_0.{kind}/shard_0_1"
                optimizer[kind] = {}
                if key in self._reader.metadata.state_dict_metadata:
                    stored = self._reader.read_object(key)
                    [optimizer[kind]] = unpickle.load_object(self.path / METADATA_FILE, stored)
        elif not optimizer:
            raise Unmapped("was not saved (--no-save-optim)")
        for name, place in self._places.items():
            owner = name.removeprefix("optimizer.").rpartition(".")[0]
            if name.startswith("optimizer.") and (owner not in weights or place.shape != weights[owner].shape):
                raise Unmapped(
                    "is stored in another shape than its weights: flat, as before Megatron-Core 0.14, or of "
                    "several optimizers"
                )
        stepping = [name for name in weights if f"optimizer.{name}.exp_avg" in self._places]
        self._values = read_settings(optimizer, stepping) | read_clock(common)

    def _find_in_buckets(self, buckets: dict[re.Match, str], args: MegatronArgs, weights: dict[str, StoredTensor]):
        """Add places in the distributed optimizer's flat buckets, which tell no names. Raises Unmapped.

        That the layout is understood is proved by the weights: each must be its master, rounded.
        """
        if any(match[2] != "0" or match[3] != "0" for match in buckets):
            raise Unmapped(
                "lies in the buckets of a model in several parts; save it there with "
                "--dist-ckpt-optim-fully-reshardable"
            )
        by_kind: dict[str, dict[int, str]] = {}
        for match, key in buckets.items():
            by_kind.setdefault(match[5], {})[int(match[4])] = key
        for fused, bucket_size in itertools.product((True, False), bucket_sizes(args)):
            names = megatron_names.in_file_order(weights, fused)
            starts, total = layout({name: torch.Size(weights[name].shape).numel() for name in names}, bucket_size)
            found = {}
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
        """{name: its place} in buckets, laid end to end; empty if they are not as long as that. keys: by number."""
        ends = list(itertools.accumulate(self._entries[keys[number]].size[0] for number in range(len(keys))))
        if not ends or ends[-1] != total:
            return {}
        places = {}
        for name, start in starts.items():
            shape = weights[name].shape
            number = next(number for number, end in enumerate(ends) if start < end)
            first = start - (ends[number - 1] if number else 0)
            entry = self._entries[keys[number]]
            if first + shape.numel() > entry.size[0]:
                return {}
            places[name] = StoredTensor(
                shape, entry.properties.dtype, [Region(keys[number], (first,), (shape.numel(),))]
            )
        return places

    def _are_masters(
        self, masters: dict[str, StoredTensor], weights: dict[str, StoredTensor], names: list[str]
    ) -> bool:
        held, wanted = [], []
        for name in names:
            places = masters[f"optimizer.{name}.master"], weights[name]
            held.append([torch.empty(place.shape, dtype=place.dtype) for place in places])
            for place, tensor in zip(places, held[-1]):
                wanted += _cut(place, tensor, whole_part(tuple(place.shape)))
        with dcp.readable(self.path):
            self._reader.read(wanted)
        return all(torch.equal(master.to(weight.dtype), weight) for master, weight in held)


def find_places(entries: dict[str, TensorStorageMetadata]) -> dict[str, StoredTensor]:
    """Places by flat name of all weights and what the optimizer holds of them, and of this trainer's random states."""
    halves: dict[str, dict[str, StoredTensor]] = {}
    for key, entry in entries.items():
        size, dtype = entry.size, entry.properties.dtype
        whole = StoredTensor(size, dtype, [Region(key, (0,) * len(size), tuple(size))])
        if key.startswith(RANDOM):
            halves[key] = {"": whole}
            continue
        if key.startswith("optimizer.distributed."):
            continue
        state = STATE.match(key)
        kind, weight = state.groups() if state else ("", key)
        gated = GATED.match(weight)
        weight, half = gated.groups() if gated else (weight, "")
        if megatron_names.is_stacked(weight):
            count, *shape = size
            if count > MAX_LAYERS:
                raise ValueError(f"{key} is of {count} layers")
            found = {}
            for layer in range(count):
                region = Region(key, (layer, *[0] * len(shape)), (1, *shape))
                found[megatron_names.unstacked_name(weight, layer)] = StoredTensor(torch.Size(shape), dtype, [region])
        else:
            found = {megatron_names.ours(weight): whole}
        for name, place in found.items():
            flat = f"optimizer.{name}.{'master' if kind in MASTERS else kind}" if state else f"model.{name}"
            halves.setdefault(flat, {})[half] = place
    places = {}
    for name, parts in halves.items():
        parts = [parts[half] for half in HALVES if half in parts]
        first = places[name] = parts[0]
        if len(parts) > 1:
            regions = [region for part in parts for region in part.regions]
            places[name] = StoredTensor(
                torch.Size([len(parts) * first.shape[0], *first.shape[1:]]), first.dtype, regions
            )
    return places


def _cut(place: StoredTensor, target: Tensor, part: Part) -> Iterator[tuple[Region, Tensor]]:
    """The pieces of `target`, which holds this part, and where each is stored."""
    if target.ndim == 0:
        yield place.regions[0], target
        return
    each, row = place.shape[0] // len(place.regions), 0
    for block in part.blocks:
        for number, region in enumerate(place.regions):
            first = max(block.offsets[0], number * each)
            end = min(block.offsets[0] + block.sizes[0], (number + 1) * each)
            if first < end:
                inside = Block((first - number * each, *block.offsets[1:]), (end - first, *block.sizes[1:]))
                stored = _narrow(place, region, inside)
                start = row + first - block.offsets[0]
                yield stored, target[start : start + end - first].view(stored.sizes)
        row += block.sizes[0]


def _narrow(place: StoredTensor, region: Region, block: Block) -> Region:
    """A block of what is stored in `region`; of a flat one whole rows."""
    if place.is_flat:
        width = math.prod(place.shape[1:])
        return Region(region.key, (region.offsets[0] + block.offsets[0] * width,), (block.sizes[0] * width,))
    above = len(region.sizes) - len(place.shape)  # the dimension of layers
    offsets = tuple(start + more for start, more in zip(region.offsets[above:], block.offsets))
    return Region(region.key, (*region.offsets[:above], *offsets), (*region.sizes[:above], *block.sizes))


def writer(arguments: dict, parts: Mapping[str, Part] = MappingProxyType({})) -> Callable:
    """A write_tensors for checkpoint.write.Writer.

    Args:
        arguments: Flags by name, for common.pt.
        parts: By flat name, what a rank gives, where that is not all.
    """

    def write(folder: Path, record: CheckpointRecord, tensors: dict[str, Tensor], group) -> dict[str, dict]:
        """Each rank writes its tensors; the first one, which has all scalars, the values too. Collective."""

        def take(name: str) -> Tensor | None:
            return tensors[name].detach().cpu() if name in tensors else None

        is_first = group is None or torch.distributed.get_rank(group) == 0
        namespace, layers = build_namespace(record, arguments, "torch_dist"), record.shape["num_layers"]
        # what Megatron asks for besides tensors, each in a list: modules' empty states, and a rank's random states
        objects: dict[str, object] = {EMPTY_STATE: [None]} if is_first else {}
        if is_first and record.ranks:
            kinds = [name.removeprefix("random.0.") for name in tensors if name.startswith("random.0.")]
            objects["rng_state/shard_0.0_1.1"] = [write_rng_state([0], tensors.get, namespace.seed, kinds)]
        # the optimizer's scalars stand in common.pt
        stored = {name: tensor for name, tensor in tensors.items() if tensor.ndim > 0 or name.startswith("model.")}
        pieces = [piece for name, tensor in stored.items() for piece in _pieces(name, tensor, layers, parts.get(name))]
        entries = dcp.write(folder, pieces, objects, partial(_find_aliases, layers), group)
        if not is_first:
            return entries
        # a failure before would leave the others waiting
        values = write_values(record, namespace, take) | {"content_metadata": CONTENT}
        if record.optimizer is not None:
            step = max((tensor.item() for name, tensor in tensors.items() if name.endswith(".step")), default=None)
            fused = namespace.transformer_impl == "transformer_engine"
            settings, flags = group_settings(namespace, record), read_group_flags(namespace)
            values["optimizer"] = write_settings(step, take, settings, fused, flags)
        with open(folder / COMMON_FILE, "wb") as file:
            torch.save(values, file)
            file.flush()
            os.fsync(file.fileno())
        write_atomically(folder / BACKENDS_FILE, json.dumps(BACKENDS))
        return entries

    return write


def _find_aliases(layers: int, metadata: Metadata) -> dict[str, str]:
    """{further key: stored key}: every module's empty state, and masters as the distributed optimizer calls them.

    There a weight in fp32 is a master, too.
    """
    aliases = {
        f"decoder.layers.{module}._extra_state/shard_{layer}_{layers}": EMPTY_STATE
        for module in MODULES_OF_A_LAYER
        for layer in range(layers)
    }
    aliases["output_layer._extra_state/shard_0_1"] = EMPTY_STATE
    held = metadata.state_dict_metadata
    for key in list(held):
        state = STATE.match(key)
        if state and state[1] == "exp_avg":
            master = f"optimizer.state.{MASTERS[0]}.{state[2]}"
            aliases[f"optimizer.state.{MASTERS[1]}.{state[2]}"] = master if master in held else state[2]
    return aliases


def _pieces(name: str, tensor: Tensor, layers: int, part: Part | None) -> Iterator[Piece]:
    """A tensor of a flat name, or a part of one, in its place."""
    part = part or whole_part(tuple(tensor.shape))
    kind, _, weight = name.partition(".")
    state, layer, key = "", None, name
    if kind == "optimizer":
        weight, _, state = weight.rpartition(".")
    if not name.startswith(RANDOM):
        key, layer = megatron_names.stacked_name(weight)
    if kind == "optimizer":
        key = f"optimizer.state.{MASTERS[0] if state == 'master' else state}.{key}"
    start = 0
    for block in part.blocks:
        rows = tensor if tensor.ndim == 0 else tensor[start : start + block.sizes[0]]
        start += rows.shape[0] if tensor.ndim else 0
        if layer is None:
            region, whole = Region(key, block.offsets, block.sizes), part.whole
        else:
            region, whole = Region(key, (layer, *block.offsets), (1, *block.sizes)), (layers, *part.whole)
        if rows.numel():
            yield Piece(region, whole, rows)
