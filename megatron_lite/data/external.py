"""A user's own loader in place of data sets: --external-dataloader FILE.py:FUNCTION or MODULE:FUNCTION.

    def batches(split, *, consumed, micro_batch_size, seq_length, rank, num_ranks, seed):
        '''Micro-batches of this rank, from the first sample on that has not been used.'''

split: "train", "valid" or "test". consumed: samples that all ranks together have used of it, a multiple of
micro_batch_size x num_ranks; 0 at the start, more when a run resumes, which gets what an uninterrupted one would.
It returns an iterable of int [micro_batch_size, seq_length + 1] tensors or arrays (inputs and labels overlap), or None,
or an empty one, for a split that it does not have. "valid" and "test" are asked for once before training begins, to see
whether they are there, and "valid" again at its place when a run resumes.
"""

import hashlib
import importlib
import importlib.util
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from megatron_lite.config.plan import Plan
from megatron_lite.errors import DataError
from megatron_lite.units import count

logger = logging.getLogger(__name__)
FLAG = "--external-dataloader"
KEYWORDS = ("consumed", "micro_batch_size", "seq_length", "rank", "num_ranks", "seed")
INTEGERS = (torch.uint8, torch.uint16, torch.uint32, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class Request:
    """What every stream of a run has in common."""

    micro_batch_size: int
    seq_length: int
    rank: int
    num_ranks: int
    seed: int


class ExternalLoader:
    """The user's function, found and asked. DataError if there is no such function or a batch is not as described."""

    def __init__(self, spelled: str, request: Request, vocab_size: int, pin: bool):
        self._spelled, self._request, self._vocab_size, self._pin = spelled, request, vocab_size, pin
        self._function = _find(spelled)

    def stream(self, split: str, consumed: int) -> Iterator[Tensor] | None:
        """raw_BT1, int64, one micro-batch after the other from sample `consumed` on.

        None if there is nothing at all; but DataError for training, and for a place that an earlier run had come to.
        """
        answer = self._function(split, consumed=consumed, **vars(self._request))
        if not (answer is None or isinstance(answer, Iterable)):
            raise self._wrong(split, f"gave a {type(answer).__name__}; return an iterable of micro-batches, or None")
        batches = iter(()) if answer is None else iter(answer)
        first = next(batches, None)
        if first is not None:
            return self._going_on(split, self._tensor(split, first, is_first=True), batches)
        if split == "train" or consumed:
            raise self._wrong(
                split, f"gave nothing from sample {count(consumed)} on; yield more, or train or evaluate less"
            )
        return None

    def _going_on(self, split: str, first: Tensor, others: Iterator) -> Iterator[Tensor]:
        yield first
        number = 1
        for number, batch in enumerate(others, start=2):
            yield self._tensor(split, batch)
        raise self._wrong(
            split,
            f"ended after {count(number)} micro-batches and more are wanted; yield more, or train or evaluate less",
        )

    def _tensor(self, split: str, batch, is_first: bool = False) -> Tensor:
        whole_numbers = isinstance(batch, np.ndarray) and batch.dtype.kind in "iu"
        raw_BT1 = torch.from_numpy(batch.astype(np.int64)) if whole_numbers else batch
        if not isinstance(raw_BT1, Tensor) or raw_BT1.dtype not in INTEGERS:
            kind = f"{type(batch).__name__} of {batch.dtype}" if hasattr(batch, "dtype") else type(batch).__name__
            raise self._wrong(split, f"yields a {kind}; yield tensors or arrays of integers")
        wanted = (self._request.micro_batch_size, self._request.seq_length + 1)
        if tuple(raw_BT1.shape) != wanted:
            raise self._wrong(
                split,
                f"yields the shape {list(raw_BT1.shape)}; yield [micro-batch size, seq-length + 1] = {list(wanted)}",
            )
        # A copy: the loader may fill the same buffer again, for another split even, while a first batch still waits.
        raw_BT1 = raw_BT1.to(torch.int64, copy=True)
        if is_first or not raw_BT1.is_cuda:  # asking the GPU would make the host wait for it
            self._check_ids(split, raw_BT1)
        return raw_BT1.pin_memory() if self._pin and not raw_BT1.is_cuda else raw_BT1

    def _check_ids(self, split: str, raw_BT1: Tensor):
        for extreme in (int(raw_BT1.min()), int(raw_BT1.max())):
            if not 0 <= extreme < self._vocab_size:
                raise self._wrong(
                    split,
                    f"yields the id {extreme}, outside the vocabulary of "
                    f"{count(self._vocab_size)}; give the tokenizer that made its ids",
                )

    def _wrong(self, split: str, what: str) -> DataError:
        return DataError(f"{FLAG} {self._spelled}: for {split} it {what}")


def _find(spelled: str) -> Callable:
    place, colon, name = spelled.rpartition(":")
    if not (place and colon and name):
        raise DataError(f"{FLAG} {spelled}: names no function; give FILE.py:FUNCTION or MODULE:FUNCTION")
    module = _file(spelled, place) if place.endswith(".py") else _module(spelled, place)
    function = getattr(module, name, None)
    if not callable(function):
        raise DataError(f"{FLAG} {spelled}: {place} has no function {name}; check its name")
    try:
        inspect.signature(function).bind("train", **dict.fromkeys(KEYWORDS))
    except (TypeError, ValueError) as error:  # the second: a function in C that does not tell what it takes
        raise DataError(
            f"{FLAG} {spelled}: cannot be called ({error}); let it take split, and by name {', '.join(KEYWORDS)}"
        ) from None
    return function


def _file(spelled: str, path: str) -> ModuleType:
    if not os.path.isfile(path):
        raise DataError(f"{FLAG} {spelled}: there is no file {path}; check the path")
    # A name of its own, which worker processes of the user's loader can look up too.
    name = f"external_dataloader_{hashlib.sha256(os.path.abspath(path).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _module(spelled: str, name: str) -> ModuleType:
    if name.startswith("."):
        raise DataError(
            f"{FLAG} {spelled}: {name} is relative to no package; give the module's whole name, or FILE.py:FUNCTION"
        )
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise DataError(
            f"{FLAG} {spelled}: there is no module {error.name}; give FILE.py:FUNCTION, or set PYTHONPATH"
        ) from None


class ExternalStreams:
    """Streams of --external-dataloader; those of an evaluation begin at once, to see whether there are any."""

    def __init__(self, plan: Plan):
        t, d = plan.args.training, plan.args.data
        request = Request(t.micro_batch_size, plan.shape.seq_length, plan.world.rank, plan.world.size, t.seed)
        self._loader = ExternalLoader(d.external_dataloader, request, plan.vocab_size, pin=plan.device == "cuda")
        evaluated = ("valid", "test") if plan.args.watch.eval_iters else ()
        self._begun = {split: self._loader.stream(split, 0) for split in evaluated}
        for split in evaluated:
            logger.info(f"  {split} data: {d.external_dataloader if self.has(split) else 'none'}")

    def has(self, split: str) -> bool:
        return self._begun.get(split) is not None

    def stream(self, split: str, consumed: int, wanted: int) -> Iterator[Tensor]:
        begun = self._begun.get(split)
        return begun if begun is not None and consumed == 0 else self._loader.stream(split, consumed)
