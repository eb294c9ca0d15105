"""The report's numbers as JSON for programs: report.json, whose keys are the fields of the analysis' dataclasses
(docs/report_json.md)."""

import dataclasses
import enum
import functools
import json
import math
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from megatron_lite.analysis.findings.base import Finding
from megatron_lite.analysis.memory.memory_results import MeasuredCategory
from megatron_lite.analysis.rank_facts import EventPlace, RankFacts
from megatron_lite.analysis.report import REPORT_SCHEMA, Report
from megatron_lite.analysis.run.run_results import RankLines, RankMedians, Run, Steps
from megatron_lite.analysis.run_facts import Compared
from megatron_lite.analysis.time.time_results import RankTime
from megatron_lite.report.sections.all import build_limitations

OF_RANKS = ("ranks_seen", "snapshots", "traced_memory")
LISTS = (list, tuple, set, frozenset)
LEAVES = (str, int, bool, type(None))
# an edit is code, whose words are in the gains
NOT_WRITTEN: dict[type, str] = {Finding: "edit"}
# a property that is written, too
COMPUTED = {Compared: "difference", MeasuredCategory: "difference_bytes", RankTime: "idle_ms"}
OF_TRACE = (
    "source",
    "writer",
    "rank",
    "world_size",
    "devices",
    "facts",
)  # the fields of Trace that are written
# steps.jsonl and run.json have them
NOT_OF_RUN = {field.name for field in dataclasses.fields(Steps)} | {"record"}
MAX_FULL_ENTRIES = 16  # entries of one of these lists; of more only the one that the report shows is whole
MAX_WRITTEN_RANK_NUMBERS = 50_000  # from console lines; of more lines evenly chosen ones


def json_text(report: Report) -> str:
    """Write report.json: keys in a fixed order, null for what is not known or no number, and ASCII, so that any reader
    can read it."""
    content = as_json(report)
    try:  # with an indent, json uses its slow encoder
        return msgspec.json.format(json.dumps(content, allow_nan=False), indent=1) + "\n"
    except msgspec.DecodeError:  # halves of letters, which msgspec refuses
        return json.dumps(content, indent=1, allow_nan=False) + "\n"


def ranks_text(report: Report) -> str:
    """Write a line of JSON for each whole entry of the lists that report.json shortens; '' where it has all."""
    lines = []
    for key in find_shortened(report):
        for entry in _list_entries(report, key, short=False):
            lines.append(json.dumps({"of": key, **entry}, allow_nan=False) + "\n")
    return "".join(lines)


def find_shortened(report: Report) -> list[str]:
    """Find the lists of so many ranks that report.json has their details only for one."""
    return [key for key in OF_RANKS if len(getattr(report.facts, key)) > MAX_FULL_ENTRIES]


def as_json(report: Report) -> dict[str, Any]:
    """Write a report as plain dicts, lists, numbers and strings."""
    facts = report.facts
    shortened = find_shortened(report)
    lists = {}
    for key in OF_RANKS:
        entries = _list_entries(report, key, short=key in shortened)
        lists[key] = list(entries)
    return {
        "schema": REPORT_SCHEMA,
        "title": report.title,
        "paths": list(report.paths),
        "read_s": plain(report.read_s),
        "verdict": plain(report.verdict),
        "failure": msgspec.to_builtins(report.failure),
        "findings": plain(report.findings),
        "gains": plain(report.gains),
        "checks": plain(report.checks),
        "critical_rank": facts.critical.time.rank if facts.critical else None,
        "ranks_seen": lists["ranks_seen"],
        "ranks": plain(facts.ranks),
        "snapshots": lists["snapshots"],
        "ledger": plain(facts.ledger),
        "traced_memory": lists["traced_memory"],
        "predicted": plain(facts.predicted),
        "run": _run_as_json(facts.run) if facts.run else None,
        "pipeline": plain(facts.pipeline),
        "every_step": plain(facts.every_step),
        "gaps": build_limitations(report),
        "shortened": shortened,
    }


def _list_entries(report: Report, key: str, short: bool) -> Iterator[dict[str, Any]]:
    """List what there is once per rank. `short`: without lists, except for the rank that the report shows."""
    facts = report.facts
    for one in getattr(facts, key):
        is_shown = one is facts.critical or one is facts.highest_snapshot
        without_lists = short and not is_shown
        if not isinstance(one, RankFacts):
            yield plain(one, without_lists)
            continue
        of_trace = {name: getattr(one.trace, name) for name in OF_TRACE}
        entry = plain(of_trace, without_lists)
        entry["time"] = plain(one.time, without_lists)
        entry["kernels"] = plain(one.kernels, without_lists)
        yield entry


def _run_as_json(run: Run) -> dict[str, Any]:
    """Write a run as JSON, without the plan (it is in run.json) and the columns that have an entry per step (in
    steps.jsonl)."""
    found: dict[str, Any] = {"status": run.status}
    for field in dataclasses.fields(run):
        if field.name == "ranks":
            found["ranks"] = _ranks_as_json(run.ranks) if run.ranks else None
        elif field.name not in NOT_OF_RUN:
            found[field.name] = plain(getattr(run, field.name))
    return found


def _ranks_as_json(ranks: RankMedians) -> dict[str, Any]:
    """Write the medians of ranks, with evenly chosen console lines and numbers of memory of a long run."""
    lines = ranks.intervals
    tables = len(dataclasses.fields(lines)) + len(lines.phases_ms) + len(lines.gpu_phases_ms)
    numbers_of_line = tables * len(ranks.step_ms)
    limit = max(MAX_WRITTEN_RANK_NUMBERS // numbers_of_line, 1)
    chosen = lines.take(choose_evenly(len(lines.first), limit))
    chosen_numbers = choose_evenly(len(ranks.host_memory_bytes), limit)
    shortened = dataclasses.replace(
        ranks,
        intervals=chosen,
        host_memory_bytes=ranks.host_memory_bytes[chosen_numbers],
        peak_memory_bytes=ranks.peak_memory_bytes[chosen_numbers],
    )
    found: dict[str, Any] = plain(shortened)
    found["intervals"] = [_line_as_json(chosen, at) for at in range(len(chosen.first))]
    return found


def choose_evenly(length: int, limit: int) -> slice:
    """Choose every n-th of `length` entries, the last one among them, so that about `limit` are left."""
    # rounded up
    every = -(-length // limit)
    first = (length - 1) % every if length else 0
    return slice(first, None, every)


def _line_as_json(lines: RankLines, number: int) -> dict[str, Any]:
    """Write a console line as JSON; a phase that no rank had in it is not named."""
    found: dict[str, Any] = {}
    for name, value in vars(lines).items():
        if not isinstance(value, dict):
            found[name] = plain(value[number])
            continue
        phases = {}
        for phase, ms_by_line in value.items():
            ms = ms_by_line[number]
            if not np.isnan(ms).all():
                phases[phase] = plain(ms)
        found[name] = phases
    return found


def plain(value: Any, short: bool = False) -> Any:
    """Write a value in JSON's types only. NaN and infinity are null: they are numbers that nobody measured. `short`:
    without lists."""
    kind: Any = type(value)
    if kind in LEAVES:  # before what is rarer: there are many of them
        return value
    if kind is float:
        return value if math.isfinite(value) else None
    if kind is EventPlace:
        # programs get the words, too
        return value.words
    if names := _list_fields(kind):
        value = {name: getattr(value, name) for name in names}
    if isinstance(value, dict):
        found = {}
        for key, item in value.items():
            if short and isinstance(item, LISTS):
                continue
            name = key if type(key) is str else str(plain(key))
            found[name] = plain(item, short)
        return found
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, LISTS):
        return [plain(item) for item in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return plain(value.tolist())
    return value if isinstance(value, LEAVES) else str(value)


@functools.cache
def _list_fields(kind: type) -> tuple[str, ...]:
    """List the fields of a dataclass or a Struct that are written; no fields for other types."""
    names: list[str] = []
    if dataclasses.is_dataclass(kind):
        names += [field.name for field in dataclasses.fields(kind) if field.name != NOT_WRITTEN.get(kind)]
    names += getattr(kind, "__struct_fields__", ())
    if kind in COMPUTED:
        names.append(COMPUTED[kind])
    return tuple(names)
