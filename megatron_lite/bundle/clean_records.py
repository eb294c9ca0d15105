"""Cleans typed records: numbers stay, and each field with a text has a rule. A text without a rule is taken out."""

import dataclasses
import re
from collections.abc import Callable
from enum import Enum
from typing import Any, TypeVar

import msgspec

from megatron_lite.bundle.clean_messages import clean_message
from megatron_lite.bundle.names import Secret, Substitutes, names_secret

Record = TypeVar("Record")
Rule = Callable[[Substitutes, str], str | None]
MAX_DEPTH_OF_VALUES = 16

_IDENTIFIER = re.compile(r"\S{1,80}")
_DATE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4}")
_WORDS_IN_A_ROW = re.compile(r"(?<!\S)[A-Za-z]\S*(?:\s+[A-Za-z][^\s/=.]*)+(?!\S)")
_VERSION = re.compile(r"\d+(?:\.\d+){0,3}(?:(?:a|b|rc|\.dev|\.post)\d+)?(?:\+(?:cpu|cu\d{2,3}|rocm[\d.]+|xpu))?")


def _take_out(names: Substitutes, text: str) -> str | None:
    return names.clean_text(text) or None


def _drop_id(names: Substitutes, text: str) -> str | None:
    names.replace(Secret.ID, text)
    return None


def _keep_date(names: Substitutes, text: str) -> str | None:
    return text if _DATE.fullmatch(text) else _take_out(names, text)


def _keep_version(names: Substitutes, text: str) -> str | None:
    return text if _VERSION.fullmatch(text) else _take_out(names, text)


def _clean_value(names: Substitutes, text: str) -> str | None:
    """A flag's or a variable's value: a word of a few, a path, or anything."""
    [cleaned] = names.clean_command([text])
    return cleaned


def _clean_source(names: Substitutes, text: str) -> str | None:
    """A file, with a line or without: train.log:1204."""
    path, colon, line = text.rpartition(":")
    if colon and line.isdigit():
        return f"{names.clean_path(path)}:{line}"
    return names.clean_path(text)


def _clean_command(names: Substitutes, text: str) -> str | None:
    """A command line whose quotes are lost: words in a row may be a text, and are taken out together."""
    words = _WORDS_IN_A_ROW.sub(lambda found: names.clean_text(found[0]), text).split()
    return " ".join(names.clean_command(words))


def clean_key(names: Substitutes, text: str) -> str:
    """A key of a dict: a flag, a variable, a phase, a group."""
    return names.clean_name(text) if _IDENTIFIER.fullmatch(text) else names.clean_label(text)


HOST: Rule = Substitutes.clean_host
NAME: Rule = Substitutes.clean_name
LABEL: Rule = Substitutes.clean_label
PATH: Rule = Substitutes.clean_path
FRAME: Rule = Substitutes.clean_frame
MESSAGE: Rule = clean_message
VALUE: Rule = _clean_value
DATE: Rule = _keep_date
VERSION: Rule = _keep_version
ID: Rule = _drop_id
SOURCE: Rule = _clean_source
COMMAND: Rule = _clean_command
KEY: Rule = clean_key

# what is done with each field that holds texts, by record and field; a new field is taken out until it stands here
RULES: dict[str, dict[str, Rule]] = {
    # run.json
    "RunRecord": {
        "status": MESSAGE,
        "started": DATE,
        "ended": DATE,
        "command": VALUE,
        "versions": VERSION,
        "environment": VALUE,
        "artefacts": PATH,
    },
    "Process": {"host": HOST, "pids": ID},
    "WorldRecord": {"no_compiler": NAME},
    "ExpertsRecord": {"score_function": LABEL, "router_dtype": LABEL, "balancing": LABEL, "drop_policy": LABEL},
    "Shape": {
        "position_embedding": LABEL,
        "normalization": LABEL,
        "activation": LABEL,
        "window_layers": LABEL,
        "softmax_type": LABEL,
    },
    "CompilationRecord": {"why": NAME},
    "Settings": {
        "recompute_granularity": LABEL,
        "dataloader_type": LABEL,
        "pipeline_model_parallel_layout": LABEL,
        "tensorboard_dir": PATH,
        "memory_snapshot_path": PATH,
    },
    "PlanRecord": {"args": VALUE, "learning_rate": VALUE, "device": LABEL, "backend": LABEL, "precision": LABEL},
    "Model": {"function": NAME, "file": PATH, "sha256": ID},
    "Hardware": {"device": NAME, "cuda": VERSION, "processor": NAME, "unread": NAME},
    "LedgerRow": {"category": NAME, "name": NAME, "formula": NAME},
    "Moment": {"phase": NAME, "where": NAME},
    "TimeRow": {"name": NAME, "bound": LABEL, "formula": NAME},
    "TimePrediction": {"gpu": NAME, "notes": NAME},
    "CategoryBytes": {"category": NAME, "formula": NAME},
    "Prediction": {"failures": NAME},
    # ranks.json
    "RankAtFailure": {
        "place": LABEL,
        "host": HOST,
        "pids": ID,
        "phase": LABEL,
        "waits_for": LABEL,
        "left": MESSAGE,
        "stack": FRAME,
        "error": NAME,
        "message": MESSAGE,
        "error_stack": FRAME,
        "process_state": LABEL,
    },
    "FailureRecord": {"verdict": MESSAGE},
    # what a failed job left
    "StackFrame": {"function": NAME, "file": PATH},
    "RecordedGroup": {"name": KEY, "description": NAME},
    "RecordedCall": {"group": KEY, "name": NAME, "input_types": NAME, "output_types": NAME},
    "FlightRecording": {"source": SOURCE, "backend": NAME, "version": VERSION},
    "ThreadStack": {"name": LABEL},
    "ProcessStacks": {"source": SOURCE, "host": HOST, "command": COMMAND},
    "ProcessEnd": {"source": SOURCE, "host": HOST, "error": NAME, "message": MESSAGE},
    "LogEvent": {"source": SOURCE, "text": MESSAGE, "host": HOST, "device": NAME, "group": KEY, "call": NAME},
    "RankProgress": {"source": SOURCE, "host": HOST, "phase": LABEL, "place": LABEL, "process_state": LABEL},
    "UnansweredRequest": {"source": SOURCE, "why": MESSAGE, "host": HOST},
    "JobEvidence": {"unread": NAME},
}


def clean_record(record: Record, names: Substitutes) -> Record:
    """The record without texts that may not be shown.

    Args:
        record: A Struct of formats/, or a dataclass.
        names: What stands in the place of names.
    """
    rules = RULES.get(type(record).__name__, {})
    changed = {}
    for name in _list_fields(record):
        value = getattr(record, name)
        cleaned = _clean_value_of_field(value, rules.get(name, _take_out), names, 0)
        if cleaned is not value:
            changed[name] = cleaned
    if isinstance(record, msgspec.Struct):
        return msgspec.structs.replace(record, **changed)
    return dataclasses.replace(record, **changed)  # type: ignore[type-var]


def _list_fields(record: object) -> tuple[str, ...]:
    if isinstance(record, msgspec.Struct):
        return record.__struct_fields__
    return tuple(field.name for field in dataclasses.fields(record))  # type: ignore[arg-type]


def _clean_value_of_field(value: Any, rule: Rule, names: Substitutes, depth: int) -> Any:
    if isinstance(value, Enum):
        return value
    if isinstance(value, str):
        return rule(names, value) if value else value
    if value is None or isinstance(value, bool | int | float | msgspec.UnsetType):
        return value
    if isinstance(value, msgspec.Struct) or dataclasses.is_dataclass(value):
        return clean_record(value, names)
    if depth > MAX_DEPTH_OF_VALUES:
        names.drop("values of another form")
        return None
    if isinstance(value, dict):
        cleaned = {}
        for key, part in value.items():
            known = clean_key(names, key) if isinstance(key, str) else key
            rule_of_part = _take_out if isinstance(key, str) and names_secret(key) else rule
            cleaned[known] = _clean_value_of_field(part, rule_of_part, names, depth + 1)
        return cleaned
    if rule is VALUE and isinstance(value, list) and all(isinstance(part, str) for part in value):
        # a key's value is told by the word before it
        return names.clean_command(value)
    if isinstance(value, list | tuple):
        parts = [_clean_value_of_field(part, rule, names, depth + 1) for part in value]
        return type(value)(parts)
    names.drop("values of another form")
    return None
