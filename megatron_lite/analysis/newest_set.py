"""Of all traces under a folder those that belong together: one of each rank, of the newest window."""

import re
from collections.abc import Sequence
from pathlib import Path

from megatron_lite.analysis.source_files import SourceFile

DAMAGED = "damaged: its header and its end are missing; name it alone to read what is left"
_OF_ONE_RANK = re.compile(r"((?:rank|node|worker|host)[_-]?)\d+", re.IGNORECASE)


def newest_set(files: Sequence[SourceFile]) -> tuple[list[SourceFile], list[tuple[Path, str]]]:
    """(the newest window's files by rank, the others with the reason why they are left out)."""
    if not files:
        return [], []
    damaged = [file for file in files if not (file.whole or file.named)]  # they tell not of which run they are
    whole = [file for file in files if file.whole or file.named]
    if not whole:
        whole, damaged = damaged, []
    newest = max(whole, key=_age)
    ignored, of_run = [(file.path, DAMAGED) for file in damaged], []
    for file in whole:
        if _run_of(file) != _run_of(newest):
            ignored.append((file.path, _other_run(file, newest)))
        else:
            of_run.append(file)
    by_rank: dict[int | None, list[SourceFile]] = {}
    for file in of_run:
        by_rank.setdefault(file.rank, []).append(file)
    kept = []
    for own in by_rank.values():
        best = max(own, key=_age)
        in_window = _nearest(by_rank[newest.rank], best) is newest
        if in_window:
            kept.append(best)
        ignored += [(file.path, _older(file, best, in_window)) for file in own if file is not best or not in_window]
    return sorted(kept, key=lambda file: (file.rank is None, file.rank or 0)), ignored


def newest_reports(files: Sequence[SourceFile]) -> tuple[list[SourceFile], list[tuple[Path, str]]]:
    """The same for reports of Nsight Systems: one per node, whose names differ in the node's number."""
    if not files:
        return [], []
    newest = max(files, key=_age)
    kept = [file for file in files if _without_rank(file.path) == _without_rank(newest.path)]
    ignored = [
        (file.path, f"older than {newest.path.name}; name it alone to read it") for file in files if file not in kept
    ]
    return sorted(kept, key=lambda file: file.path), ignored


def _age(file: SourceFile) -> tuple:
    """Of two files of one window the plain one counts as newer: it is faster to read."""
    return file.time_ns, file.path.suffix != ".gz", file.path.name


def _run_of(file: SourceFile) -> tuple:
    """What files of one run have in common. Folders may be one per rank or node; files that were named may lie anywhere."""
    return file.world_size, "" if file.named else _without_rank(file.path.parent)


def _without_rank(path: Path) -> str:
    return _OF_ONE_RANK.sub(r"\1", str(path))


def _nearest(files: list[SourceFile], other: SourceFile) -> SourceFile:
    """The one of `files` that is closest in time to `other`: ranks write their windows at about the same time."""
    return min(
        files, key=lambda file: (abs(file.time_ns - other.time_ns), -file.time_ns, file.path.name != other.path.name)
    )


def _other_run(file: SourceFile, newest: SourceFile) -> str:
    if file.world_size != newest.world_size:
        return (
            f"of another run ({_size(file)}; the newest trace, {newest.path.name}, is of {_size(newest)}); "
            "name it alone to read it"
        )
    return f"of another run, older than {newest.path}; name it alone to read it"


def _size(file: SourceFile) -> str:
    return "an unknown number of ranks" if file.world_size is None else f"{file.world_size} ranks"


def _older(file: SourceFile, best: SourceFile, in_window: bool) -> str:
    who = "the same process" if file.rank is None else f"rank {file.rank}"
    if not in_window:
        return f"an older window; {who} has none of the newest one"
    if file.time_ns == best.time_ns:
        return f"the same window of {who} as {best.path.name}"
    return f"an older window of {who}; {best.path.name} is the newest"
