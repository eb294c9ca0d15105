"""Says whether ranks take samples twice, or never."""

import itertools
from collections import Counter
from collections.abc import Iterator

from megatron_lite.analysis.equality.check_gradients import describe_ranks
from megatron_lite.analysis.equality.proved_run import ProvedRun, list_indices, list_rows
from megatron_lite.analysis.equality.same_data import Roles
from megatron_lite.formats.prove_record import LoaderRecord
from megatron_lite.formats.prove_report import Difference, ErrorKind
from megatron_lite.units import counted

SAMPLER_REMEDY = "give the loader a DistributedSampler with the number of data-parallel ranks and this rank's number"
# samplers that draw a sample several times on purpose
REPEATING = ("WeightedRandomSampler",)


def check_data(run: ProvedRun, roles: Roles, probe: ProvedRun | None) -> list[Difference]:
    """Name errors of who takes which samples.

    Args:
        run: The records of what is proved.
        roles: What its ranks do alike.
        probe: The records of the reference by itself, with nothing fed, if it ran.
    """
    found = [*_check_split_layers(run, roles), *_check_same_batches(run, roles)]
    if not found:
        found += _check_batch(run, roles, probe)
    if not found:
        found += _check_epochs(run, roles, probe)
    return found


def _check_split_layers(run: ProvedRun, roles: Roles) -> Iterator[Difference]:
    """Find ranks that take samples of their own although each of them computes a part of the layers."""
    if not roles.is_cut or not run.steps or not roles.splits_layers:
        return
    ranks = list(itertools.chain.from_iterable(roles.peers))
    for peers in roles.peers:
        if len(peers) != 1:
            return
        if not list_rows(run.ranks[peers[0]], 0):
            return
    if len(ranks) > 1:
        has_loader = bool(list_indices(run.ranks[ranks[0]], 0))
        yield Difference(
            kind=ErrorKind.RANDOM_MUST_AGREE,
            where="DataLoader" if has_loader else "",
            step=1,
            evidence=f"{describe_ranks(ranks)} split layers, and each of them takes other samples",
            remedy="give ranks that split layers the same samples: one seed, or one number for their sampler",
        )


def _check_same_batches(run: ProvedRun, roles: Roles) -> Iterator[Difference]:
    """Find ranks that take the same samples although each of them computes the whole model."""
    if roles.is_cut or roles.is_context or not run.steps:
        return
    same = []
    for peers in roles.peers:
        if len(peers) > 1 and list_rows(run.ranks[peers[0]], 0):
            same.append(peers)
    if not same:
        return
    ranks = max(same, key=len)
    first = run.ranks[ranks[0]]
    taken = len(set(list_rows(first, 0)))
    has_loader = bool(list_indices(first, 0))
    yield Difference(
        kind=ErrorKind.DATA_TWICE,
        where="DataLoader" if has_loader else "",
        step=1,
        evidence=f"{describe_ranks(ranks)} take the same {counted(taken, 'sample')}, and each computes the whole model",
        remedy=SAMPLER_REMEDY,
        confidence="high",
    )


def _check_batch(run: ProvedRun, roles: Roles, probe: ProvedRun | None) -> Iterator[Difference]:
    """Find samples that two ranks take in one step, and those of the reference's batch that none takes."""
    ranks = set(itertools.chain.from_iterable(roles.peers))
    if not run.steps or len(ranks) < 2:
        return
    taken = [list_rows(run.ranks[peers[0]], 0) for peers in roles.peers]
    mine = Counter(itertools.chain.from_iterable(taken))
    times: Counter[str] = Counter()
    for rows in taken:
        times.update(set(rows))
    shared = [row for row, count in times.items() if count > 1]
    theirs = _count_rows(probe)
    lacking = []
    repeated = []
    if theirs and mine.keys() <= theirs.keys():
        lacking = [row for row in theirs if row not in mine]
        # a row that the reference's batch has several times may be on several ranks
        repeated = [row for row in shared if mine[row] > theirs[row] > 0]
    indices = _find_shared_indices(run, roles)
    if repeated or (shared and indices):
        number = len(repeated) or len(indices)
        evidence = f"{counted(number, 'sample')} of the first batch of {sum(mine.values())} on two ranks"
        yield _describe_repeated(evidence, len(lacking), bool(indices))
    elif len(lacking) >= max(len(roles.peers), 1):
        yield Difference(
            kind=ErrorKind.DATA_NEVER,
            where="",
            step=1,
            evidence=f"{len(lacking)} of {sum(theirs.values())} samples of the reference's first batch are on no rank",
            remedy="look at which slice of the batch each rank takes: together they must be all of it",
            confidence="medium",
        )


def _count_rows(probe: ProvedRun | None) -> Counter[str]:
    """Count how often the reference's first step takes each row."""
    if probe is None or not probe.steps:
        return Counter()
    first = probe.ranks[min(probe.ranks)]
    return Counter(list_rows(first, 0))


def _describe_repeated(evidence: str, lacking: int, has_indices: bool) -> Difference:
    """Report samples that two ranks take in one step, and how many of the reference's are lacking for them."""
    if lacking:
        evidence += f", and {lacking} of the reference's on none"
    is_certain = bool(lacking) or has_indices
    return Difference(
        kind=ErrorKind.DATA_TWICE,
        where="DataLoader" if has_indices else "",
        step=1,
        evidence=evidence,
        remedy=SAMPLER_REMEDY if has_indices else "look at which slice of the batch each rank takes",
        confidence="high" if is_certain else "medium",
    )


def _find_shared_indices(run: ProvedRun, roles: Roles) -> set[int]:
    """Loaders' indices that ranks with different batches both take in the first step; rows must be the same, too."""
    taken: dict[int, set[str]] = {}
    shared = set()
    for peers in roles.peers:
        rank = run.ranks[peers[0]]
        if any(loader.sampler in REPEATING for loader in rank.record.loaders):
            return set()
        rows = list_rows(rank, 0)
        indices = list_indices(rank, 0)
        if len(rows) != len(indices):
            return set()
        own: dict[int, str] = dict(zip(indices, rows))
        for index, row in own.items():
            before = taken.setdefault(index, set())
            if row in before:
                shared.add(index)
            before.add(row)
    return shared


def _check_epochs(run: ProvedRun, roles: Roles, probe: ProvedRun | None) -> Iterator[Difference]:
    """Find samples of the dataset that an epoch takes on no rank, or on several."""
    ranks = [run.ranks[peers[0]] for peers in roles.peers]
    counts = [len(rank.record.loaders) for rank in ranks]
    for number in range(min(counts, default=0)):
        loaders = [rank.record.loaders[number] for rank in ranks]
        expected = _find_expected(loaders, number, probe)
        yield from _check_epoch(loaders, number, expected)
        yield from _check_pieces(loaders, number, roles, probe)


def _find_expected(loaders: list[LoaderRecord], number: int, probe: ProvedRun | None) -> set[int]:
    """Samples that an epoch should take: those of the reference's, or the whole dataset."""
    if probe is not None and probe.ranks:
        loader = _get_loader(probe, number)
        if loader is not None and loader.epoch and loader.samples == loaders[0].samples:
            return set(loader.epoch)
    return set(range(loaders[0].samples))


def _get_loader(probe: ProvedRun, number: int) -> LoaderRecord | None:
    """A loader of the reference's first rank; None where it has fewer."""
    first = probe.ranks[min(probe.ranks)]
    loaders = first.record.loaders
    return loaders[number] if number < len(loaders) else None


def _name_loader(number: int) -> str:
    return f"DataLoader {number}" if number else "DataLoader"


def _check_epoch(loaders: list[LoaderRecord], number: int, expected: set[int]) -> Iterator[Difference]:
    sizes = {loader.samples for loader in loaders}
    if len(sizes) != 1 or not all(loader.epoch for loader in loaders):
        return
    taken = Counter(index for loader in loaders for index in loader.epoch)
    room = len(loaders) - 1
    never = len(expected - taken.keys())
    twice = sum(taken.values()) - len(taken)
    where = _name_loader(number)
    if never > room:
        evidence = f"an epoch takes {never} of {len(expected)} samples on no rank"
        if twice > room:
            evidence += f", and {twice} more than once"
        yield Difference(
            kind=ErrorKind.DATA_NEVER,
            where=where,
            step=1,
            evidence=evidence,
            remedy=SAMPLER_REMEDY,
        )
    elif twice > room:
        yield Difference(
            kind=ErrorKind.DATA_TWICE,
            where=where,
            step=1,
            evidence=f"an epoch takes {twice} of {len(expected)} samples more than once, with padding for {room}",
            remedy=SAMPLER_REMEDY,
        )


def _check_pieces(
    loaders: list[LoaderRecord], number: int, roles: Roles, probe: ProvedRun | None
) -> Iterator[Difference]:
    """Find out whether datasets that ranks have a piece of each are together the reference's."""
    if probe is None or not probe.ranks or roles.is_cut or len(loaders) < 2:
        return
    theirs = _get_loader(probe, number)
    if theirs is None:
        return
    whole = theirs.samples
    total = sum(loader.samples for loader in loaders)
    are_pieces = all(0 < loader.samples < whole for loader in loaders)
    if are_pieces and total <= whole - len(loaders):
        yield Difference(
            kind=ErrorKind.DATA_NEVER,
            where=_name_loader(number),
            step=1,
            evidence=f"the ranks' datasets have {total} samples together, the reference's has {whole}",
            remedy="look at which piece of the dataset each rank takes",
            confidence="medium",
        )
