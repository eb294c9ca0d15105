"""Converts checkpoints and Hugging Face models, from folder to folder, in three ways."""

import dataclasses
import itertools
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megatron_lite.checkpoint.find import chosen, open_newest
from megatron_lite.checkpoint.training_state import CheckpointRecord, Stored
from megatron_lite.checkpoint.write import write_alone
from megatron_lite.config.shape import ModelShape
from megatron_lite.convert import further_tokens
from megatron_lite.convert.config_file import CONFIG_FILE, ConfigFile, read_json, write_json
from megatron_lite.convert.families import ModelFamily, family_of_config, family_of_shape
from megatron_lite.convert.mappings import Link
from megatron_lite.convert.tokenizer_files import TokenizerFiles
from megatron_lite.convert.weights_folder import INDEX_FILE, WEIGHTS_FILE, Weights, open_weights, write_safetensors
from megatron_lite.errors import CheckpointError, UserError
from megatron_lite.model.gpt import DTYPES, list_weights
from megatron_lite.run_folder import RELEASE, sync_folder

Sizes = dict[str, tuple[int, ...]]  # shapes of tensors by name
SHARD_BYTES = 5 * 10**9  # of a file, as transformers has it
GENERATION_FILE = "generation_config.json"
OURS = "megatron_lite"
LAYER = re.compile(r"decoder\.layers\.\d+\.")  # read at once


def cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor in another type.

    Args:
        name: Name of the tensor, for the message.
        tensor: The numbers.
        dtype: The type.

    Raises:
        UserError: It holds finite numbers that fp16 does not reach.
    """
    result = tensor.to(dtype)
    if dtype == torch.float16 and bool((result.isinf() & tensor.isfinite()).any()):
        raise UserError(f"--dtype fp16: {name} holds {tensor.abs().max():.3g}, beyond fp16's 65504; use bf16 or fp32.")
    return result


def to_hf_sizes(link: Link, sizes: Sizes) -> Sizes:
    """The shapes of a link's tensors of theirs.

    Args:
        link: Links a parameter of ours with them.
        sizes: Sizes of our parameters.
    """
    theirs = link.layout.to_hf(torch.empty(sizes[link.ours], device="meta"))
    return {name: tuple(tensor.shape) for name, tensor in zip(link.theirs, theirs)}


def require_same(
    expected: set[str], found: set[str], where: str, verbs: tuple[str, str], what: str, remedy: str
) -> None:
    """Check that two sets of names are the same.

    Args:
        expected: The names that must be there.
        found: Names that are there.
        where: The flag and its value, to begin a message with.
        verbs: Words for names that are not found, and for those beside them.
        what: Has the names, in the plural.
        remedy: Words that end a message.

    Raises:
        CheckpointError: They differ.
    """
    for difference, verb in ((expected - found, verbs[0]), (found - expected, verbs[1])):
        if difference:
            raise CheckpointError(f"{where}: {verb} {len(difference)} {what} such as {min(difference)}; {remedy}")


# --- A checkpoint's weights as a Hugging Face folder, layer by layer: memory holds one of them at a time


@dataclasses.dataclass(frozen=True)
class Export:
    """The writing of one checkpoint as a Hugging Face folder.

    With the precision of the run, the weights are those that it computes with; with another, they are made of the
    fp32 masters, where the checkpoint has them.
    """

    load: Path  # where the checkpoint is
    stored: Stored
    precision: str  # fp32 | fp16 | bf16
    tokenizer: TokenizerFiles
    # ids to keep; None: those that the checkpoint says it was trained with, else the tokenizer's, else all rows, with
    # their padding
    true_vocab_size: int | None = None
    say: Callable[[str], None] = print
    progress: Callable[[int, int], None] = lambda done, total: None  # called for each tensor of theirs
    shard_bytes: int = SHARD_BYTES

    def write(self, folder: Path) -> None:
        """Fill `folder`, which exists: weights, config.json, tokenizer. ConfigError for what has no twin there."""
        try:
            shape = self.stored.record.model_shape
        except TypeError as error:
            raise CheckpointError(
                f"--load {self.load}: its model cannot be read ({error}); it is of another version, "
                "convert it with that one."
            ) from None
        family = family_of_shape(shape)
        require_same(
            {f"model.{name}" for name in list_weights(shape)},
            {name for name in self.stored.names() if name.startswith("model.")},
            f"--load {self.load}",
            ("lacks", "holds, beside its model,"),
            "weights",
            "load one that was saved as a whole.",
        )
        vocab_size = self._vocab_size(shape)
        ids = self.tokenizer.ids
        config = family.build_config(shape, vocab_size)
        config |= ids
        config["torch_dtype"] = str(DTYPES[self.precision]).removeprefix("torch.")
        notes = [*family.notes(shape), self.tokenizer.note(str(config["model_type"]))]
        for note in filter(None, notes):
            self.say(f"  {note}")
        whole = family.complete(shape)
        self._write_weights(folder, list(family.links(whole, vocab_size)), list_weights(whole))
        write_json(folder / CONFIG_FILE, config)
        if ids["eos_token_id"] is not None:
            write_json(folder / GENERATION_FILE, ids)
        self.tokenizer.write(folder, shape.max_position_embeddings)

    def _vocab_size(self, shape: ModelShape) -> int:
        """The number of ids that are kept. UserError if they do not fit the model or the tokenizer."""
        rows = shape.padded_vocab_size
        tokenizer = self.tokenizer
        size = self.true_vocab_size or self.stored.record.vocab_size or tokenizer.vocab_size or rows
        if tokenizer.vocab_size > min(size, rows):
            raise UserError(
                f"{tokenizer.flag}: has {tokenizer.vocab_size} ids, and the model's vocabulary "
                f"{min(size, rows)}; give the files that it was trained with."
            )
        if size > rows:
            raise UserError(f"--true-vocab-size {size}: the model has {rows} rows only; give at most that.")
        if size < rows:
            self.say(f"  {rows - size} rows of padding are left out: the vocabulary has {size} ids")
        return size

    def _write_weights(self, folder: Path, links: list[Link], sizes: Sizes) -> None:
        """Write the weights, in one file or in several with an index.

        Args:
            folder: Folder that they go into.
            links: Links of our parameters with theirs, in their order.
            sizes: Sizes of our parameters.
        """
        dtype = DTYPES[self.precision]
        theirs: Sizes = {}
        others: dict[str, torch.dtype] = {}
        for link in links:
            theirs |= to_hf_sizes(link, sizes)
            if link.dtype is not None:
                others |= dict.fromkeys(link.theirs, link.dtype)
        num_bytes = {name: math.prod(size) * others.get(name, dtype).itemsize for name, size in theirs.items()}
        shards = self._divide(theirs, num_bytes)
        count = len(shards)
        files = [WEIGHTS_FILE]
        if count > 1:
            files = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        tensors = self._tensors(links, sizes, len(theirs))
        for file, shard in zip(files, shards):
            write_safetensors(folder / file, shard, dtype, itertools.islice(tensors, len(shard)), others)
        if count > 1:
            weight_map = {name: file for file, shard in zip(files, shards) for name in shard}
            total = sum(num_bytes.values())
            write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})

    def _divide(self, sizes: Sizes, num_bytes: dict[str, int]) -> list[Sizes]:
        """Divide tensors over files, each below shard_bytes unless a single tensor is larger.

        Args:
            sizes: Sizes of the tensors, in their order.
            num_bytes: Number of bytes of each of them.
        """
        shards: list[Sizes] = [{}]
        filled = 0  # bytes of the last one
        for name, size in sizes.items():
            if shards[-1] and filled + num_bytes[name] > self.shard_bytes:
                shards.append({})
                filled = 0
            shards[-1][name] = size
            filled += num_bytes[name]
        return shards

    def _tensors(self, links: list[Link], sizes: Sizes, total: int) -> Iterator[Tensor]:
        """Read the weights, layer by layer. What the checkpoint does not hold is zeros.

        Args:
            links: Links of our parameters with theirs, in their order.
            sizes: Sizes of our parameters.
            total: Tensors of theirs.

        Yields:
            Tensors of theirs, in the order of the links.
        """
        written = 0
        for _, group in itertools.groupby(links, key=_find_layer):
            layer = list(group)
            ours = self._read_layer(layer, sizes)
            for link in layer:
                for name, tensor in zip(link.theirs, link.layout.to_hf(ours.pop(link.ours))):
                    written += 1
                    self.progress(written, total)
                    yield cast(name, tensor, link.dtype or DTYPES[self.precision])

    def _read_layer(self, layer: list[Link], sizes: Sizes) -> dict[str, Tensor]:
        """Read our weights of one layer, in the precision from which theirs are made.

        Args:
            layer: Links of the layer's parameters.
            sizes: Sizes of our parameters.
        """
        record = self.stored.record
        held = self.stored.names()
        ours: dict[str, Tensor] = {}
        targets: dict[str, Tensor] = {}
        for link in layer:
            name = link.ours
            source = f"model.{name}"
            dtype = link.dtype or DTYPES[record.precision]
            master = f"optimizer.{name}.master"
            if self.precision != record.precision and master in held:
                source = master
                dtype = torch.float32
            ours[name] = torch.zeros(sizes[name], dtype=dtype)
            if source in held:
                targets[source] = ours[name]
        self.stored.read_into(targets)
        return ours


def _find_layer(link: Link) -> str:
    """Name the layer that a parameter is of; a parameter of none is one by itself."""
    match = LAYER.match(link.ours)
    return match[0] if match else link.ours


# --- A Hugging Face folder's weights as a checkpoint: weights only, which load as iteration 0


MAX_MATRIX_WIDTH = 2**26  # rows or columns of a matrix


def _require_possible(config: ConfigFile, shape: ModelShape, num_tensors: int) -> None:
    """Refuse a model that takes for ever to describe, before it is described.

    Args:
        config: The configuration that names it.
        shape: Sizes of the model.
        num_tensors: Number of tensors that the folder holds.

    Raises:
        CheckpointError: It has more layers than tensors, or a matrix that is too large.
    """
    if shape.num_layers > num_tensors:
        raise CheckpointError(
            f"--load-hf {config.path}: tells of {shape.num_layers} layers, and the folder holds {num_tensors} tensors; "
            "give the folder of a whole model."
        )
    widths = [shape.qkv_rows, shape.attention_width, shape.fc1_width, shape.padded_vocab_size]
    if shape.experts is not None:
        matrices = shape.experts.number * sum(shape.experts.layers)
        if matrices > num_tensors:
            raise CheckpointError(
                f"--load-hf {config.path}: tells of {matrices} experts, and the folder holds {num_tensors} tensors; "
                "give the folder of a whole model."
            )
        widths += [shape.experts.number * shape.experts.ffn_hidden_size, shape.experts.shared_ffn_hidden_size or 1]
    if shape.latent is not None:
        widths += [shape.latent.kv_lora_rank, shape.latent.q_lora_rank or 1, shape.latent.head_width]
    if not 0 < min(widths) <= max(widths) <= MAX_MATRIX_WIDTH:
        raise CheckpointError(
            f"--load-hf {config.path}: tells of a matrix with {max(widths)} rows; give the folder of a whole model."
        )


def import_hf(
    folder: Path, divisible_by: int, precision: str | None = None
) -> tuple[CheckpointRecord, dict[str, Tensor]]:
    """Read a Hugging Face folder.

    Args:
        folder: Path of the Hugging Face folder.
        divisible_by: The vocabulary is padded to a multiple of it.
        precision: fp32, fp16 or bf16; None: the files' own, fp32 if they have several.

    Returns:
        The record and the tensors of a checkpoint with its weights.

    Raises:
        CheckpointError: The folder is damaged or holds another kind of model.
    """
    config = ConfigFile(folder / CONFIG_FILE, read_json(folder / CONFIG_FILE))
    family = family_of_config(config)
    vocab_size = config.whole("vocab_size")
    padded_vocab_size = -(-vocab_size // divisible_by) * divisible_by
    shape = family.read_shape(config, padded_vocab_size)
    weights = open_weights(folder)
    shape = further_tokens.drop_absent(shape, weights.names)
    _require_possible(config, shape, len(weights.names))
    links = list(family.links(shape, vocab_size))
    file_names = _match_names(folder, family, links, weights)
    sizes = list_weights(shape)
    tensors: dict[str, Tensor] = {}
    for link in links:
        theirs = {name: weights.tensor(file_names[name]) for name in link.theirs}
        _require_sizes(folder, theirs, to_hf_sizes(link, sizes))
        tensors[f"model.{link.ours}"] = link.layout.from_hf(list(theirs.values()))
    others = {f"model.{link.ours}": link.dtype for link in links if link.dtype is not None}
    if precision is None:
        precision = _find_precision({tensor.dtype for name, tensor in tensors.items() if name not in others})
    for name, tensor in tensors.items():
        tensors[name] = cast(name, tensor, others.get(name, DTYPES[precision])).contiguous()
    record = CheckpointRecord(
        iteration=0, consumed=0, shape=dataclasses.asdict(shape), precision=precision, vocab_size=vocab_size
    )
    return record, tensors


def _find_precision(found: set[torch.dtype]) -> str:
    """The precision of weights of the types `found`: fp32, which loses nothing, of a mixture."""
    return next((name for name, dtype in DTYPES.items() if found == {dtype}), "fp32")


def _require_sizes(folder: Path, tensors: dict[str, Tensor], sizes: Sizes) -> None:
    """Check that tensors of a folder have the shapes that its config.json gives them.

    Args:
        folder: Path of the folder, for the message.
        tensors: Our tensors by name.
        sizes: Sizes of our tensors by name.

    Raises:
        CheckpointError: One has another shape.
    """
    for name, size in sizes.items():
        found = tuple(tensors[name].shape)
        if found != size:
            raise CheckpointError(
                f"--load-hf {folder}: {name} has the shape {list(found)}, and its "
                f"{CONFIG_FILE} makes it {list(size)}; copy or download the folder again."
            )


def _match_names(folder: Path, family: ModelFamily, links: list[Link], weights: Weights) -> dict[str, str]:
    """The names that tensors have in the files, by their standard names.

    Args:
        folder: Folder of the model.
        family: Knows the standard names.
        links: Tell which tensors there must be.
        weights: The opened files.

    Raises:
        CheckpointError: A tensor is missing, or there is one that the model does not have.
    """
    expected = {name for link in links for name in link.theirs}
    file_names: dict[str, str] = {}
    for name in weights.names:
        standard = family.standard_name(name)
        if standard is not None:
            file_names[standard] = name
    if "lm_head.weight" not in expected:
        file_names.pop("lm_head.weight", None)  # tied: a second name of the embeddings, in .bin files
    verbs = ("lacks", f"holds, beside what its {CONFIG_FILE} tells of,")
    require_same(
        expected, set(file_names), f"--load-hf {folder}", verbs, "tensors", "give the folder of a whole model."
    )
    return file_names


# --- from folder to folder


def to_hugging_face(export: Export, save_hf: Path) -> None:
    """Write a folder, which appears as a whole or not at all.

    Args:
        export: What goes into it.
        save_hf: Path of the new folder.

    Raises:
        UserError: It cannot be written.
    """
    folder = Path(os.path.abspath(save_hf))
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        export.write(unfinished)
        for path in unfinished.iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        sync_folder(unfinished)
        os.replace(unfinished, folder)
        sync_folder(folder.parent)
    except OSError as error:
        raise UserError(
            f"--save-hf {folder}: cannot be written ({error.strerror}); make room or choose another folder."
        ) from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def from_hugging_face(load_hf: Path, save: Path, divisible_by: int, precision: str | None) -> CheckpointRecord:
    """Write a Hugging Face folder's weights as SAVE/release.

    Args:
        load_hf: The folder.
        save: The folder of checkpoints, which must be new.
        divisible_by: The vocabulary is padded to a multiple of it.
        precision: fp32, fp16 or bf16; None: the files' own, fp32 if they have several.
    """
    require_new("--save", save)
    record, tensors = import_hf(load_hf, divisible_by, precision)
    write_alone(save, record, tensors, release=True)
    return record


def to_own_format(
    load: Path, step: int | None, save: Path, say: Callable[[str], None]
) -> tuple[CheckpointRecord, Path]:
    """Write a checkpoint in any format that can be read, Megatron-LM's too, in this trainer's own: all that it holds.

    Random states are those of a trainer's own generators: another trainer's are left out. A release stays one.

    Args:
        load: The folder of checkpoints.
        step: Iteration of the checkpoint; None: the newest.
        save: The folder of the new one, which must be new, too.
        say: Is told of what is passed over or left out.

    Returns:
        The new checkpoint's record and folder.
    """
    require_new("--save", save)
    stored = open_newest(load, step, say)
    record = stored.record
    names = stored.names()
    if record.trainer != OURS:
        record = replace(record, ranks=0, trainer=OURS)
        names = {name for name in names if not name.startswith("random.")}
    tensors = {name: torch.empty(stored.size_of(name), dtype=stored.dtype_of(name)) for name in sorted(names)}
    stored.read_into(tensors)
    newest = chosen(load, None) if step is None else None
    is_release = newest is not None and newest.name == RELEASE
    return record, write_alone(save, record, tensors, is_release, stored.arguments)


def require_new(flag: str, folder: Path) -> None:
    """Check that a folder is empty or does not exist.

    Args:
        flag: The flag that names the folder, for the message.
        folder: Path of the folder.

    Raises:
        UserError: It holds something.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{flag} {folder}: exists already, and nothing is overwritten; name a new folder.")
