"""A user's own loader in place of data sets: --external-dataloader FILE.py:FUNCTION or MODULE:FUNCTION.

    def batches(split, *, consumed, micro_batch_size, seq_length, rank, num_ranks, seed):
        '''Micro-batches of this rank, from the first sample on that has not been used.'''

split: "train", "valid" or "test". consumed: samples that all ranks together have used of it, a multiple of
micro_batch_size x num_ranks; 0 at the start, more when a run resumes, which gets what an uninterrupted one would.
It returns an iterable of int [micro_batch_size, seq_length + 1] tensors or arrays (inputs and labels overlap), or None,
or an empty one, for a split that it does not have. "valid" and "test" are asked for once before training begins, to see
whether they are there, and "valid" again at its place when a run resumes.
"""

import logging
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from megatron_lite.config.plan import Plan
from megatron_lite.errors import DataError
from megatron_lite.units import count
from megatron_lite.user_functions import find_function

logger = logging.getLogger(__name__)
FLAG = "--external-dataloader"
Function = Callable[..., object]  # the user's; what it returns is looked at
INTEGERS = (torch.uint8, torch.uint16, torch.uint32, torch.int8, torch.int16, torch.int32, torch.int64)


class ExternalStreams:
    """Streams of the user's function; those of an evaluation begin at once, to see whether there are any.

    UserError if there is no such function, DataError if a batch is not as described.
    """

    def __init__(self, plan: Plan):
        t = plan.args.training
        self._spelled = plan.args.data.external_dataloader or ""
        self._request = {
            "seq_length": plan.shape.seq_length,
            "rank": plan.layout.data_rank,
            "num_ranks": plan.layout.data,
            "seed": t.seed,
        }
        self._micro_batches = {
            "train": t.micro_batch_size,
            "valid": plan.evaluation_micro_batch,
            "test": plan.evaluation_micro_batch,
        }
        self._vocab_size = plan.vocab_size
        self._pin = plan.device == "cuda"
        by_name = ("consumed", "micro_batch_size", *self._request)
        self._function: Function = find_function(FLAG, self._spelled, ("split",), by_name)
        evaluated = ("valid", "test") if plan.args.watch.eval_iters else ()
        self._begun = {split: self._begin(split, 0) for split in evaluated}
        for split in evaluated:
            logger.info(f"  {split} data: {self._spelled if self.has(split) else 'none'}")

    def has(self, split: str) -> bool:
        """Whether the function has a split that evaluations use, "valid" or "test"."""
        return self._begun.get(split) is not None

    def stream(self, split: str, consumed: int, wanted: int) -> Iterator[Tensor] | None:
        """Micro-batches of a split: raw_BT1, int64, one after the other.

        Args:
            split: "train", "valid" or "test".
            consumed: Samples that all ranks together have used of it.
            wanted: Samples that will be; the function is not told.

        Returns:
            None if there is nothing at all.

        Raises:
            DataError: There is nothing, for training or for a place that an earlier run had come to.
        """
        begun = self._begun.get(split)
        if begun is not None and consumed == 0:
            return begun
        return self._begin(split, consumed)

    def _begin(self, split: str, consumed: int) -> Iterator[Tensor] | None:
        """Ask the function for a split. Arguments and results are those of `stream`."""
        size = self._micro_batches[split]
        answer = self._function(split, consumed=consumed, micro_batch_size=size, **self._request)
        if answer is None:
            answer = ()
        if not isinstance(answer, Iterable):
            raise self._wrong(split, f"gave a {type(answer).__name__}; return an iterable of micro-batches, or None")
        batches: Iterator[object] = iter(answer)
        first = next(batches, None)
        if first is not None:
            return self._go_on(split, self._check(split, first, is_first=True), batches)
        if split == "train" or consumed:
            what = f"gave nothing from sample {count(consumed)} on; yield more, or train or evaluate less"
            raise self._wrong(split, what)
        return None

    def _go_on(self, split: str, first: Tensor, others: Iterator[object]) -> Iterator[Tensor]:
        """The first micro-batch and the others. DataError where they end: they are asked for while more are wanted."""
        yield first
        number = 1
        for batch in others:
            number += 1
            yield self._check(split, batch)
        what = f"ended after {count(number)} micro-batches and more are wanted; yield more, or train or evaluate less"
        raise self._wrong(split, what)

    def _check(self, split: str, batch: object, is_first: bool = False) -> Tensor:
        """A micro-batch of the user's as one of this trainer's.

        Args:
            split: The split that the batch is for.
            batch: What the function gave.
            is_first: Whether ids on a GPU are looked at, too, for which the host waits.

        Returns:
            int64 [micro-batch size, seq_length + 1], a copy.

        Raises:
            DataError: It is something else.
        """
        raw_BT1 = batch
        if isinstance(batch, np.ndarray) and batch.dtype.kind in "iu":
            raw_BT1 = torch.from_numpy(batch.astype(np.int64))
        if not isinstance(raw_BT1, Tensor) or raw_BT1.dtype not in INTEGERS:
            kind = type(batch).__name__
            dtype: object = getattr(batch, "dtype", None)
            if dtype is not None:
                kind = f"{kind} of {dtype}"
            raise self._wrong(split, f"yields a {kind}; yield tensors or arrays of integers")
        wanted = (self._micro_batches[split], self._request["seq_length"] + 1)
        if tuple(raw_BT1.shape) != wanted:
            what = f"the shape {list(raw_BT1.shape)}; yield [micro-batch size, seq-length + 1] = {list(wanted)}"
            raise self._wrong(split, f"yields {what}")
        # A copy: the loader may fill the same buffer again, for another split even, while a first batch still waits.
        own_BT1 = raw_BT1.to(torch.int64, copy=True)
        if is_first or not own_BT1.is_cuda:  # asking the GPU would make the host wait for it
            for extreme in (int(own_BT1.min()), int(own_BT1.max())):
                if not 0 <= extreme < self._vocab_size:
                    what = f"the id {extreme}, outside the vocabulary of {count(self._vocab_size)}"
                    raise self._wrong(split, f"yields {what}; give the tokenizer that made its ids")
        if self._pin and not own_BT1.is_cuda:
            return own_BT1.pin_memory()
        return own_BT1

    def _wrong(self, split: str, what: str) -> DataError:
        return DataError(f"{FLAG} {self._spelled}: for {split} it {what}")
