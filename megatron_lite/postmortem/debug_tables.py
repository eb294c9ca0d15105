"""Read the tables of torch's own analysis, which torch.distributed.debug's dumps have in place of recordings.

A row of the table of collectives tells which ranks were to meet in it, which of those did not, and which of them had
other arguments. Recordings are made of it, as far as it goes.
"""

import html
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from megatron_lite.postmortem.evidence import CallState, FlightRecording, RecordedCall, RecordedGroup

COLLECTIVES_TABLE = "--- Collectives ---"
TABLE_END = re.compile(r"^(?:---|===|$)")
MISMATCH = re.compile(
    r"(?P<rank>\d{1,6}): Collective\([^\n]*?collective_name='(?P<name>[^']{1,200})', "
    r"input_sizes=(?P<inputs>\[[\d\[\], ]*\]), output_sizes=(?P<outputs>\[[\d\[\], ]*\])"
    r"[^\n]*?collective_state='(?P<state>\w+)'"
)
# of all ranks that differ
MAX_MISMATCH_LETTERS = 100_000
MAX_TABLE_LINES = 200_000
PAGE_TABLE = re.compile(r"<h2>Collectives</h2>\s*<table>(?P<table>.*?)</table>", re.DOTALL)
PAGE_ROW = re.compile(r"<tr>(?P<cells>.*?)</tr>", re.DOTALL)
PAGE_CELL = re.compile(r"<t[hd][^>]*>(.*?)</t[hd]>", re.DOTALL)
MESSAGE_ROW = re.compile(r"\w+:(?:send|recv) ")


def read_tables(text: str, source: str, silent: set[int]) -> tuple[FlightRecording, ...]:
    """Make recordings of the table of collectives in a dump fr_trace: of each rank the calls that it is said to be in.

    Args:
        text: The dump.
        source: Its file.
        silent: Ranks that did not answer, of whose calls the table says nothing.

    Returns:
        A recording for each rank. A call whose ranks disagree has each one's own name and shapes; messages are left
        out, since the table has them by group and not by rank.
    """
    # of a backend and a rank: backends number their groups alike
    calls: dict[tuple[str, int], list[RecordedCall]] = {}
    groups: dict[tuple[str, str], RecordedGroup] = {}
    for row in _read_rows(text):
        collective = _Collective.read(row)
        if collective is None:
            continue
        group = collective.group
        groups[collective.backend, group.name] = group
        for rank in group.ranks:
            if rank in silent:
                continue
            of_rank = calls.setdefault((collective.backend, rank), [])
            if rank not in collective.missing:
                of_rank.append(collective.describe_call(rank, len(of_rank)))
    return tuple(
        FlightRecording(
            source=source,
            rank=rank,
            backend=backend,
            calls=tuple(made),
            groups={name: group for (owner, name), group in groups.items() if owner == backend and rank in group.ranks},
            # this is what torch asks NCCL's recorder for, and not the other ones
            is_only_active=backend in ("nccl", "ncclx"),
            tells_starts=any(call.state is CallState.STARTED for call in made),
        )
        for (backend, rank), made in sorted(calls.items())
    )


def _read_rows(text: str) -> Iterator[Mapping[str, str]]:
    """The rows of each table of collectives, by the names of its columns."""
    _, *tables = text.split(COLLECTIVES_TABLE + "\n")
    for table in tables:
        lines = []
        for line in table.split("\n", MAX_TABLE_LINES)[:MAX_TABLE_LINES]:
            if TABLE_END.match(line):
                break
            lines.append(line)
        if lines:
            yield from _split_table(lines)
    for found in PAGE_TABLE.finditer(text):
        names: list[str] = []
        for row in itertools.islice(PAGE_ROW.finditer(found["table"]), MAX_TABLE_LINES):
            cells = [html.unescape(cell).strip() for cell in PAGE_CELL.findall(row["cells"])]
            if names:
                yield dict(zip(names, cells, strict=False))
            else:
                names = cells


def _split_table(lines: Sequence[str]) -> Iterator[Mapping[str, str]]:
    """Rows of a table whose columns stand two spaces apart; an empty cell is told by its place."""
    # where any line has a letter; single blanks belong to a cell
    taken = bytearray(b" " * max(map(len, lines)))
    for line in lines:
        for word in re.finditer(r"\S+", line):
            begin, end = word.span()
            taken[begin:end] = b"x" * (end - begin)
    columns = [found.span() for found in re.finditer(rb"x(?: ?x)*", bytes(taken))]
    names = [lines[0][begin:end].strip() for begin, end in columns]
    for line in lines[1:]:
        yield {name: line[begin:end].strip() for name, (begin, end) in zip(names, columns, strict=True)}


@dataclass(frozen=True)
class _Collective:
    """A row: a collective, as those who entered it have it."""

    backend: str
    group: RecordedGroup
    number: int
    name: str
    state: CallState
    inputs: str
    outputs: str
    missing: frozenset[int]
    # of ranks with another collective, or other arguments
    others: Mapping[int, re.Match[str]]

    @classmethod
    def read(cls, row: Mapping[str, str]) -> "_Collective | None":
        """A collective of a row; None for a message, or for what is none."""
        name = row.get("collective_name", "")
        states = [state for state in CallState if state.value == row.get("collective_state")]
        number = row.get("collective_seq_id", "")
        ranks = sorted(_read_set(row.get("expected_ranks", "")))
        if not states or not number.isdecimal() or not ranks or ":" not in name or MESSAGE_ROW.match(name):
            return None
        group_name, _, description = row.get("pg_desc", "").partition(":")
        differing = row.get("mismatch_collectives", "")[:MAX_MISMATCH_LETTERS]
        backend, _, call_name = name.partition(":")
        return cls(
            backend=backend,
            group=RecordedGroup(group_name, description, tuple(ranks)),
            number=int(number),
            name=call_name,
            state=states[0],
            inputs=row.get("input_sizes", ""),
            outputs=row.get("output_sizes", ""),
            missing=frozenset(_read_set(row.get("missing_ranks", ""))),
            others={int(found["rank"]): found for found in MISMATCH.finditer(differing)},
        )

    def describe_call(self, rank: int, record: int) -> RecordedCall:
        """The call of one rank."""
        own = self.others.get(rank)
        made = RecordedCall(
            group=self.group.name,
            number=self.number,
            name=self.name,
            state=self.state,
            record=record,
            input_shapes=_read_sizes(self.inputs),
            output_shapes=_read_sizes(self.outputs),
        )
        if own is None:
            return made
        return replace(
            made,
            name=own["name"].partition(":")[2],
            state=next((state for state in CallState if state.value == own["state"]), made.state),
            input_shapes=_read_sizes(own["inputs"]),
            output_shapes=_read_sizes(own["outputs"]),
        )


def _read_set(text: str) -> set[int]:
    """The numbers of a set as Python writes it."""
    return {int(number) for number in re.findall(r"\d{1,6}", text)} if text.startswith("{") else set()


def _read_sizes(text: str) -> tuple[tuple[int, ...], ...]:
    """Shapes as Python writes them: [[4, 2], [8]]."""
    try:
        return msgspec.json.decode(text, type=tuple[tuple[int, ...], ...])
    except (msgspec.DecodeError, RecursionError):
        return ()
