"""Decides whether two runs train on the same samples and weights, and what one of them is to take from the other."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from megatron_lite.analysis.equality.fed_tensors import Source, find_misfit
from megatron_lite.analysis.equality.fused_parts import split_fused_parts
from megatron_lite.analysis.equality.placing import Place, Places, place_parameters
from megatron_lite.analysis.equality.proved_run import Array, ProvedRun, list_indices, list_rows
from megatron_lite.analysis.equality.sliced_samples import name_sliced_samples
from megatron_lite.analysis.equality.wholes import assemble, assemble_all, find_cut_dims
from megatron_lite.formats.prove_record import TensorPart
from megatron_lite.formats.prove_report import Difference, ErrorKind

SHARDED_ROWS = ("fully_shard", "FullyShardedDataParallel")  # engines that cut weights, not what is computed
ROWS = frozenset({0})  # the dimensions in which weights are cut that only are sharded
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
        for group in self.peers:
            if rank in group:
                return group
        return [rank]


def find_roles(run: ProvedRun, places: Places, reference: ProvedRun | None = None) -> Roles:
    """Find out what ranks do alike.

    Args:
        run: The records of the ranks.
        places: What their parameters are of the reference.
        reference: The records of the reference, if there is one.
    """
    stages = _find_stages(places, run)
    rows = {rank: _list_all_rows(run, rank) for rank in run.ranks}
    first = stages[0]
    if reference is not None and len(stages) > 1:
        first = _find_first_stage(stages, rows, reference)
    indices = {rank: _list_all_indices(run, rank) for rank in first}
    by_rows = _group(first, rows)
    by_index = _group(first, indices)
    has_whole_dataset = all(indices.values())
    if reference is not None:
        has_whole_dataset &= _count_samples(run) == _count_samples(reference)
    # ranks that draw the same samples, and yet have other rows, each have a part of them
    is_context = has_whole_dataset and len(by_index) < len(by_rows)
    # rows of slices are named by their samples, so that they say more than indices
    peers = by_rows
    if is_context and not run.has_slices:
        peers = by_index
    return Roles(
        stages=stages,
        peers=peers,
        is_cut=_is_cut(run, places),
        is_context=is_context or run.has_slices,
        splits_layers=_splits_layers(run, places),
    )


def _find_first_stage(stages: list[list[int]], rows: Mapping[int, Sequence[str]], reference: ProvedRun) -> list[int]:
    """Find the stage whose ranks take samples of the reference; the first one where none does."""
    known: set[str] = set()
    for rank in reference.ranks:
        known.update(_list_all_rows(reference, rank))
    for stage in stages:
        if known.intersection(rows[stage[0]]):
            return stage
    return stages[0]


def _list_all_rows(run: ProvedRun, rank: int) -> tuple[str, ...]:
    rows: list[str] = []
    for step in range(run.steps):
        rows.extend(list_rows(run.ranks[rank], step))
    return tuple(rows)


def _list_all_indices(run: ProvedRun, rank: int) -> tuple[int, ...]:
    indices: list[int] = []
    for step in range(run.steps):
        indices.extend(list_indices(run.ranks[rank], step))
    return tuple(indices)


def _count_samples(run: ProvedRun) -> list[int]:
    """Samples of each loader's dataset."""
    first = next(iter(run.ranks.values()))
    return [loader.samples for loader in first.record.loaders]


def _group(ranks: Sequence[int], keys: Mapping[int, Sequence[object]]) -> list[list[int]]:
    """Group ranks that have the same key; ranks without any have nothing in common with others."""
    groups: dict[object, list[int]] = {}
    for rank in ranks:
        key = tuple(keys[rank]) or rank
        group = groups.setdefault(key, [])
        group.append(rank)
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
    fewest = min(len(one), len(other))
    if len(both) >= MIN_COMMON * fewest:
        return True
    if not both:
        return False
    shared = [order.get(name, 0) for name in both]
    own = [order.get(name, 0) for name in one ^ other]
    return min(shared) < min(own) and max(own) < max(shared)


def _is_cut(run: ProvedRun, places: Places) -> bool:
    """Whether ranks compute parts of layers; ranks that only shard the weights do not."""
    if _has_cut_outputs(run):
        return True
    cuts = _list_cuts(places)
    if _shards_rows(run):
        return any(cut - ROWS for cut in cuts)
    is_row_sharded = all(cut == ROWS for cut in cuts) and _are_placed(run)
    return any(cuts) and not is_row_sharded


def _has_cut_outputs(run: ProvedRun) -> bool:
    """Whether a module of any rank returns a part of a tensor."""
    for rank in run.ranks.values():
        for output in rank.record.outputs:
            if any(_is_part(part) for part in output.parts):
                return True
    return False


def _splits_layers(run: ProvedRun, places: Places) -> bool:
    """Whether a weight is cut in another dimension than that of rows, or of experts; where ranks shard weights, too,
    whether one is cut in two dimensions."""
    cuts = _list_cuts(places)
    if _shards_rows(run):
        return any(len(cut) > 1 for cut in cuts)
    return any(cut - ROWS for cut in cuts)


def _shards_rows(run: ProvedRun) -> bool:
    """Whether an engine of the ranks shards weights, whatever they compute."""
    for engine in run.engines:
        if any(word in engine for word in SHARDED_ROWS):
            return True
    return False


def _are_placed(run: ProvedRun) -> bool:
    for rank in run.ranks.values():
        if not all(part.is_placed for part in rank.record.weights):
            return False
    return True


def _list_cuts(places: Places) -> list[set[int]]:
    """The dimensions in which each parameter of a rank is cut."""
    return [find_cut_dims(place.whole, place.shape) for place in places.found.values()]


def _is_part(part: TensorPart) -> bool:
    return part.is_partial or (part.is_placed and any(part.starts))


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
    own_places = place_parameters(reference, start, aliases)
    own = find_roles(reference, own_places)
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
    aliases: dict[str, str] = {}
    for rank in reference.ranks.values():
        aliases.update(rank.record.aliases)
    wholes = assemble_all(reference, lambda rank: rank.record.weights, aliases)
    start = {name: whole.array for name, whole in wholes.items()}
    return start, aliases


def _decide_weights(run: ProvedRun, start: dict[str, Array], places: Places) -> tuple[dict[str, Array], str]:
    """Choose the weights to feed, and say why they cannot be."""
    groups = places.group()
    for name in start:
        if name not in groups:
            return {}, f"no rank has a parameter that is {name} of the reference"
    if places.are_same:
        return {}, ""
    weights = {}
    for name, parts in groups.items():
        placed = _read_placed(run, parts)
        whole = assemble(placed)
        if whole is None:
            return {}, f"the ranks' parts of {name} do not make up the reference's"
        weights[name] = whole.array
    return weights, ""


def _read_placed(run: ProvedRun, parts: Iterable[tuple[int, str, Place]]) -> list[tuple[TensorPart, Array]]:
    """Read the ranks' weights at the start that are parts of one parameter, with their places in it."""
    placed = []
    for number, own_name, place in parts:
        rank = run.ranks[number]
        part = find_part(rank.record.weights, own_name)
        if part is None:
            continue
        array = rank.read(part)
        if array is None:
            continue
        block = TensorPart(
            name=place.name,
            key="",
            whole=place.whole,
            starts=place.starts,
            is_placed=True,
        )
        placed.append((block, array))
    return placed


def find_other_shape(run: ProvedRun, start: Mapping[str, Array]) -> Difference | None:
    """Find a parameter of which the ranks together have another shape than the reference, by what its parts tell.

    Args:
        run: The records of what is proved.
        start: The reference's whole weights by name.
    """
    for name, array in start.items():
        for _, rank in sorted(run.ranks.items()):
            part = find_part(rank.record.weights, name)
            if part is None or not part.is_placed:
                continue
            if tuple(part.whole) != array.shape:
                return _describe_other_shape(name, part.whole, array.shape)
    return None


def _describe_other_shape(name: str, proved: Sequence[int], reference: Sequence[int]) -> Difference:
    mine = _write_shape(proved)
    theirs = _write_shape(reference)
    return Difference(
        kind=ErrorKind.UNKNOWN,
        where=name,
        step=1,
        evidence=f"{mine} on the ranks, {theirs} in the reference: these are two models",
        remedy="give both commands the same sizes, such as a vocabulary that is padded alike",
    )


def _write_shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def find_part(parts: Iterable[TensorPart], name: str) -> TensorPart | None:
    """Find the part of a name."""
    for part in parts:
        if part.name == name:
            return part
    return None


def has_same_rows(
    run: ProvedRun,
    roles: Roles,
    reference: ProvedRun,
    own: Roles,
    steps: int | None = None,
) -> bool:
    """Whether both runs take the same samples in every step: the same ones, each as often as the others.

    Args:
        run: The records of what is proved.
        roles: The roles of its ranks.
        reference: The records of the reference.
        own: The roles of the reference's ranks.
        steps: How many steps to look at; all that both have where left out.
    """
    common = min(run.steps, reference.steps)
    if common == 0:
        return False
    if steps is None:
        steps = common
    return all(_is_same_batch(run, roles, reference, own, step) for step in range(steps))


def _is_same_batch(
    run: ProvedRun,
    roles: Roles,
    reference: ProvedRun,
    own: Roles,
    step: int,
) -> bool:
    mine = _count_rows(run, roles.data_ranks, step)
    other = _count_rows(reference, own.data_ranks, step)
    if mine and other and _are_proportional(mine, other):
        return True
    if not roles.is_context:
        return False
    # rows of pieces are those of no sample of the reference; where some are, indices do not make up for the others
    if mine.keys() & other.keys():
        return False
    indices = _count_indices(run, roles.data_ranks, step)
    theirs = _count_indices(reference, own.data_ranks, step)
    if not indices or not theirs:
        return False
    return _are_proportional(indices, theirs)


def _count_rows(run: ProvedRun, ranks: Iterable[int], step: int) -> Counter[str]:
    """Count how often ranks take each row in a step."""
    counts: Counter[str] = Counter()
    for rank in ranks:
        counts.update(list_rows(run.ranks[rank], step))
    return counts


def _count_indices(run: ProvedRun, ranks: Iterable[int], step: int) -> Counter[int]:
    """Count how often loaders of ranks draw each index in a step."""
    counts: Counter[int] = Counter()
    for rank in ranks:
        counts.update(list_indices(run.ranks[rank], step))
    return counts


def _are_proportional(one: Counter[Sample], other: Counter[Sample]) -> bool:
    """Whether both count the same things in the same proportions."""
    if one.keys() != other.keys():
        return False
    first = sum(one.values())
    second = sum(other.values())
    for key, number in one.items():
        # as fractions of each total, without a division that rounds
        if number * second != other[key] * first:
            return False
    return True


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
        mine = _count_micro_batches(run, ranks, steps)
        theirs = _count_micro_batches(reference, [other], steps)
        if len(mine) != 1 or len(theirs) != 1:
            return "steps have different numbers of micro-batches"
        each = mine.pop()
        needed = theirs.pop()
        total = len(ranks) * each
        if not needed or not each or total % needed:
            return (
                f"{len(ranks)} ranks with {each} micro-batches a step cannot be laid out as {needed} of the reference"
            )
        return _Chunks(
            ranks=ranks,
            micro_batches=each * steps,
            together=total // needed,
        )

    def list_sources(self, micro_batches: int | None = None) -> list[list[Source]]:
        """List what each micro-batch of the reference is made of: the first of every rank, then the second."""
        if micro_batches is None:
            micro_batches = self.micro_batches
        sources = []
        for number in range(micro_batches):
            for rank in self.ranks:
                sources.append(Source(rank, number))
        return list(_cut(sources, self.together))


def _count_micro_batches(run: ProvedRun, ranks: Iterable[int], steps: int) -> set[int]:
    """The numbers of micro-batches that steps of ranks have."""
    counts = set()
    for rank in ranks:
        for step in run.ranks[rank].record.steps[:steps]:
            counts.add(len(step.micro_batches))
    return counts


def _cut(sources: list[Source], length: int) -> Iterator[list[Source]]:
    for begin in range(0, len(sources) - length + 1, length):
        yield sources[begin : begin + length]


def _feed_indices(run: ProvedRun, reference: ProvedRun, chunks: _Chunks) -> list[list[list[int]]]:
    """The indices that the reference's loaders are to draw; [] where loaders do not tell."""
    loaders = {rank: run.ranks[rank].record.loaders for rank in chunks.ranks}
    theirs = next(iter(reference.ranks.values())).record.loaders
    for own in loaders.values():
        if len(own) != len(theirs):
            return []
    fed = []
    for number, loader in enumerate(theirs):
        batches = {}
        for rank, own in loaders.items():
            if own[number].samples != loader.samples:
                return []
            batches[rank] = own[number].batches
        fewest = min(map(len, batches.values()))
        if not fewest:
            return []
        groups = chunks.list_sources(fewest)
        fed.append([_join_batches(batches, group) for group in groups])
    return fed


def _join_batches(batches: Mapping[int, Sequence[Sequence[int]]], sources: Iterable[Source]) -> list[int]:
    """Lay the indices of ranks' batches one behind the other."""
    indices: list[int] = []
    for source in sources:
        indices.extend(batches[source.rank][source.micro_batch])
    return indices
