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
    ranks = [rank for peers in roles.peers for rank in peers]
    takes_own = all(len(peers) == 1 and list_rows(run.ranks[peers[0]], 0) for peers in roles.peers)
    if len(ranks) > 1 and takes_own:
        yield Difference(
            kind=ErrorKind.RANDOM_MUST_AGREE,
            where="DataLoader" if list_indices(run.ranks[ranks[0]], 0) else "",
            step=1,
            evidence=f"{describe_ranks(ranks)} split layers, and each of them takes other samples",
            remedy="give ranks that split layers the same samples: one seed, or one number for their sampler",
        )


def _check_same_batches(run: ProvedRun, roles: Roles) -> Iterator[Difference]:
    """Find ranks that take the same samples although each of them computes the whole model."""
    if roles.is_cut or roles.is_context or not run.steps:
        return
    same = [peers for peers in roles.peers if len(peers) > 1 and list_rows(run.ranks[peers[0]], 0)]
    if not same:
        return
    ranks = max(same, key=len)
    taken = len(set(list_rows(run.ranks[ranks[0]], 0)))
    has_loader = bool(list_indices(run.ranks[ranks[0]], 0))
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
    if not run.steps or len({rank for peers in roles.peers for rank in peers}) < 2:
        return
    taken = [list_rows(run.ranks[peers[0]], 0) for peers in roles.peers]
    mine = Counter(itertools.chain.from_iterable(taken))
    times = Counter(row for rows in taken for row in set(rows))
    shared = [row for row, ranks in times.items() if ranks > 1]
    theirs = _count_rows(probe)
    is_part = bool(theirs) and mine.keys() <= theirs.keys()
    lacking = [row for row in theirs if row not in mine] if is_part else []
    # a row that the reference's batch has several times may be on several ranks
    repeated = [row for row in shared if mine[row] > theirs[row] > 0] if is_part else []
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
        shared |= {index for index, row in own.items() if row in taken.get(index, set())}
        for index, row in own.items():
            taken.setdefault(index, set()).add(row)
    return shared


def _check_epochs(run: ProvedRun, roles: Roles, probe: ProvedRun | None) -> Iterator[Difference]:
    """Find samples of the dataset that an epoch takes on no rank, or on several."""
    ranks = [run.ranks[peers[0]] for peers in roles.peers]
    for number in range(min(len(rank.record.loaders) for rank in ranks) if ranks else 0):
        loaders = [rank.record.loaders[number] for rank in ranks]
        yield from _check_epoch(loaders, number, _find_expected(loaders, number, probe))
        yield from _check_pieces(loaders, number, roles, probe)


def _find_expected(loaders: list[LoaderRecord], number: int, probe: ProvedRun | None) -> set[int]:
    """Samples that an epoch should take: those of the reference's, or the whole dataset."""
    if probe is not None and probe.ranks:
        theirs = probe.ranks[min(probe.ranks)].record.loaders
        if number < len(theirs) and theirs[number].epoch and theirs[number].samples == loaders[0].samples:
            return set(theirs[number].epoch)
    return set(range(loaders[0].samples))


def _check_epoch(loaders: list[LoaderRecord], number: int, expected: set[int]) -> Iterator[Difference]:
    if len({loader.samples for loader in loaders}) != 1 or not all(loader.epoch for loader in loaders):
        return
    taken = Counter(index for loader in loaders for index in loader.epoch)
    room = len(loaders) - 1
    never = len(expected - taken.keys())
    twice = sum(taken.values()) - len(taken)
    where = f"DataLoader {number}" if number else "DataLoader"
    if never > room:
        yield Difference(
            kind=ErrorKind.DATA_NEVER,
            where=where,
            step=1,
            evidence=f"an epoch takes {never} of {len(expected)} samples on no rank"
            + (f", and {twice} more than once" if twice > room else ""),
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
    theirs = probe.ranks[min(probe.ranks)].record.loaders
    if number >= len(theirs):
        return
    whole = theirs[number].samples
    total = sum(loader.samples for loader in loaders)
    are_pieces = all(0 < loader.samples < whole for loader in loaders)
    if are_pieces and total <= whole - len(loaders):
        yield Difference(
            kind=ErrorKind.DATA_NEVER,
            where=f"DataLoader {number}" if number else "DataLoader",
            step=1,
            evidence=f"the ranks' datasets have {total} samples together, the reference's has {whole}",
            remedy="look at which piece of the dataset each rank takes",
            confidence="medium",
        )
