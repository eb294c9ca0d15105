"""Writes a memory snapshot anew, with those of its values that a report reads."""

import pickle
from pathlib import Path
from typing import Any

from megatron_lite.analysis.memory.snapshot_file import choose_snapshot, read_values
from megatron_lite.bundle.names import Substitutes

_EVENT = {
    "action": Substitutes.clean_label,
    "compile_context": Substitutes.clean_name,
    "user_metadata": Substitutes.clean_label,
}
_BLOCK = {"state": Substitutes.clean_label, "user_metadata": Substitutes.clean_label}
_SEGMENT = {"segment_type": Substitutes.clean_label}
_ANNOTATION = {"stage": Substitutes.clean_label, "name": Substitutes.clean_name}
_FRAME = {"filename": Substitutes.clean_path, "name": Substitutes.clean_name}
_NUMBERS = {
    "addr", "address", "size", "requested_size", "device_free", "stream", "time_us", "device", "total_size",
    "allocated_size", "active_size", "line", "is_expandable",
}  # fmt: skip
PICKLE_PROTOCOL = 4


def clean_snapshot(source: Path, target: Path, names: Substitutes) -> None:
    """Write the snapshot in `source` to `target`, a pickle as torch writes it, without what may not be shown.

    Args:
        source: A memory snapshot in any of its forms.
        target: The new file.
        names: What stands in the place of names.

    Raises:
        UserError: `source` is no snapshot.
    """
    raw, _ = choose_snapshot(read_values(source))
    cleaner = _SnapshotCleaner(names)
    target.write_bytes(pickle.dumps(cleaner.clean(raw), PICKLE_PROTOCOL))


class _SnapshotCleaner:
    """Cleans the parts of one snapshot; equal stacks become one list, as they are in memory."""

    def __init__(self, names: Substitutes):
        self.names = names
        self._frames: dict[tuple[object, object, object], dict[str, Any]] = {}
        self._stacks: dict[tuple[int, ...], list[dict[str, Any]]] = {}

    def clean(self, raw: Any) -> Any:
        """The snapshot, or the bare list of its segments."""
        if isinstance(raw, list | tuple):
            return [self._clean_segment(segment) for segment in raw]
        self.names.drop("other keys of the snapshot", len(set(raw) - _KEYS))
        cleaned: dict[str, Any] = {"segments": [self._clean_segment(segment) for segment in raw.get("segments") or ()]}
        cleaned["device_traces"] = [
            [self._clean_part(event, _EVENT) for event in events] for events in raw.get("device_traces") or ()
        ]
        settings = raw.get("allocator_settings")
        if isinstance(settings, dict):
            cleaned["allocator_settings"] = {
                self.names.clean_name(str(name)): self._clean_setting(value) for name, value in settings.items()
            }
        marks = raw.get("external_annotations")
        if marks:
            cleaned["external_annotations"] = [self._clean_part(mark, _ANNOTATION) for mark in marks]
        return cleaned

    def _clean_setting(self, value: object) -> object:
        if isinstance(value, bool | int | float):
            return value
        return self.names.clean_label(value) if isinstance(value, str) else None

    def _clean_segment(self, segment: Any) -> dict[str, Any]:
        cleaned = self._clean_part(segment, _SEGMENT)
        pool = segment.get("segment_pool_id")
        if isinstance(pool, tuple | list) and all(isinstance(number, int) for number in pool):
            cleaned["segment_pool_id"] = tuple(pool)
        cleaned["blocks"] = [self._clean_block(block) for block in segment.get("blocks") or ()]
        return cleaned

    def _clean_block(self, block: Any) -> dict[str, Any]:
        cleaned = self._clean_part(block, _BLOCK)
        if isinstance(block.get("history"), list | tuple):
            # of torch 1.13 and 2.0: who allocated the block before
            cleaned["history"] = [self._clean_history(entry) for entry in block["history"]]
        return cleaned

    def _clean_history(self, entry: Any) -> dict[str, Any]:
        cleaned = self._clean_part(entry, {})
        if isinstance(entry.get("real_size"), int):
            cleaned["real_size"] = entry["real_size"]
        return cleaned

    def _clean_part(self, part: Any, texts: dict[str, Any]) -> dict[str, Any]:
        """An event, segment, block or annotation: its numbers, its known texts and its stack."""
        cleaned: dict[str, Any] = {}
        for key, value in part.items():
            if key in _NUMBERS and isinstance(value, int | float):
                cleaned[key] = value
            elif key in texts and isinstance(value, str):
                cleaned[key] = texts[key](self.names, value)
            elif key == "frames" and isinstance(value, list | tuple):
                cleaned[key] = self._clean_stack(value)
        return cleaned

    def _clean_stack(self, frames: Any) -> list[dict[str, Any]]:
        key = tuple(id(frame) for frame in frames)
        if key not in self._stacks:
            self._stacks[key] = [self._clean_frame(frame) for frame in frames if isinstance(frame, dict)]
        return self._stacks[key]

    def _clean_frame(self, frame: dict[str, Any]) -> dict[str, Any]:
        key = (frame.get("filename"), frame.get("line"), frame.get("name"))
        if key not in self._frames:
            self._frames[key] = self._clean_part(frame, _FRAME)
        return self._frames[key]


_KEYS = {"segments", "device_traces", "allocator_settings", "external_annotations"}
