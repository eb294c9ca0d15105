"""Validators of report.json against its schema."""

import json

import pytest
from report_schema import FILE


def validators():
    """(of the schema in the documentation, of one that allows no further key)."""
    schema = json.loads(FILE.read_text(encoding="utf-8"))
    validator = pytest.importorskip("jsonschema").Draft202012Validator
    validator.check_schema(schema)
    objects = {name: one | {"additionalProperties": False} for name, one in schema["$defs"].items()}
    return validator(schema), validator(schema | {"additionalProperties": False, "$defs": objects})
