"""report.json: the same numbers for programs. Keys are the fields of the analysis' dataclasses: docs/report_json.md."""

import dataclasses
import enum
import json
import math

from megatron_lite.analysis.report import REPORT_SCHEMA, Report
from megatron_lite.analysis.run.run_results import Run
from megatron_lite.analysis.run_facts import Compared
from megatron_lite.report.sections.all import build_limitations


def json_text(report: Report) -> str:
    """Keys in a fixed order; what is not known or no number is null. ASCII, so that any reader can read it."""
    return json.dumps(as_json(report), indent=1, allow_nan=False) + "\n"


def as_json(report: Report) -> dict:
    """The report as plain dicts, lists, numbers and strings."""
    facts, critical = report.facts, report.facts.critical
    ranks_seen = []
    for one in facts.ranks_seen:
        trace = {
            name: getattr(one.trace, name) for name in ("source", "writer", "rank", "world_size", "devices", "facts")
        }
        time = plain(one.time) | {"idle_ms": plain(one.time.idle_ms)}
        ranks_seen.append(plain(trace) | {"time": time, "kernels": plain(one.kernels)})
    return {
        "schema": REPORT_SCHEMA,
        "title": report.title,
        "paths": list(report.paths),
        "read_s": plain(report.read_s),
        "verdict": plain(report.verdict),
        "findings": plain(report.findings),
        "critical_rank": critical.time.rank if critical else None,
        "ranks_seen": ranks_seen,
        "ranks": plain(facts.ranks),
        "snapshots": plain(facts.snapshots),
        "ledger": [plain(row) | {"difference_bytes": row.difference_bytes} for row in facts.ledger],
        "traced_memory": plain(facts.traced_memory),
        "predicted": plain(facts.predicted),
        "run": _run_as_json(facts.run) if facts.run else None,
        "gaps": build_limitations(report),
    }


def _run_as_json(run: Run) -> dict:
    """Without the columns that have an entry per step (they stand in steps.jsonl) and the plan (run.json)."""
    found = {"status": run.status}
    for field in dataclasses.fields(run):
        value = getattr(run, field.name)
        per_step = isinstance(value, tuple) and field.name not in ("notes", "growths", "gpu_growths")
        if not per_step and field.name not in ("plan", "record", "phases_ms", "gpu_phases_ms"):
            found[field.name] = plain(value)
    return found


def plain(value):
    """JSON's types only. NaN and infinity are null: they are numbers that nobody measured."""
    if isinstance(value, enum.Enum):
        return value.value
    if dataclasses.is_dataclass(value):
        fields = {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return fields | {"difference": plain(value.difference)} if isinstance(value, Compared) else fields
    if isinstance(value, dict):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if hasattr(value, "item"):
        return plain(value.item())
    return (value if math.isfinite(value) else None) if isinstance(value, float) else str(value)
