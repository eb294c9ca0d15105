"""The JSON Schema of report.json, made from the dataclasses that are written: `python tests/report_schema.py` writes it anew."""

import ast
import collections.abc
import dataclasses
import enum
import inspect
import io
import json
import re
import tokenize
import types
import typing
from typing import Any

import msgspec
import numpy as np
from support.paths import DOCS

from megatron_lite.analysis.findings.base import Finding
from megatron_lite.analysis.findings.check_case import Check
from megatron_lite.analysis.kernels.kernel_results import RankKernels
from megatron_lite.analysis.memory.memory_results import MeasuredCategory, Snapshot, TraceMemory
from megatron_lite.analysis.rank_facts import EventPlace
from megatron_lite.analysis.ranks.rank_results import RankComparison
from megatron_lite.analysis.report import REPORT_SCHEMA, Gains, Verdict
from megatron_lite.analysis.run.every_step import EveryStep
from megatron_lite.analysis.run.pipeline_times import PipelineTimes
from megatron_lite.analysis.run.run_results import RankLines, RankMedians, Run
from megatron_lite.analysis.run_facts import Predicted
from megatron_lite.analysis.time.time_results import RankTime
from megatron_lite.analysis.trace.columns import Trace
from megatron_lite.postmortem.postmortem_results import Postmortem
from megatron_lite.report.json_file import COMPUTED, NOT_OF_RUN, NOT_WRITTEN, OF_TRACE

FILE = DOCS / "report.schema.json"
SIMPLE = {int: "integer", str: "string", bool: "boolean", dict: "object", type(None): "null"}
PYTHON_WORDS = {"None": "null", "True": "true", "False": "false", "()": "[]"}


@dataclasses.dataclass
class TracedRank:
    """A trace, and what was made of it."""

    time: RankTime
    kernels: RankKernels


@dataclasses.dataclass
class Contents:
    """The numbers of a report, for programs. Times are milliseconds per steady step, memory is bytes, shares are 0 to 1, unless a name
    says otherwise. null is what nobody measured or knows: never 0."""

    title: str
    paths: tuple[str, ...]  # as given on the command line
    read_s: float  # that reading took
    verdict: Verdict
    # why the job failed, where its folder holds evidence of that; None for a run that did not fail, and where nothing tells
    failure: Postmortem | None
    # first what saves most of a step: gain_ms where the remedy was replayed, else cost_ms
    findings: tuple[Finding, ...]
    # what their remedies save together; None where none of them could be replayed
    gains: Gains | None
    checks: tuple[Check, ...]  # the questions of `megatron-lite audit`, in its order
    critical_rank: int | None  # the rank that the report shows, which waits least for others
    ranks_seen: tuple[TracedRank, ...]  # by rank
    ranks: RankComparison | None  # beside each other
    snapshots: tuple[Snapshot, ...]  # of memory, by rank
    # formulas beside the snapshot with the highest peak; () without a plan of this trainer
    ledger: tuple[MeasuredCategory, ...]
    traced_memory: tuple[TraceMemory, ...]  # from memory events of traces, where there is no snapshot
    # what the run said of itself before it started, beside what was measured; the prediction itself stands in run.json
    predicted: Predicted | None
    run: Run | None  # the run folder
    pipeline: PipelineTimes | None  # stages, from steps.jsonl
    every_step: EveryStep | None  # all steps by phase, beside the profiled ones, from steps.jsonl
    gaps: tuple[str, ...]  # what could not be seen and why
    # those of ranks_seen, snapshots and traced_memory that have more than 16 entries: all but the one that the report shows are
    # without lists here, and each stands in full on a line of report.ranks.jsonl, with the list's name as `of`
    shortened: tuple[str, ...]


class Definitions:
    """A schema of each dataclass, by its name."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, Any]] = {}
        self._classes: dict[str, type] = {}

    def refer(self, of: type) -> dict[str, Any]:
        """A reference to the schema of a dataclass, which is made once."""
        name = of.__name__
        if self._classes.setdefault(name, of) is not of:  # two modules have the name
            name = f"{name}Of{of.__module__.rpartition('.')[2].partition('_')[0].title()}"
        if name not in self.found:
            self.found[name] = {}
            self.found[name] = self.describe(of)
        return {"$ref": f"#/$defs/{name}"}

    def describe(self, of: type) -> dict[str, Any]:
        """The schema of a dataclass. Lists may be missing in entries that were shortened."""
        hints, comments = typing.get_type_hints(of), read_comments(of)
        fields = msgspec.structs.fields(of) if issubclass(of, msgspec.Struct) else dataclasses.fields(of)
        names = [field.name for field in fields if not (of is Run and field.name in NOT_OF_RUN)]
        names = [name for name in names if name != NOT_WRITTEN.get(of)]
        properties = {}
        for name in names:
            kind = tuple[RankLines, ...] if (of, name) == (RankMedians, "intervals") else hints[name]
            properties[name] = self.describe_type(kind, of is RankLines) | describe_text(comments.get(name, ""))
        if of is TracedRank:
            hints, comments = typing.get_type_hints(Trace), read_comments(Trace)
            given = {name: self.describe_type(hints[name]) | describe_text(comments.get(name, "")) for name in OF_TRACE}
            properties = given | properties
        more = {Run: "status"} | COMPUTED
        if of in more:
            told = getattr(of, more[of])
            kind = typing.get_type_hints(told.fget)["return"]
            properties[more[of]] = self.describe_type(kind) | describe_text(inspect.getdoc(told) or "")
        required = [name for name, one in properties.items() if one.get("type") != "array"]
        text = describe_text(inspect.getdoc(of) or "")
        return {"type": "object", **text, "properties": properties, "required": required}

    def describe_type(self, kind: Any, of_one_line: bool = False) -> dict[str, Any]:
        """of_one_line: an array of [line, rank] stands for one line."""
        origin, given = typing.get_origin(kind), typing.get_args(kind)
        if hasattr(origin, "__value__"):  # NDArray as numpy 2.5 defines it
            return self.describe_type(origin.__value__[given], of_one_line)
        if origin in (typing.Union, types.UnionType):
            found = [self.describe_type(one) for one in given]
            if all(set(one) == {"type"} for one in found):
                words = list(dict.fromkeys(word for one in found for word in np.atleast_1d(one["type"]).tolist()))
                return {"type": words if len(words) > 1 else words[0]}
            return {"anyOf": found}
        if origin in (dict, collections.abc.Mapping):
            return {"type": "object", "additionalProperties": self.describe_type(given[1], of_one_line)}
        if origin is np.ndarray:
            whole = np.int64 in typing.get_args(given[1])  # iterations: one for each line
            number = {"type": "integer"} if whole else self.describe_type(float)
            return number if whole and of_one_line else describe_list(number if of_one_line else describe_list(number))
        if origin in (tuple, list):
            if origin is list or given[-1] is Ellipsis:
                return describe_list(self.describe_type(given[0]))
            return {"type": "array", "prefixItems": [self.describe_type(one) for one in given]}
        if origin is typing.Literal:
            return {"enum": list(given)}
        if kind is float:  # NaN and infinity are null
            return {"type": ["number", "null"]}
        if kind is Any:
            return {}
        if kind is EventPlace:
            return {"type": "string"}
        if is_record(kind):
            return self.refer(kind)
        if issubclass(kind, enum.Enum):
            return {"enum": [one.value for one in kind]}
        return {"type": SIMPLE[kind]}


def is_record(kind: Any) -> bool:
    is_struct = isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind is not msgspec.Struct
    return is_struct or dataclasses.is_dataclass(kind)


def describe_list(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item}


def describe_text(text: str) -> dict[str, str]:
    """A comment or docstring, in JSON's words."""
    for word, own in PYTHON_WORDS.items():
        text = re.sub(rf"(?<![\w(]){re.escape(word)}(?!\w)", own, text)
    return {"description": " ".join(text.split())} if text else {}


def read_comments(of: type) -> dict[str, str]:
    """What the source says beside each field, or above it."""
    found: dict[str, str] = {}
    for base in reversed([one for one in of.__mro__ if is_record(one)]):
        source = inspect.getsource(base)
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        comments = {one.start[0]: one.string.lstrip("# ") for one in tokens if one.type == tokenize.COMMENT}
        free = 0  # after this line a comment of its own may belong to the next field
        for field in ast.parse(source).body[0].body:
            if isinstance(field, ast.AnnAssign):
                beside = [comments[at] for at in range(field.lineno, field.end_lineno + 1) if at in comments]
                above = [comments[at] for at in range(free + 1, field.lineno) if at in comments]
                found[field.target.id] = " ".join(beside or above)
            free = field.end_lineno
    return found


def build_schema() -> dict[str, Any]:
    """Of the whole file."""
    made = Definitions()
    contents = made.describe(Contents)
    version = {
        "const": REPORT_SCHEMA,
        "description": "raised when a reader of the old form would be wrong; new keys may come",
    }
    contents["properties"] = {"schema": version, **contents["properties"]}
    contents["required"] = list(contents["properties"])
    dialect = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": dialect, "title": "report.json", **contents, "$defs": made.found}


def write_schema() -> str:
    """With a line for each property."""
    schema = build_schema()
    definitions = schema.pop("$defs")
    written = [f"{json.dumps(name)}: {write_object(one)}" for name, one in definitions.items()]
    return write_object(schema)[:-1] + ',\n"$defs": {\n' + ",\n".join(written) + "\n}}\n"


def write_object(schema: dict[str, Any]) -> str:
    others = {key: value for key, value in schema.items() if key != "properties"}
    lines = [f" {json.dumps(name)}: {json.dumps(one)}" for name, one in schema["properties"].items()]
    return json.dumps(others)[:-1] + ', "properties": {\n' + ",\n".join(lines) + "\n}}"


if __name__ == "__main__":
    FILE.write_text(write_schema(), encoding="utf-8")
