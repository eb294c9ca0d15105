"""Writes a trace of torch.profiler anew, with those of its values that a report reads."""

import gzip
import re
import shutil
import tempfile
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec

from megatron_lite.analysis.trace.diagnostics import read_warnings
from megatron_lite.analysis.trace.kineto import (
    CRITICAL_PATH,
    MAX_EVENTS,
    OUTPUT_MASK,
    open_chunks,
    read_header,
    read_kept_damage,
)
from megatron_lite.analysis.trace.kineto_json import NO_ARGS, Chunks, Event, EventArgs, Id, read_text
from megatron_lite.analysis.trace.perfetto import PacketChunks
from megatron_lite.bundle.names import Substitutes
from megatron_lite.formats.trace_header import CORES_IN_TRACE, HARDWARE_IN_TRACE, KEPT_DAMAGE, KeptDamage

AnyChunks = Chunks | PacketChunks
_DIMS = re.compile(rb"[\[\]\d,\s-]*")
# fields that may be shown as far as they are numbers
_NUMBERS = tuple(field for field in msgspec.structs.fields(EventArgs) if field.type is not msgspec.Raw)
# fields of which known words stay
_NAMES = ("collective", "dtype", "group", "copy", "source_memory", "target_memory")
_ENCODED = {field.name: field.encode_name for field in msgspec.structs.fields(EventArgs)}
# X: a span; B and E: its ends; M: a track's name
_PHASES = ("X", "B", "E", "M")
_MEMORY = "[memory]"
_VERSION = re.compile(r"[\d.]{1,16}")


class BundledEvent(msgspec.Struct, omit_defaults=True):
    """An entry of traceEvents."""

    ph: str
    cat: str = ""
    name: str = ""
    pid: Id = None
    tid: Id = None
    ts: float | Decimal | None = None
    dur: float | None = None
    args: dict[str, Any] = {}


_encoder = msgspec.json.Encoder(decimal_format="number")


def clean_trace(source: Path, target: Path, names: Substitutes) -> None:
    """Write the trace in `source` to `target`, gzipped, without what may not be shown.

    Args:
        source: A trace of torch.profiler, as JSON or gzipped JSON.
        target: The new file.
        names: What stands in the place of names.

    Raises:
        TraceError: `source` is no trace.
    """
    chunks = open_chunks(source, MAX_EVENTS)
    with tempfile.TemporaryFile() as events:
        with gzip.open(events, "wb", compresslevel=1) as written:
            _write_events(chunks, written, names)
        events.seek(0)
        # who looks at a file's beginning finds ranks there: the header comes first, and is known last
        header = _encoder.encode(_clean_header(chunks, source, names)).removesuffix(b"}")
        with gzip.open(target, "wb", compresslevel=6) as file, gzip.open(events, "rb") as read:
            file.write(header + (b"," if len(header) > 1 else b"") + b'"traceEvents":[\n')
            shutil.copyfileobj(read, file)
            file.write(b"\n]}\n")
    names.drop("other keys of the trace's header", len(set(chunks.header) - _HEADER_KEYS))


def _write_events(chunks: AnyChunks, file: gzip.GzipFile, names: Substitutes) -> None:
    """Write the events that are kept, with commas between them."""
    cleaner = _EventCleaner(names)
    is_first = True
    for chunk in chunks:
        text = cleaner.encode(chunk)
        if text:
            file.write(text if is_first else b",\n" + text)
            is_first = False


class _EventCleaner:
    """Cleans the events of one file."""

    def __init__(self, names: Substitutes):
        self.names = names
        self._types: dict[bytes, msgspec.Raw | None] = {}

    def encode(self, events: Sequence[Event]) -> bytes:
        """The entries that are kept, with commas between them."""
        kept = [_encoder.encode(self._clean(event)) for event in events if _is_read(event)]
        self.names.drop("events that no report reads (flows and others)", len(events) - len(kept))
        return b",\n".join(kept)

    def _clean(self, event: Event) -> BundledEvent:
        names = self.names
        category = event.cat or ""
        is_label = category in ("user_annotation", "gpu_user_annotation")
        return BundledEvent(
            ph=event.ph,
            cat=names.clean_name(category),
            name=names.clean_label(event.name) if is_label else names.clean_name(event.name),
            pid=self._clean_id(event.pid),
            tid=self._clean_id(event.tid),
            ts=event.ts,
            dur=event.dur,
            args=self._clean_args(event.args or NO_ARGS),
        )

    def _clean_id(self, given: Id) -> Id:
        return self.names.clean_label(given) if isinstance(given, str) else given

    def _clean_args(self, args: EventArgs) -> dict[str, Any]:
        if args is NO_ARGS:
            return {}
        cleaned: dict[str, Any] = {}
        for field in _NUMBERS:
            value = getattr(args, field.name)
            if isinstance(value, int | float) and value != field.default:
                cleaned[field.encode_name] = value
        for name in _NAMES:
            text = getattr(args, name)
            if isinstance(text, str):
                cleaned[_ENCODED[name]] = self.names.clean_name(text)
        if args.dims:
            self._add_shapes(cleaned, args)
        if args.task:
            cleaned[_ENCODED["task"]] = self.names.clean_name(read_text(args.task))
        if args.label:
            cleaned[_ENCODED["label"]] = self.names.clean_label(read_text(args.label))
        return cleaned

    def _add_shapes(self, cleaned: dict[str, Any], args: EventArgs) -> None:
        """Add an operator's shapes and types and, of its values, the mask of its results."""
        if not _DIMS.fullmatch(args.dims):
            self.names.drop("shapes that are no numbers")
            return
        cleaned[_ENCODED["dims"]] = args.dims
        if args.dtypes:
            types = self._clean_types(bytes(args.dtypes))
            if types is not None:
                cleaned[_ENCODED["dtypes"]] = types
        if not args.values:
            return
        mask = OUTPUT_MASK.search(args.values)
        if mask:
            cleaned[_ENCODED["values"]] = [mask[0].decode().strip('"')]
        else:
            self.names.drop("values of operators' arguments")

    def _clean_types(self, text: bytes) -> msgspec.Raw | None:
        """A list of types as JSON; None for what is none."""
        if text not in self._types:
            try:
                types = msgspec.json.decode(text, type=list[str])
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                self._types[text] = None
            else:
                cleaned = [self.names.clean_name(one) for one in types]
                self._types[text] = msgspec.Raw(msgspec.json.encode(cleaned))
        return self._types[text]


def _is_read(event: Event) -> bool:
    if event.cat == CRITICAL_PATH:
        # tells that another tool has left out events
        return True
    if event.ph == "i":
        return event.name == _MEMORY
    if event.ph == "C":
        # samples of a device's counters; others' counters have names for their values
        return (event.args or NO_ARGS).counter is not None
    return event.ph in _PHASES


_HEADER_KEYS = {
    "schemaVersion",
    "deviceProperties",
    "distributedInfo",
    "baseTimeNanoseconds",
    "with_stack",
    "record_shapes",
    "cuda_runtime_version",
    "cuda_driver_version",
    "ERROR",
    "WARNING",
    CORES_IN_TRACE,
    HARDWARE_IN_TRACE,
    KEPT_DAMAGE,
    "traceEvents",
}


def _clean_header(chunks: AnyChunks, source: Path, names: Substitutes) -> dict[str, Any]:
    """What stands beside the events, as its reader takes it."""
    header = chunks.header
    read = read_header(header, source, 0)
    cleaned: dict[str, Any] = {}
    for key in ("schemaVersion", "cuda_runtime_version", "cuda_driver_version"):
        if isinstance(header.get(key), int):
            cleaned[key] = header[key]
    for key in ("with_stack", "record_shapes"):
        if key in header:
            cleaned[key] = bool(header[key])
    if read["base_ns"] is not None and "baseTimeNanoseconds" in header:
        cleaned["baseTimeNanoseconds"] = read["base_ns"]
    host = read["facts"].get("host_name")
    if isinstance(host, str):
        cleaned["host_name"] = names.clean_host(host)
    if "deviceProperties" in header:
        rows = zip(read["device_ids"], read["devices"])
        cleaned["deviceProperties"] = [{"id": number, "name": names.clean_name(name)} for number, name in rows]
    if isinstance(header.get("distributedInfo"), dict):
        cleaned["distributedInfo"] = _clean_ranks(header["distributedInfo"], read, names)
    for key, part in ((CORES_IN_TRACE, read["cores"]), (HARDWARE_IN_TRACE, read["hardware"])):
        if part is not None and key in header:
            cleaned[key] = _keep_numbers(header[key])
    warnings = [names.clean_name(text) for text in read_warnings(header)]
    if warnings:
        cleaned["WARNING"] = warnings
    damage = _describe_damage(chunks, names)
    if damage is not None:
        cleaned[KEPT_DAMAGE] = msgspec.to_builtins(damage)
    return cleaned


def _clean_ranks(written: dict[str, Any], read: dict[str, Any], names: Substitutes) -> dict[str, Any]:
    """The header's "distributedInfo"."""
    facts = read["facts"]
    cleaned: dict[str, Any] = {"rank": read["rank"], "world_size": read["world_size"]}
    if isinstance(facts.get("backend"), str):
        cleaned["backend"] = names.clean_name(facts["backend"])
    if isinstance(facts.get("pg_count"), int):
        cleaned["pg_count"] = facts["pg_count"]
    version = facts.get("nccl_version")
    if isinstance(version, str) and _VERSION.fullmatch(version):
        cleaned["nccl_version"] = version
    groups = written.get("pg_config")
    sizes = [row.get("pg_size", row.get("group_size")) for row in groups if isinstance(row, dict)] if groups else []
    cleaned["pg_config"] = [
        {
            "pg_name": names.clean_name(group.name),
            "pg_desc": names.clean_name(group.description),
            "pg_size": size if isinstance(size, int) else len(group.ranks),
            "ranks": list(group.ranks),
        }
        for group, size in zip(read["groups"], sizes)
    ]
    return {key: value for key, value in cleaned.items() if value is not None}


def _keep_numbers(written: object) -> dict[str, float]:
    """The numbers of a record whose fields its reader has found sound."""
    if not isinstance(written, dict):
        return {}
    return {str(key): value for key, value in written.items() if isinstance(value, int | float)}


def _describe_damage(chunks: AnyChunks, names: Substitutes) -> KeptDamage | None:
    """What was wrong with the file, so that a report on the new one knows it."""
    kept = read_kept_damage(chunks.header)
    text = chunks.damage or kept.text
    cut = chunks.cut or kept.cut
    return KeptDamage(text=names.clean_name(text), cut=cut) if text or cut else None
