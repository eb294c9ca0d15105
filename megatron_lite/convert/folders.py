"""The three conversions, from folder to folder."""

import contextlib
import dataclasses
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megatron_lite.checkpoint.find import chosen, open_newest
from megatron_lite.checkpoint.training_state import Record, Stored
from megatron_lite.checkpoint.write import write_alone
from megatron_lite.config.shape import ModelShape
from megatron_lite.convert.config_file import CONFIG_FILE, read_config
from megatron_lite.convert.families import family_of_config, family_of_shape
from megatron_lite.convert.mappings import Link, layer_prefix, parameter_sizes
from megatron_lite.convert.tokenizer_files import TokenizerFiles
from megatron_lite.convert.weights_folder import INDEX, WHOLE, Weights, count_bytes, open_weights, write_safetensors
from megatron_lite.errors import CheckpointError, UserError
from megatron_lite.run_folder import RELEASE, sync_folder

# --- the precisions of weights

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor` in `dtype`. UserError if it holds finite numbers that fp16 does not reach."""
    result = tensor.to(dtype)
    if dtype == torch.float16 and bool((result.isinf() & tensor.isfinite()).any()):
        raise UserError(f"--dtype fp16: {name} holds {tensor.abs().max():.3g}, beyond fp16's 65504; use bf16 or fp32.")
    return result


# --- A checkpoint's weights as a Hugging Face folder, layer by layer: memory holds one of them at a time

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
            **family.build_config(shape, vocab_size),
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
            for name, tensor in zip(link.theirs, link.layout.to_hf(torch.empty(sizes[link.ours], device="meta")))
        }
        shards = split(theirs, self._dtype, self.shard_bytes)
        tensors = self._tensors(links, sizes, len(theirs))
        for file, names in shards.items():
            shard = {name: theirs[name] for name in names}
            write_safetensors(folder / file, shard, self._dtype, itertools.islice(tensors, len(names)))
        if len(shards) > 1:
            total = sum(count_bytes(size, self._dtype) for size in theirs.values())
            files = {name: file for file, names in shards.items() for name in names}
            _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": files})

    def _tensors(self, links: list[Link], sizes: dict[str, tuple[int, ...]], total: int) -> Iterator[Tensor]:
        """Theirs, in the order of the links. What the checkpoint does not hold is zeros."""
        written = 0
        for _, layer in itertools.groupby(links, key=_layer_of):
            layer = list(layer)
            ours = self._read({link.ours: sizes[link.ours] for link in layer})
            for link in layer:
                for name, tensor in zip(link.theirs, link.layout.to_hf(ours.pop(link.ours))):
                    written += 1
                    self.progress(written, total)
                    yield cast(name, tensor, self._dtype)

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
        more = count_bytes(size, dtype)
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


# --- A Hugging Face folder's weights as a checkpoint: weights only, which load as iteration 0


def import_hf(folder: Path, divisible_by: int, precision: str | None = None) -> tuple[Record, dict[str, Tensor]]:
    """The record and the tensors of a checkpoint with the weights of a Hugging Face `folder`.

    divisible_by: the vocabulary is padded to a multiple of it. precision: fp32, fp16 or bf16; None: the files' own,
    fp32 if they have several. CheckpointError for a folder that is damaged or holds another kind of model.
    """
    config = read_config(folder)
    family = family_of_config(config)
    vocab_size = config.whole("vocab_size")
    shape = family.read_shape(config, -(-vocab_size // divisible_by) * divisible_by)
    links = list(family.links(shape, vocab_size))
    source = _Source(folder, open_weights(folder), family, links, parameter_sizes(shape))
    tensors = {f"model.{link.ours}": source.ours(link) for link in links}
    own = precision or _precision(tensors)
    for name, tensor in tensors.items():
        tensors[name] = cast(name, tensor, DTYPES[own]).contiguous()
    record = Record(iteration=0, consumed=0, shape=dataclasses.asdict(shape), precision=own, vocab_size=vocab_size)
    return record, tensors


def _precision(tensors: dict[str, Tensor]) -> str:
    """fp16 or bf16 if all tensors have it, else fp32, which loses nothing of any mixture."""
    dtypes = {tensor.dtype for tensor in tensors.values()}
    return next((name for name, dtype in DTYPES.items() if dtypes == {dtype}), "fp32")


class _Source:
    """The folder's tensors under their standard names, checked to be those of the links, no more and no less."""

    def __init__(self, folder: Path, weights: Weights, family, links: list[Link], sizes: dict[str, tuple[int, ...]]):
        self._folder, self._weights, self._sizes = folder, weights, sizes
        self._files_name = {family.standard_name(name): name for name in weights.names()}
        self._files_name.pop(None, None)
        expected = {name for link in links for name in link.theirs}
        if "lm_head.weight" not in expected:
            self._files_name.pop("lm_head.weight", None)  # tied: a second name of the embeddings, in .bin files
        for difference, verb in (
            (expected - set(self._files_name), "lacks"),
            (set(self._files_name) - expected, f"holds, beside what its {CONFIG_FILE} tells of,"),
        ):
            if difference:
                raise CheckpointError(
                    f"--load-hf {folder}: {verb} {len(difference)} tensors such as {min(difference)}; "
                    "give the folder of a whole model."
                )

    def ours(self, link: Link) -> Tensor:
        expected = link.layout.to_hf(torch.empty(self._sizes[link.ours], device="meta"))
        theirs = [self._weights.tensor(self._files_name[name]) for name in link.theirs]
        for name, tensor, model in zip(link.theirs, theirs, expected):
            if tensor.shape != model.shape:
                raise CheckpointError(
                    f"--load-hf {self._folder}: {name} has the shape {list(tensor.shape)}, and its "
                    f"{CONFIG_FILE} makes it {list(model.shape)}; copy or download the folder again."
                )
        return link.layout.from_hf(theirs)


OURS = "megatron_lite"


def to_hugging_face(
    load: Path,
    step: int | None,
    save_hf: Path,
    precision: str | None,
    tokenizer: TokenizerFiles,
    true_vocab_size: int | None,
    say: Callable[[str], None],
    progress: Callable[[int, int], None],
) -> Record:
    """The newest checkpoint of `load`, or that of iteration `step`, as the Hugging Face folder `save_hf`.

    progress(done, total) is called for each tensor.
    """
    require_new("--save-hf", save_hf)
    stored = open_newest(load, step, say)
    with new_folder("--save-hf", Path(os.path.abspath(save_hf))) as unfinished:
        export = Export(load, stored, precision or stored.record.precision, tokenizer, true_vocab_size, say, progress)
        export.write(unfinished)
    return stored.record


def from_hugging_face(load_hf: Path, save: Path, divisible_by: int, precision: str | None) -> Record:
    """The Hugging Face folder `load_hf` as SAVE/release."""
    require_new("--save", save)
    record, tensors = import_hf(load_hf, divisible_by, precision)
    write_alone(save, record, tensors, release=True)
    return record


def to_own_format(load: Path, step: int | None, save: Path, say: Callable[[str], None]) -> tuple[Record, Path]:
    """A checkpoint in any format that can be read, Megatron-LM's too, in this trainer's own: all that it holds.

    Random states are those of a trainer's own generators: another trainer's are left out. A release stays one. Returns
    the new checkpoint's folder, too.
    """
    require_new("--save", save)
    stored = open_newest(load, step, say)
    record, names = stored.record, stored.names()
    if record.trainer != OURS:
        record = replace(record, ranks=0, trainer=OURS)
        names = {name for name in names if not name.startswith("random.")}
    tensors = {name: torch.empty(stored.size_of(name), dtype=stored.dtype_of(name)) for name in sorted(names)}
    stored.read_into(tensors)
    is_release = step is None and chosen(load, step).name == RELEASE
    return record, write_alone(save, record, tensors, is_release, stored.arguments)


def require_new(flag: str, folder: Path):
    """UserError unless `folder` is empty or does not exist."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{flag} {folder}: exists already, and nothing is overwritten; name a new folder.")


@contextlib.contextmanager
def new_folder(flag: str, folder: Path) -> Iterator[Path]:
    """A hidden folder beside `folder` that takes its name when the block ends well, and goes when it fails."""
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        yield unfinished
        for path in unfinished.iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        sync_folder(unfinished)
        os.replace(unfinished, folder)
        sync_folder(folder.parent)
    except OSError as error:
        raise UserError(
            f"{flag} {folder}: cannot be written ({error.strerror}); make room or choose another folder."
        ) from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
