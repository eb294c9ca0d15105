"""A preprocessing that may be interrupted: the files it writes, and a small file that says how far they are good."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType

from megatron_lite.data.indexed_writer import PairWriter, Written
from megatron_lite.data.text_files import InputPosition
from megatron_lite.errors import DataError
from megatron_lite.run_folder import write_atomically
from megatron_lite.shared_files import read_foreign
from megatron_lite.units import counted

ENDING = ".unfinished"
SECONDS_BETWEEN_STATES = 5.0
RESUME_VERSION = 1


@dataclass
class DataProgress:
    """The end of the last chunk that was written, and what was counted up to there."""

    place: InputPosition = field(default_factory=InputPosition)
    documents: int = 0  # of all keys
    text_bytes: int = 0
    empty: int = 0  # documents that gave no token
    skipped: int = 0  # bad lines


class Unfinished:
    """A context manager around the writing of all pairs of a run.

    An earlier run with the same settings is continued at its `progress`, unless it skipped bad lines and this one may
    not; any other is begun anew. When the block ends well the pairs take their names. When it fails, they are kept if
    another run could go on with them, else removed.
    """

    def __init__(
        self,
        output_prefix: str,
        pairs: Sequence[PairWriter],
        settings: dict[str, object],
        may_skip: bool,
        say: Callable[[str], None],
    ):
        """
        Args:
            output_prefix: Beginning of the names of the pairs, and of the small file.
            pairs: What is written.
            settings: All that the bytes depend on, by the name of the flag, in values of JSON.
            may_skip: Whether this run may leave bad lines out.
            say: Is told what becomes of an earlier run.
        """
        self.progress = DataProgress()
        self._prefix = output_prefix
        self._pairs = pairs
        self._may_skip = may_skip
        self._say = say
        self._path = Path(f"{output_prefix}{ENDING}.json")
        self._partial = self._path.with_name(f".{self._path.name}.partial")  # of write_atomically
        self._settings: dict[str, object] = json.loads(json.dumps(settings))
        self._saved = time.monotonic()

    def __enter__(self) -> "Unfinished":  # noqa: PYI034 - Self came with Python 3.11
        try:
            for pair in self._pairs:
                pair.open()
            for pair, good in zip(self._pairs, self._restore()):
                pair.cut(good)
        except BaseException:
            for pair in self._pairs:
                pair.close()
            raise
        return self

    def save_progress(self) -> None:
        """Bring it to the disk with all that the pairs were given, if that was not done lately."""
        if time.monotonic() - self._saved < SECONDS_BETWEEN_STATES:
            return
        for pair in self._pairs:
            pair.sync()
        written = [pair.written for pair in self._pairs]
        state = {
            "version": RESUME_VERSION,
            "settings": self._settings,
            "progress": asdict(self.progress),
            "written": written,
        }
        try:
            write_atomically(self._path, json.dumps(state, indent=1) + "\n")
        except OSError as error:
            raise DataError(f"{self._path}: cannot be written ({error.strerror}); free some space") from None
        self._saved = time.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                for pair in self._pairs:
                    pair.complete()
                for pair in self._pairs:
                    pair.place()
                self._path.unlink(missing_ok=True)
                self._partial.unlink(missing_ok=True)  # of a run that was killed
        finally:
            is_kept = self._path.exists()
            if is_kept:
                self._say(f"{self._prefix}: what is done so far is kept; the same command goes on with it")
            else:
                self._partial.unlink(missing_ok=True)
            for pair in self._pairs:
                if is_kept:
                    pair.close()
                else:
                    pair.discard()

    def _restore(self) -> list[Written]:
        """Set `progress` to that of an earlier run and return what the pairs held then; else begin anew."""
        anew = [Written()] * len(self._pairs)
        if not self._path.exists():
            return anew
        try:
            state = json.loads(read_foreign(self._path))
            found = DataProgress(**state["progress"] | {"place": InputPosition(**state["progress"]["place"])})
            written = [Written(*numbers) for numbers in state["written"]]
            before = state["settings"]
            changed = [name for name, value in self._settings.items() if before.get(name) != value]
            if found.skipped and not self._may_skip:
                changed.append("--on-error")
            if state["version"] != RESUME_VERSION or before.keys() != self._settings.keys():
                objection = "was written by another version"
            elif changed:
                objection = f"{', '.join(changed)} changed since that run was interrupted"
            elif len(written) != len(self._pairs) or not all(map(PairWriter.holds, self._pairs, written)):
                objection = "the files it names are missing or truncated"
            else:
                self.progress = found
                self._say(f"{self._prefix}: goes on after {counted(found.documents, 'document')} of an interrupted run")
                return written
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            objection = "cannot be read"
        self._say(f"{self._path}: {objection}; starting anew")
        # Before the pairs are cut: it must never describe other bytes than it was written for.
        self._path.unlink()
        return anew
