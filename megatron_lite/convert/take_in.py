"""A Hugging Face folder's weights as a checkpoint: weights only, which load as iteration 0."""

import dataclasses
from pathlib import Path

import torch
from torch import Tensor

from megatron_lite.checkpoint.record import Record
from megatron_lite.convert.cast import DTYPES, cast
from megatron_lite.convert.config_file import CONFIG_FILE, read_config
from megatron_lite.convert.families import family_of_config
from megatron_lite.convert.links import Link
from megatron_lite.convert.parameters import parameter_sizes
from megatron_lite.convert.weights_folder import Weights, open_weights
from megatron_lite.errors import CheckpointError


def take_in(folder: Path, divisible_by: int, precision: str | None = None) -> tuple[Record, dict[str, Tensor]]:
    """The record and the tensors of a checkpoint with the weights of a Hugging Face `folder`.

    divisible_by: the vocabulary is padded to a multiple of it. precision: fp32, fp16 or bf16; None: the files' own,
    fp32 if they have several. CheckpointError for a folder that is damaged or holds another kind of model.
    """
    config = read_config(folder)
    family = family_of_config(config)
    vocab_size = config.whole("vocab_size")
    shape = family.shape_of(config, -(-vocab_size // divisible_by) * divisible_by)
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
        expected = link.layout.give(torch.empty(self._sizes[link.ours], device="meta"))
        theirs = [self._weights.tensor(self._files_name[name]) for name in link.theirs]
        for name, tensor, model in zip(link.theirs, theirs, expected):
            if tensor.shape != model.shape:
                raise CheckpointError(
                    f"--load-hf {self._folder}: {name} has the shape {list(tensor.shape)}, and its "
                    f"{CONFIG_FILE} makes it {list(model.shape)}; copy or download the folder again."
                )
        return link.layout.take(theirs)
