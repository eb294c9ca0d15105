"""Decides whether two runs train on the same samples and weights, and what one of them is to take from the other."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from megatron_lite.analysis.equality.fed_tensors import Source, find_misfit
from megatron_lite.analysis.equality.fused_parts import split_fused_parts
from megatron_lite.analysis.equality.placing import Places, place_parameters
from megatron_lite.analysis.equality.proved_run import Array, ProvedRun, list_indices, list_rows
from megatron_lite.analysis.equality.sliced_samples import name_sliced_samples
from megatron_lite.analysis.equality.wholes import assemble, assemble_all
from megatron_lite.formats.prove_record import TensorPart
from megatron_lite.formats.prove_report import Difference, ErrorKind

SHARDED_ROWS = ("fully_shard", "FullyShardedDataParallel")  # engines that cut weights, not what is computed
Sample = TypeVar("Sample", str, int)  # the hash of a row, or a loader's index
MIN_COMMON = 0.5  # of their parameters: ranks that have fewer in common are of two pipeline stages


@dataclass(frozen=True)
class Roles:
    """Groups of ranks that do the same."""

    # ranks of each pipeline stage, in order
    stages: list[list[int]]
    # ranks of the first stage in groups that take the same samples
    peers: list[list[int]]
    # whether ranks of one stage compute parts of a layer each
    is_cut: bool
    # whether ranks take parts of the same samples each, such as pieces of sequences
    is_context: bool = False
    # whether weights show that ranks split single layers, and not only shard weights or hold some of the experts
    splits_layers: bool = False

    @property
    def data_ranks(self) -> list[int]:
        """Ranks of the first stage whose samples together are the batch."""
        if self.is_cut or self.is_context:
            return [group[0] for group in self.peers]
        return [rank for group in self.peers for rank in group]

    def find_peers(self, rank: int) -> list[int]:
        """The ranks of the first stage that take the same samples as one of them."""
        return next((group for group in self.peers if rank in group), [rank])


def find_roles(run: ProvedRun, places: Places, reference: ProvedRun | None = None) -> Roles:
    """Find out what ranks do alike.

    Args:
        run: The records of the ranks.
        places: What their parameters are of the reference.
        reference: The records of the reference, if there is one.
    """
    stages = _find_stages(places, run)
    first = stages[0]
    rows = {rank: _list_all_rows(run, rank) for rank in run.ranks}
    if reference is not None and len(stages) > 1:
        known = {row for rank in reference.ranks for row in _list_all_rows(reference, rank)}
        first = next((stage for stage in stages if known.intersection(rows[stage[0]])), first)
    by_rows = _group(first, rows)
    by_index = _group(first, {rank: _list_all_indices(run, rank) for rank in first})
    has_whole_dataset = all(_list_all_indices(run, rank) for rank in first)
    if reference is not None:
        has_whole_dataset &= _count_samples(run) == _count_samples(reference)
    is_context = has_whole_dataset and len(by_index) < len(by_rows)
    return Roles(
        stages=stages,
        peers=by_index if is_context and not run.has_slices else by_rows,
        is_cut=_is_cut(run, places),
        is_context=is_context or run.has_slices,
        splits_layers=_splits_layers(run, places),
    )


def _list_all_rows(run: ProvedRun, rank: int) -> tuple[str, ...]:
    return tuple(row for step in range(run.steps) for row in list_rows(run.ranks[rank], step))


def _list_all_indices(run: ProvedRun, rank: int) -> tuple[int, ...]:
    return tuple(index for step in range(run.steps) for index in list_indices(run.ranks[rank], step))


def _count_samples(run: ProvedRun) -> list[int]:
    """Samples of each loader's dataset."""
    first = next(iter(run.ranks.values()))
    return [loader.samples for loader in first.record.loaders]


def _group(ranks: Sequence[int], keys: Mapping[int, Sequence[object]]) -> list[list[int]]:
    """Group ranks that have the same key; ranks without any have nothing in common with others."""
    groups: dict[object, list[int]] = {}
    for rank in ranks:
        groups.setdefault(tuple(keys[rank]) or rank, []).append(rank)
    return list(groups.values())


def _find_stages(places: Places, run: ProvedRun) -> list[list[int]]:
    """Group ranks that have most parameters in common."""
    names: dict[int, set[str]] = {rank: set() for rank in run.ranks}
    for (rank, _), place in places.found.items():
        names[rank].add(place.name)
    stages: list[list[int]] = []
    for rank in sorted(names):
        for stage in stages:
            if _are_one_stage(names[rank], names[stage[0]], places.order):
                stage.append(rank)
                break
        else:
            stages.append([rank])
    return stages


def _are_one_stage(one: set[str], other: set[str], order: Mapping[str, int]) -> bool:
    """Whether two ranks compute the same layers: most of their parameters are the same, or all that they share lies
    around what only one of them has, as around the experts of each."""
    both = one & other
    if len(both) >= MIN_COMMON * min(len(one), len(other)):
        return True
    numbers = {order.get(name, 0) for name in both}
    own = {order.get(name, 0) for name in one ^ other}
    return bool(numbers) and min(numbers) < min(own) and max(own) < max(numbers)


def _is_cut(run: ProvedRun, places: Places) -> bool:
    """Whether ranks compute parts of layers; ranks that only shard the weights do not."""
    outputs = (part for rank in run.ranks.values() for output in rank.record.outputs for part in output.parts)
    if any(_is_part(part) for part in outputs):
        return True
    if any(word in engine for engine in run.engines for word in SHARDED_ROWS):
        return any(_find_cut_dims(place.whole, place.shape) - {0} for place in places.found.values())
    cuts = [_find_cut_dims(place.whole, place.shape) for place in places.found.values()]
    is_row_sharded = all(cut == {0} for cut in cuts) and _are_placed(run)
    return any(cuts) and not is_row_sharded


def _splits_layers(run: ProvedRun, places: Places) -> bool:
    """Whether a weight is cut in another dimension than that of rows, or of experts; where ranks shard weights, too,
    whether one is cut in two dimensions."""
    cuts = [_find_cut_dims(place.whole, place.shape) for place in places.found.values()]
    if any(word in engine for engine in run.engines for word in SHARDED_ROWS):
        return any(len(cut) > 1 for cut in cuts)
    return any(cut - {0} for cut in cuts)


def _are_placed(run: ProvedRun) -> bool:
    return all(part.is_placed for rank in run.ranks.values() for part in rank.record.weights)


def _is_part(part: TensorPart) -> bool:
    return part.is_partial or (part.is_placed and any(part.starts))


def _find_cut_dims(whole: Sequence[int], shape: Sequence[int]) -> set[int]:
    """Dimensions in which a block is smaller than the whole."""
    return {dim for dim, (room, length) in enumerate(zip(whole, shape)) if room != length}


@dataclass(frozen=True)
class FeedDecision:
    """The samples and weights that a reference is to take from a run, so that both train on the same."""

    # whether it takes the same samples by itself
    has_same_data: bool
    # whole weights by the reference's names; {}: it starts from the same by itself
    weights: dict[str, Array] = field(default_factory=dict)
    # as Feed.indices; []: none are fed
    indices: list[list[list[int]]] = field(default_factory=list)
    # by micro-batch of the reference, over all steps: whose tensors it takes, one behind the other in the first
    # dimension; []: none are fed
    tensors: list[list[Source]] = field(default_factory=list)
    # why it cannot take the same, in a sentence; "": it can
    reason: str = ""
    # a parameter of another shape, for which there is a reason
    other_shape: Difference | None = None


def decide_feed(run: ProvedRun, reference: ProvedRun) -> FeedDecision:
    """Decide what a reference takes from a run.

    Args:
        run: The records of what is proved.
        reference: The records of the reference by itself, with nothing fed.
    """
    if not run.ranks or not reference.ranks:
        return FeedDecision(False, reason="one of both recorded nothing")
    run = name_sliced_samples(run, reference)
    start, aliases = read_start(reference)
    run = split_fused_parts(run, start, aliases)
    places = place_parameters(run, start, aliases)
    weights, reason = _decide_weights(run, start, places)
    if reason:
        return FeedDecision(False, reason=reason, other_shape=find_other_shape(run, start))
    roles = find_roles(run, places, reference)
    own = find_roles(reference, place_parameters(reference, start, aliases))
    if has_same_rows(run, roles, reference, own):
        return FeedDecision(True, weights)
    if len(own.data_ranks) > 1:
        return FeedDecision(False, weights, reason="the reference's ranks take other samples, and are several")
    chunks = _Chunks.count(run, roles, reference, own.data_ranks[0])
    if isinstance(chunks, str):
        return FeedDecision(False, weights, reason=chunks)
    indices = _feed_indices(run, reference, chunks)
    if indices:
        return FeedDecision(False, weights, indices=indices)
    sources = chunks.list_sources()
    reason = find_misfit(run, reference, sources)
    if reason:
        return FeedDecision(False, weights, reason=reason)
    return FeedDecision(False, weights, tensors=sources)


def read_start(reference: ProvedRun) -> tuple[dict[str, Array], dict[str, str]]:
    """Read a reference's whole weights at the start by name, and its other names of them."""
    aliases = {}
    for rank in reference.ranks.values():
        aliases.update(rank.record.aliases)
    wholes = assemble_all(reference, lambda rank: rank.record.weights, aliases)
    return {name: whole.array for name, whole in wholes.items()}, aliases


def _decide_weights(run: ProvedRun, start: dict[str, Array], places: Places) -> tuple[dict[str, Array], str]:
    """Choose the weights to feed, and say why they cannot be."""
    groups = places.group()
    lacking = [name for name in start if name not in groups]
    if places.are_same and not lacking:
        return {}, ""
    if lacking:
        return {}, f"no rank has a parameter that is {lacking[0]} of the reference"
    weights = {}
    for name, parts in groups.items():
        given = []
        for rank, own_name, place in parts:
            part = find_part(run.ranks[rank].record.weights, own_name)
            array = None if part is None else run.ranks[rank].read(part)
            if array is not None:
                placed = TensorPart(name=name, key="", whole=place.whole, starts=place.starts, is_placed=True)
                given.append((placed, array))
        whole = assemble(given)
        if whole is None:
            return {}, f"the ranks' parts of {name} do not make up the reference's"
        weights[name] = whole.array
    return weights, ""


def find_other_shape(run: ProvedRun, start: Mapping[str, Array]) -> Difference | None:
    """Find a parameter of which the ranks together have another shape than the reference, by what its parts tell.

    Args:
        run: The records of what is proved.
        start: The reference's whole weights by name.
    """
    for name, array in start.items():
        for _, rank in sorted(run.ranks.items()):
            part = find_part(rank.record.weights, name)
            if part is None or not part.is_placed or tuple(part.whole) == array.shape:
                continue
            return Difference(
                kind=ErrorKind.UNKNOWN,
                where=name,
                step=1,
                evidence=f"{_write_shape(part.whole)} on the ranks, {_write_shape(array.shape)} in the reference: "
                "these are two models",
                remedy="give both commands the same sizes, such as a vocabulary that is padded alike",
            )
    return None


def _write_shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def find_part(parts: Iterable[TensorPart], name: str) -> TensorPart | None:
    """Find the part of a name."""
    return next((part for part in parts if part.name == name), None)


def has_same_rows(run: ProvedRun, roles: Roles, reference: ProvedRun, own: Roles, steps: int | None = None) -> bool:
    """Whether both runs take the same samples in every step: the same ones, each as often as the others.

    Args:
        run: The records of what is proved.
        roles: The roles of its ranks.
        reference: The records of the reference.
        own: The roles of the reference's ranks.
        steps: How many steps to look at; all that both have where left out.
    """
    common = min(run.steps, reference.steps)
    return common > 0 and all(
        _is_same_batch(run, roles, reference, own, step) for step in range(common if steps is None else steps)
    )


def _is_same_batch(run: ProvedRun, roles: Roles, reference: ProvedRun, own: Roles, step: int) -> bool:
    mine = Counter(row for rank in roles.data_ranks for row in list_rows(run.ranks[rank], step))
    other = Counter(row for rank in own.data_ranks for row in list_rows(reference.ranks[rank], step))
    if mine and other and _are_proportional(mine, other):
        return True
    if mine.keys() & other.keys() or not roles.is_context:
        return False
    indices = Counter(index for rank in roles.data_ranks for index in list_indices(run.ranks[rank], step))
    theirs = Counter(index for rank in own.data_ranks for index in list_indices(reference.ranks[rank], step))
    return bool(indices and theirs) and _are_proportional(indices, theirs)


def _are_proportional(one: Counter[Sample], other: Counter[Sample]) -> bool:
    """Whether both count the same things in the same proportions."""
    if one.keys() != other.keys():
        return False
    first = sum(one.values())
    second = sum(other.values())
    return all(number * second == other[key] * first for key, number in one.items())


@dataclass(frozen=True)
class _Chunks:
    """How the micro-batches of several ranks become those of one."""

    # ranks whose samples are the batch
    ranks: list[int]
    # micro-batches of each of them, over all steps
    micro_batches: int
    # of them that make a micro-batch of the reference
    together: int

    @staticmethod
    def count(run: ProvedRun, roles: Roles, reference: ProvedRun, other: int) -> "_Chunks | str":
        """Count, or say why the reference's micro-batches cannot be made of the ranks'."""
        ranks = roles.data_ranks
        steps = min(run.steps, reference.steps)
        if not steps:
            return "a run ended before its first step"
        mine = {len(run.ranks[rank].record.steps[step].micro_batches) for rank in ranks for step in range(steps)}
        theirs = {len(reference.ranks[other].record.steps[step].micro_batches) for step in range(steps)}
        if len(mine) != 1 or len(theirs) != 1:
            return "steps have different numbers of micro-batches"
        each = mine.pop()
        needed = theirs.pop()
        if not needed or not each or len(ranks) * each % needed:
            return (
                f"{len(ranks)} ranks with {each} micro-batches a step cannot be laid out as {needed} of the reference"
            )
        return _Chunks(ranks, each * steps, len(ranks) * each // needed)

    def list_sources(self, micro_batches: int | None = None) -> list[list[Source]]:
        """List what each micro-batch of the reference is made of: the first of every rank, then the second."""
        numbers = range(self.micro_batches if micro_batches is None else micro_batches)
        sources = [Source(rank, number) for number in numbers for rank in self.ranks]
        return [list(group) for group in _cut(sources, self.together)]


def _cut(sources: list[Source], length: int) -> Iterator[list[Source]]:
    for begin in range(0, len(sources) - length + 1, length):
        yield sources[begin : begin + length]


def _feed_indices(run: ProvedRun, reference: ProvedRun, chunks: _Chunks) -> list[list[list[int]]]:
    """The indices that the reference's loaders are to draw; [] where loaders do not tell."""
    loaders = {rank: run.ranks[rank].record.loaders for rank in chunks.ranks}
    theirs = next(iter(reference.ranks.values())).record.loaders
    if not theirs or any(len(own) != len(theirs) for own in loaders.values()):
        return []
    fed = []
    for number, loader in enumerate(theirs):
        own = {rank: loaders[rank][number] for rank in chunks.ranks}
        if any(one.samples != loader.samples or not one.batches for one in own.values()):
            return []
        fewest = min(len(one.batches) for one in own.values())
        sources = chunks.list_sources(fewest)
        fed.append(
            [[index for source in group for index in own[source.rank].batches[source.micro_batch]] for group in sources]
        )
    return fed
