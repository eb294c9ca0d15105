"""A preprocessing that may be interrupted: the files it writes, and a small file that says how far they are good."""

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from megatron_lite.data.indexed_writer import PairWriter, Written
from megatron_lite.data.text_files import Place
from megatron_lite.errors import DataError
from megatron_lite.units import count

ENDING = ".unfinished"
SECONDS_BETWEEN_STATES = 5.0
VERSION = 1


@dataclass(frozen=True)
class Reached:
    """The end of the last chunk that was written, and what was counted up to there."""

    place: Place = field(default_factory=Place)
    documents: int = 0
    text_bytes: int = 0
    empty: int = 0
    skipped: int = 0

    def plus(self, place: Place, documents: int, text_bytes: int, empty: int, skipped: int) -> "Reached":
        return Reached(
            place, self.documents + documents, self.text_bytes + text_bytes, self.empty + empty, self.skipped + skipped
        )


class Unfinished:
    """A context manager around the writing of all pairs of a run.

    `settings` is all that the bytes depend on, by the name of the flag, as JSON. An earlier run with the same settings
    is continued at `reached`, unless it skipped bad lines and this one may not; any other is begun anew, and say() is
    told. When the block ends well the pairs take their names. When it fails, they are kept if another run could go on
    with them, else removed.
    """

    def __init__(
        self,
        output_prefix: str,
        pairs: Sequence[PairWriter],
        settings: dict,
        may_skip: bool,
        say: Callable[[str], None],
    ):
        self.reached = Reached()
        self._path = Path(f"{output_prefix}{ENDING}.json")
        self._next_path = Path(f"{self._path}.next")
        self._prefix = output_prefix
        self._pairs = pairs
        self._settings = json.loads(json.dumps(settings))
        self._may_skip = may_skip
        self._say = say
        self._saved = time.monotonic()

    def __enter__(self):
        try:
            for pair in self._pairs:
                pair.open()
            written = self._restore()
            for pair, good in zip(self._pairs, written):
                pair.cut(good)
        except BaseException:
            self._close()
            raise
        return self

    def reach(self, reached: Reached) -> None:
        """All up to there was given to the pairs. Now and then this is brought to the disk."""
        self.reached = reached
        if time.monotonic() - self._saved >= SECONDS_BETWEEN_STATES:
            self._save()
            self._saved = time.monotonic()

    def __exit__(self, kind, error, trace) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            if self._path.exists():
                self._say(f"{self._prefix}: what is done so far is kept; the same command goes on with it")
                self._close()
            else:
                self._next_path.unlink(missing_ok=True)
                for pair in self._pairs:
                    pair.discard()

    def _close(self) -> None:
        for pair in self._pairs:
            pair.close()

    def _finish(self) -> None:
        for pair in self._pairs:
            pair.complete()
        for pair in self._pairs:
            pair.place()
        self._path.unlink(missing_ok=True)

    def _save(self) -> None:
        for pair in self._pairs:
            pair.sync()
        written = [pair.written for pair in self._pairs]
        state = {"version": VERSION, "settings": self._settings, "reached": asdict(self.reached), "written": written}
        try:
            # A name that the next run finds again: dying here must not leave a file behind for good.
            with open(self._next_path, "w", encoding="utf-8") as file:
                file.write(json.dumps(state, indent=1) + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(self._next_path, self._path)
        except OSError as error:
            raise DataError(f"{self._path}: cannot be written ({error.strerror}); free some space") from None

    def _restore(self) -> list[Written]:
        """Set `reached` to what an earlier run reached and return what the pairs held then; else begin anew."""
        anew = [Written()] * len(self._pairs)
        if not self._path.exists():
            return anew
        try:
            state = json.loads(self._path.read_text(encoding="utf-8"))
            reached = Reached(**state["reached"])
            reached = replace(reached, place=Place(**state["reached"]["place"]))
            written = [Written(*numbers) for numbers in state["written"]]
            objection = self._objection(state, written)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            objection = "cannot be read"
        if objection:
            self._say(f"{self._path}: {objection}; starting anew")
            # Before the pairs are cut: it must never describe other bytes than it was written for.
            self._path.unlink()
            return anew
        self.reached = reached
        self._say(f"{self._prefix}: goes on after {count(reached.documents)} documents of an interrupted run")
        return written

    def _objection(self, state: dict, written: list[Written]) -> str | None:
        before = state["settings"]
        changed = [name for name in self._settings if before.get(name) != self._settings[name]]
        if state["reached"]["skipped"] and not self._may_skip:
            changed.append("--on-error")
        if state["version"] != VERSION or before.keys() != self._settings.keys():
            return "was written by another version"
        if changed:
            return f"{', '.join(changed)} changed since that run was interrupted"
        if len(written) != len(self._pairs) or not all(map(PairWriter.holds, self._pairs, written)):
            return "the files it tells of are gone or cut short"
        return None


def identity(path: str | Path) -> list:
    """What tells whether a file is still the same."""
    status = os.stat(path)
    return [os.path.abspath(path), status.st_size, status.st_mtime_ns]
