"""The page and the JSON Schemas of a run's files, made from the Structs of formats/: `python tests/format_schemas.py` writes them anew."""

import ast
import inspect
import io
import json
import tokenize
from typing import Any

import msgspec
from support.paths import DOCS

from megatron_lite.formats import failure_record, hardware_record, run_record, step_records, trace_header
from megatron_lite.formats.failure_record import FailureRecord
from megatron_lite.formats.run_record import RunRecord
from megatron_lite.formats.step_records import HardwareRecord, RankInterval, RanksRecord, StepRecord
from megatron_lite.formats.trace_header import RecordedCores

PAGE = DOCS / "run_files.md"
DIALECT = "https://json-schema.org/draft/2020-12/schema"
FILES = {  # schema: what a line or the file may be
    "run.schema.json": ("run.json", (RunRecord,)),
    "steps.schema.json": ("a line of steps.jsonl", (StepRecord, RanksRecord[RankInterval], HardwareRecord)),
    "ranks.schema.json": ("ranks.json", (FailureRecord,)),
}
HEAD = """# Files of a run

A run folder holds `run.json` and `steps.jsonl`, and `ranks.json` where a rank died, hung or failed. The trainer writes them,
`megatron-lite watch` the first two, and `last_words-RANK.json` for each rank, in the form of a rank in ranks.json; `report` and the other
commands read them, and other programs may: every field stands below with its unit and meaning. [run.schema.json](run.schema.json), [steps.schema.json](steps.schema.json) and [ranks.schema.json](ranks.schema.json)
are their JSON Schemas. New fields may come.

This page is made from `megatron_lite/formats/` by `python tests/format_schemas.py`.
"""
SECTIONS = (
    ("run.json", run_record, RunRecord),
    ("steps.jsonl", step_records, StepRecord | RanksRecord[RankInterval] | HardwareRecord),
    ("ranks.json", failure_record, FailureRecord),
    ("Headers of traces", trace_header, RecordedCores),
)


def read_comments(kind: type) -> dict[str, str]:
    """What the source of a Struct says above each field."""
    source = inspect.getsource(kind)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {one.start[0]: one.string.lstrip("# ") for one in tokens if one.type == tokenize.COMMENT}
    found: dict[str, str] = {}
    free = 0
    for field in ast.parse(source).body[0].body:
        if isinstance(field, ast.AnnAssign):
            found[field.target.id] = " ".join(comments[at] for at in range(free + 1, field.lineno) if at in comments)
        free = field.end_lineno
    return found


def describe_components(kinds: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(a schema of each of the kinds, the Structs in them by name), with what the source says of every field."""
    schemas, components = msgspec.json.schema_components(kinds, ref_template="#/$defs/{name}")
    for module in (hardware_record, run_record, step_records, failure_record, trace_header):
        for name, kind in vars(module).items():
            if not isinstance(kind, type) or not issubclass(kind, msgspec.Struct):
                continue
            for title in (name, *(title for title in components if title.startswith(f"{name}_"))):
                component = components.get(title)
                if component is None:
                    continue
                component["description"] = " ".join((kind.__doc__ or "").split())
                for field, comment in read_comments(kind).items():
                    if comment:
                        component["properties"][field]["description"] = comment
    return schemas, components


def build_schema(name: str) -> str:
    """The text of a schema's file."""
    title, kinds = FILES[name]
    schemas, components = describe_components(kinds)
    whole = schemas[0] if len(schemas) == 1 else {"anyOf": list(schemas)}
    return json.dumps({"$schema": DIALECT, "title": title, **whole, "$defs": components}, indent=1) + "\n"


def describe_type(schema: dict[str, Any]) -> str:
    """A type in a word or two: "number or null", "list of number", "object of Stage"."""
    if "$ref" in schema:
        return schema["$ref"].rpartition("/")[2]
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(describe_type(one) for one in schema["anyOf"]))
    if "enum" in schema:
        return " or ".join(f'"{one}"' for one in schema["enum"])
    kind = schema.get("type", "anything")
    if kind == "array" and isinstance(schema.get("items"), dict):
        return f"list of {describe_type(schema['items'])}"
    if kind == "array":
        return "list"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"{describe_type(schema['additionalProperties'])} by name"
    return kind


def build_page() -> str:
    """The text of the page."""
    parts = [HEAD]
    for title, module, kind in SECTIONS:
        _, components = describe_components((kind,))
        parts.append(f"## {title}\n\n{module.__doc__.strip()}\n")
        for name, component in components.items():
            rows = [
                f"| `{field}` | {describe_type(schema)} | {schema.get('description', '')} |"
                for field, schema in component["properties"].items()
            ]
            table = "\n".join(["| field | type | meaning |", "| --- | --- | --- |", *rows])
            parts.append(f"### {name.partition('_')[0]}\n\n{component['description']}\n\n{table}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(build_page(), encoding="utf-8")
    for name in FILES:
        (DOCS / name).write_text(build_schema(name), encoding="utf-8")
