"""Arguments of events of a Perfetto trace: debug annotations of slices, extra data of GPU render stages."""

import json
import struct
from functools import lru_cache
from typing import Any

import msgspec

from megatron_lite.analysis.trace.protobuf_fields import Field, Fields, WireError, WireText, iterate_fields, read_fields
from megatron_lite.formats.perfetto_trace import AnnotationField, ExtraDataField

Arguments = dict[str, Any]
# names of the module's own: loops over all annotations find them sooner than an enum's members
_NAME_NUMBER = AnnotationField.NAME_IID
_NUMBERS = (
    AnnotationField.BOOL_VALUE,
    AnnotationField.UINT_VALUE,
    AnnotationField.INT_VALUE,
    AnnotationField.POINTER_VALUE,
)
_DOUBLE = AnnotationField.DOUBLE_VALUE
_TEXT = AnnotationField.STRING_VALUE
_JSON = AnnotationField.LEGACY_JSON_VALUE
_NAME = AnnotationField.NAME
_DICT_ENTRIES = AnnotationField.DICT_ENTRIES
_ARRAY_VALUES = AnnotationField.ARRAY_VALUES
_TEXT_NUMBER = AnnotationField.STRING_VALUE_IID
_MAX_DEPTH = 8  # of lists in lists; lists of shapes have 3
_MAX_KEPT_BYTES = 1024  # of a text or a list that is kept for the next time
_MAX_NESTED_BYTES = 1 << 16  # of a list in an annotation


def read_annotations(
    text: WireText, annotations: Fields, names: dict[int, str], texts: dict[int, str]
) -> dict[int, Arguments]:
    """Read the annotations of slices: those of each slice by its place, `annotations.message`.

    Args:
        text: What they stand in.
        annotations: The fields that are annotations.
        names: Names by number.
        texts: Texts by number.

    Returns:
        Values by name. Lists and dictionaries are JSON texts (msgspec.Raw).
    """
    fields = read_fields(text, annotations.start, annotations.end)
    own_names = [""] * len(annotations)
    values: list[Any] = [None] * len(annotations)
    rows = zip(
        fields.message.tolist(),
        fields.number.tolist(),
        fields.value.tolist(),
        fields.start.tolist(),
        fields.end.tolist(),
    )
    for place, number, value, start, end in rows:
        if number == _NAME:
            own_names[place] = decode_text(text[start:end])
        elif number == _NAME_NUMBER:
            own_names[place] = names.get(value, "")
        elif number in _NUMBERS:
            values[place] = value
        elif number in (_TEXT, _JSON):
            values[place] = decode_text(text[start:end])
        elif number == _TEXT_NUMBER:
            values[place] = texts.get(value, "")
        elif number == _DOUBLE:
            (values[place],) = struct.unpack_from("<d", text.content, start)
    found: dict[int, Arguments] = {}
    places = zip(annotations.message.tolist(), own_names, values, annotations.start.tolist(), annotations.end.tolist())
    for slice_place, name, value, start, end in places:
        # an annotation without a value is an empty list
        given = write_nested(text[start:end]) if value is None else value
        found.setdefault(slice_place, {})[name] = given
    return found


def read_extra_data(text: WireText, extra: Fields) -> dict[int, Arguments]:
    """Read the extra data of render stages, which are texts: those of each stage by its place, `extra.message`."""
    fields = read_fields(text, extra.start, extra.end)
    name_starts, name_ends = fields.places(ExtraDataField.NAME)
    value_starts, value_ends = fields.places(ExtraDataField.VALUE)
    rows = zip(
        extra.message.tolist(),
        name_starts.tolist(),
        name_ends.tolist(),
        value_starts.tolist(),
        value_ends.tolist(),
    )
    found: dict[int, Arguments] = {}
    for place, name_start, name_end, value_start, value_end in rows:
        name = decode_text(text[name_start:name_end])
        found.setdefault(place, {})[name] = decode_text(text[value_start:value_end])
    return found


def decode_text(code: bytes) -> str:
    """Decode a text; most are the same short ones again and again."""
    return _decode_known(code) if len(code) <= _MAX_KEPT_BYTES else code.decode("utf-8", "replace")


@lru_cache(maxsize=1 << 16)
def _decode_known(code: bytes) -> str:
    return code.decode("utf-8", "replace")


def write_nested(annotation: bytes) -> msgspec.Raw:
    """Write a list or a dictionary of a debug annotation as JSON; an empty list for what cannot be read.

    Operators' shapes are the same short ones again and again.
    """
    return _write_known(annotation) if len(annotation) <= _MAX_KEPT_BYTES else _write_nested(annotation)


@lru_cache(maxsize=1 << 14)
def _write_known(annotation: bytes) -> msgspec.Raw:
    return _write_nested(annotation)


def _write_nested(annotation: bytes) -> msgspec.Raw:
    try:
        value = _read_value(annotation, 0) if len(annotation) <= _MAX_NESTED_BYTES else []
    except WireError:
        value = []
    return msgspec.Raw(json.dumps(value).encode())


def _read_value(annotation: bytes, depth: int) -> Any:
    """The value of an annotation; an empty list for one without any."""
    entries: list[Any] = []
    members: dict[str, Any] = {}
    scalar = None
    for field in iterate_fields(annotation, 0, len(annotation)):
        own = annotation[field.start : field.end]
        if field.number == _ARRAY_VALUES and depth < _MAX_DEPTH:
            entries.append(_read_value(own, depth + 1))
        elif field.number == _DICT_ENTRIES and depth < _MAX_DEPTH:
            members[_read_name(own)] = _read_value(own, depth + 1)
        else:
            scalar = _read_scalar(annotation, field, scalar)
    if scalar is not None:
        return scalar
    return members or entries


def _read_scalar(annotation: bytes, field: Field, before: Any) -> Any:
    """The value that a field holds; `before` for a field that holds none."""
    if field.number in _NUMBERS:
        return field.value
    if field.number == _TEXT:
        return decode_text(annotation[field.start : field.end])
    if field.number == _DOUBLE and field.end - field.start == 8:
        (number,) = struct.unpack_from("<d", annotation, field.start)
        return number
    return before


def _read_name(annotation: bytes) -> str:
    """The name of an entry of a dictionary; '' where it has none."""
    for field in iterate_fields(annotation, 0, len(annotation)):
        if field.number == _NAME:
            return decode_text(annotation[field.start : field.end])
    return ""
