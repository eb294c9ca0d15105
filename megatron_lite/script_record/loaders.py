"""Sees which samples data loaders draw, and lets them draw others."""

import operator
from collections.abc import Iterator
from typing import Any, SupportsIndex

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from torch.utils.data import dataloader as loader_module

from megatron_lite.formats.prove_record import LoaderRecord
from megatron_lite.instruments.replacing import get_function, put_in_place


class WatchedLoader:
    """A loader's iterations in this process.

    Args:
        loader: The loader.
        batches: Indices of batches that it is to draw; [] or used up: its own.
    """

    def __init__(self, loader: "DataLoader[object]", batches: list[list[int]]) -> None:
        self._loader = loader
        self._wanted = iter(batches)
        self._asked: list[list[int]] = []
        self.arrived = 0  # batches that the script has got

    def choose(self, own: object) -> object:
        """Choose the indices of the next batch that the loader fetches.

        Args:
            own: What its sampler gave.
        """
        wanted = next(self._wanted, None)
        chosen: object = own if wanted is None else wanted
        is_batch = isinstance(own, (list, tuple))
        if wanted is not None and not is_batch:
            chosen = wanted[0]
        self._asked.append(_list_indices(chosen))
        return chosen

    def get_current(self) -> tuple[int, ...]:
        """Return the indices of the batch that the script got last."""
        if not 0 < self.arrived <= len(self._asked):
            return ()
        return tuple(self._asked[self.arrived - 1])

    def describe(self) -> LoaderRecord:
        """Describe what was drawn."""
        sampler = getattr(self._loader, "sampler", None)
        # a sampler of this class has a random generator of its own, so that looking changes nothing
        epoch = [int(index) for index in sampler] if type(sampler) is DistributedSampler else []
        dataset = self._loader.dataset
        samples = len(dataset) if hasattr(dataset, "__len__") else 0
        return LoaderRecord(
            samples=samples, batches=self._asked[: self.arrived], sampler=type(sampler).__name__, epoch=epoch
        )


def _list_indices(chosen: Any) -> list[int]:
    """List the indices of a batch, or of the one sample that a sampler without batches gives."""
    indices: list[SupportsIndex] = list(chosen) if isinstance(chosen, (list, tuple)) else [chosen]
    return [operator.index(index) for index in indices]


class Loaders:
    """The loaders of a process, in the order of first use.

    Args:
        batches: By loader and batch, the indices that they are to draw; []: their own.
    """

    def __init__(self, batches: list[list[list[int]]]) -> None:
        self._batches = batches
        self._watched: list[WatchedLoader] = []
        self._by_loader: dict[int, WatchedLoader] = {}
        self._last: WatchedLoader | None = None

    def attach(self) -> None:
        """Start, for the rest of the process."""
        base = loader_module._BaseDataLoaderIter
        make = get_function(base, "__init__")
        take_index = get_function(base, "_next_index")
        take_batch = get_function(base, "__next__")

        def make_iterator(iterator: Any, loader: "DataLoader[object]", *arguments: object, **named: object) -> None:
            iterator.watched = self._find(loader)
            make(iterator, loader, *arguments, **named)

        def next_index(iterator: Any) -> object:
            own = take_index(iterator)
            watched = iterator.watched
            return own if watched is None else watched.choose(own)

        def next_batch(iterator: Any) -> object:
            batch = take_batch(iterator)
            if iterator.watched is not None:
                iterator.watched.arrived += 1
                self._last = iterator.watched
            return batch

        put_in_place(base, "__init__", make_iterator)
        put_in_place(base, "_next_index", next_index)
        put_in_place(base, "__next__", next_batch)

    def _find(self, loader: "DataLoader[object]") -> WatchedLoader | None:
        """Find what is known of a loader; None of one whose dataset has no indices."""
        if isinstance(loader.dataset, IterableDataset):
            return None
        if id(loader) not in self._by_loader:
            number = len(self._watched)
            batches = self._batches[number] if number < len(self._batches) else []
            watched = WatchedLoader(loader, batches)
            self._watched.append(watched)
            self._by_loader[id(loader)] = watched
        return self._by_loader[id(loader)]

    def get_current(self) -> tuple[int, ...]:
        """Return the indices of the batch that the script got last; () without one."""
        return self._last.get_current() if self._last is not None else ()

    def describe(self) -> Iterator[LoaderRecord]:
        """Describe what each loader drew."""
        for watched in self._watched:
            yield watched.describe()
