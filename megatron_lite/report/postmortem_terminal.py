"""Draws the conclusion on a job that failed or hangs."""

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from megatron_lite.postmortem.postmortem_results import Fact, FailureKind, LastOfRank, Postmortem
from megatron_lite.report.section import Lines, Section, Table, limit_rows, section_lines
from megatron_lite.report.text import Style, wrapped
from megatron_lite.units import counted

FACTS_SHOWN = 6
RANKS_SHOWN = 8


def postmortem_lines(found: Postmortem, style: Style, everything: bool = False, folder: str = "") -> list[str]:
    """Draw a conclusion: the verdict first, then what shows it, what only followed and what to do.

    Args:
        found: The conclusion.
        style: How the terminal may be written to.
        everything: Show all facts and all ranks.
        folder: The folder that all files lie in; their names are written without it.
    """
    headline = style.bold(write_headline(found))
    certainty = describe_certainty(found)
    lines = wrapped(headline, "")
    for line in wrapped(certainty):
        lines.append(style.dim(line))
    found = _shorten_sources(found, folder)
    for section in list_postmortem_sections(found, everything):
        lines += ["", *section_lines(section, style)]
    return lines


def _shorten_sources(found: Postmortem, folder: str) -> Postmortem:
    """Write files without the folder that all of them lie in."""
    if not folder:
        return found
    prefix = folder.rstrip("/") + "/"
    evidence = tuple(_shorten_source(fact, prefix) for fact in found.evidence)
    consequences = tuple(_shorten_source(fact, prefix) for fact in found.consequences)
    missing = tuple(line.removeprefix(prefix) for line in found.missing)
    return msgspec.structs.replace(found, evidence=evidence, consequences=consequences, missing=missing)


def _shorten_source(fact: Fact, prefix: str) -> Fact:
    return Fact(text=fact.text, source=fact.source.removeprefix(prefix))


def write_headline(found: Postmortem) -> str:
    """Write the verdict behind the class of failure, as in "NEVER ENTERED: rank 3 did not enter ..."."""
    if found.kind in (FailureKind.UNKNOWN, FailureKind.NONE):
        return found.verdict
    return f"{found.kind.value.upper()}: {found.verdict}"


def describe_certainty(found: Postmortem) -> str:
    """Describe how sure the verdict is."""
    certainty = f"confidence: {found.confidence}"
    if found.alternatives:
        certainty += f"; {counted(len(found.alternatives), 'other explanation')} left open"
    return certainty


def list_postmortem_sections(found: Postmortem, everything: bool) -> Iterator[Section]:
    """List the sections below the verdict.

    Args:
        found: The conclusion.
        everything: Show all facts and all ranks.
    """
    if found.evidence:
        lines = _write_facts(found.evidence, everything)
        yield Section("evidence", "What shows it", "", [lines])
    if found.consequences:
        lines = _write_facts(found.consequences, everything)
        yield Section("consequences", "What only followed", "", [lines])
    if found.next_steps:
        lines = Lines(found.next_steps)
        yield Section("next", "What to do next", "", [lines])
    if found.alternatives:
        lines = Lines(found.alternatives)
        yield Section("alternatives", "What else it may be", "", [lines])
    if found.missing:
        lines = Lines(found.missing, quiet=True)
        yield Section("missing", "What was not read", "", [lines])
    if found.rows:
        table = _build_ranks(found, everything)
        yield Section("ranks", "Ranks when they were last seen", "", [table])


def _write_facts(facts: Sequence[Fact], everything: bool) -> Lines:
    """Write facts, each with its source, the first ones unless all are wanted."""
    shown = facts if everything else facts[:FACTS_SHOWN]
    texts = []
    for fact in shown:
        source = f" [{fact.source}]" if fact.source else ""
        texts.append(fact.text + source)
    hidden = len(facts) - len(shown)
    if hidden:
        texts.append(f"and {hidden} more with --all")
    return Lines(texts)


def _build_ranks(found: Postmortem, everything: bool) -> Table:
    """Build the table of ranks: those to blame, then one of each kind of state, and how many more are alike."""
    alike = _join_alike(found, everything)
    shown, hidden = limit_rows(alike, RANKS_SHOWN, everything)
    rows = []
    for first, *others in shown:
        title = f"rank {first.rank}"
        if others:
            title += f" ({len(others):,} more alike)"
        rows.append(
            (
                title,
                first.host,
                first.place,
                first.last_call,
                first.call_site,
                first.fate,
            )
        )
    head = ("", "host", "step", "last collective", "called at", "state")
    return Table(rows, "llllll", head, hidden=hidden)


def _join_alike(found: Postmortem, everything: bool) -> list[list[LastOfRank]]:
    """Join ranks whose state is the same; who is to blame stands alone."""
    alone = set(found.ranks[:RANKS_SHOWN])
    alike: dict[object, list[LastOfRank]] = {}
    for row in found.rows:
        key: object = (
            row.place,
            row.last_call,
            row.call_site,
            row.fate,
        )
        if everything or row.rank in alone:
            key = row.rank
        alike.setdefault(key, []).append(row)
    return list(alike.values())


def count_read(read: Mapping[str, int]) -> str:
    """Write what was read: "4 flight recordings, 1 console log"."""
    words = []
    for kind, number in read.items():
        singular = kind.removesuffix("s")
        words.append(f"{number:,} {singular if number == 1 else kind}")
    return ", ".join(words)
