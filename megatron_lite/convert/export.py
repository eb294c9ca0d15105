"""A checkpoint's weights as a Hugging Face folder, layer by layer: memory holds one of them at a time."""

import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from megatron_lite.checkpoint.record import Stored
from megatron_lite.config.shape import ModelShape
from megatron_lite.convert.cast import DTYPES, cast
from megatron_lite.convert.config_file import CONFIG_FILE
from megatron_lite.convert.families import family_of_shape
from megatron_lite.convert.links import Link
from megatron_lite.convert.parameters import layer_prefix, parameter_sizes
from megatron_lite.convert.safetensors_file import SafetensorsWriter, tensor_bytes
from megatron_lite.convert.tokenizer_files import TokenizerFiles
from megatron_lite.convert.weights_folder import INDEX, WHOLE
from megatron_lite.errors import CheckpointError, UserError

SHARD_BYTES = 5 * 10**9  # of a file, as transformers has it
GENERATION_FILE = "generation_config.json"


@dataclasses.dataclass(frozen=True)
class Export:
    """How to write one checkpoint; `load` is where it is. `precision` is fp32, fp16 or bf16.

    With the precision of the run, the weights are those that it computes with; with another, they are made of the
    fp32 masters, where the checkpoint has them.
    true_vocab_size: ids to keep; None: those that the checkpoint says it was trained with, else the tokenizer's, else
    all rows, with their padding.
    """

    load: Path
    stored: Stored
    precision: str
    tokenizer: TokenizerFiles
    true_vocab_size: int | None = None
    say: Callable[[str], None] = print
    progress: Callable[[int, int], None] = lambda done, total: None  # tensors of theirs
    shard_bytes: int = SHARD_BYTES

    def write(self, folder: Path):
        """Fill `folder`, which exists: weights, config.json, tokenizer. ConfigError for what has no twin there."""
        shape = self._shape()
        family = family_of_shape(shape)
        self._require_whole(shape)
        vocab_size = self._vocab_size(shape)
        config = {
            **family.config_of(shape, vocab_size),
            **self.tokenizer.ids,
            "torch_dtype": _torch_name(self._dtype),
        }
        for note in filter(None, (*family.notes(shape), self.tokenizer.note(config["model_type"]))):
            self.say(f"  {note}")
        links = list(family.links(family.complete(shape), vocab_size))
        self._write_weights(folder, links, parameter_sizes(family.complete(shape)))
        _write_json(folder / CONFIG_FILE, config)
        if self.tokenizer.ids["eos_token_id"] is not None:
            _write_json(folder / GENERATION_FILE, self.tokenizer.ids)
        self.tokenizer.write(folder, shape.max_position_embeddings)

    def _shape(self) -> ModelShape:
        try:
            return ModelShape(**self.stored.record.shape)
        except TypeError as error:
            raise CheckpointError(
                f"--load {self.load}: its model cannot be read ({error}); it is of another version, "
                "convert it with that one."
            ) from None

    @property
    def _dtype(self) -> torch.dtype:
        return DTYPES[self.precision]

    def _vocab_size(self, shape: ModelShape) -> int:
        """Ids that are kept."""
        known = self.true_vocab_size or self.stored.record.vocab_size
        size = known or self.tokenizer.vocab_size or shape.padded_vocab_size
        if self.tokenizer.vocab_size > min(size, shape.padded_vocab_size):
            raise UserError(
                f"{self.tokenizer.flag}: has {self.tokenizer.vocab_size} ids, and the model's vocabulary "
                f"{min(size, shape.padded_vocab_size)}; give the files that it was trained with."
            )
        if size > shape.padded_vocab_size:
            raise UserError(
                f"--true-vocab-size {size}: the model has {shape.padded_vocab_size} rows only; give at most that."
            )
        if size < shape.padded_vocab_size:
            self.say(f"  {shape.padded_vocab_size - size} rows of padding are left out: the vocabulary has {size} ids")
        return size

    def _require_whole(self, shape: ModelShape):
        expected = {f"model.{name}" for name in parameter_sizes(shape)}
        found = {name for name in self.stored.names() if name.startswith("model.")}
        for difference, verb in ((expected - found, "lacks"), (found - expected, "holds, beside its model,")):
            if difference:
                raise CheckpointError(
                    f"--load {self.load}: {verb} {len(difference)} weights such as {min(difference)}; "
                    "load one that was saved as a whole."
                )

    def _write_weights(self, folder: Path, links: list[Link], sizes: dict[str, tuple[int, ...]]):
        theirs = {
            name: tuple(tensor.shape)
            for link in links
            for name, tensor in zip(link.theirs, link.layout.give(torch.empty(sizes[link.ours], device="meta")))
        }
        shards = split(theirs, self._dtype, self.shard_bytes)
        tensors, written = self._tensors(links, sizes), 0
        for file, names in shards.items():
            writer = SafetensorsWriter(folder / file, {name: theirs[name] for name in names}, self._dtype)
            for name, tensor in itertools.islice(tensors, len(names)):
                writer.add(name, tensor)
                written += 1
                self.progress(written, len(theirs))
            writer.close()
        if len(shards) > 1:
            total = sum(tensor_bytes(size, self._dtype) for size in theirs.values())
            files = {name: file for file, names in shards.items() for name in names}
            _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": files})

    def _tensors(self, links: list[Link], sizes: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, Tensor]]:
        """Theirs with their names, in the order of the links. What the checkpoint does not hold is zeros."""
        for _, layer in itertools.groupby(links, key=_layer_of):
            layer = list(layer)
            ours = self._read({link.ours: sizes[link.ours] for link in layer})
            for link in layer:
                for name, tensor in zip(link.theirs, link.layout.give(ours.pop(link.ours))):
                    yield name, cast(name, tensor, self._dtype)

    def _read(self, sizes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
        own = self.precision == self.stored.record.precision
        ours, targets, held = {}, {}, self.stored.names()
        for name, size in sizes.items():
            master = f"optimizer.{name}.master"
            exact = not own and master in held
            ours[name] = torch.zeros(size, dtype=torch.float32 if exact else DTYPES[self.stored.record.precision])
            source = master if exact else f"model.{name}"
            if source in held:
                targets[source] = ours[name]
        self.stored.read_into(targets)
        return ours


def split(sizes: dict[str, tuple[int, ...]], dtype: torch.dtype, limit: int) -> dict[str, list[str]]:
    """{file: its tensors}, in order, each file below `limit` bytes unless a single tensor is larger."""
    shards, filled = [[]], 0
    for name, size in sizes.items():
        more = tensor_bytes(size, dtype)
        if shards[-1] and filled + more > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += more
    if len(shards) == 1:
        return {WHOLE: shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": names for i, names in enumerate(shards, start=1)}


def _layer_of(link: Link) -> str:
    found = re.match(re.escape(layer_prefix(0)).replace("0", r"\d+"), link.ours)
    return found[0] if found else link.ours


def _torch_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _write_json(path: Path, values: dict):
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
