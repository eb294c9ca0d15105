"""Where snapshots are written, and how."""

import os
import pickle
from pathlib import Path

from megatron_lite.errors import UserError

PROTOCOL = 4  # the viewer in the browser reads no newer one; Python 3.14 would write 5


class SnapshotFiles:
    """The files of one rank: PATH, or PATH with _rankN before its ending where several ranks write."""

    def __init__(self, path: str, rank: int, alone: bool):
        self._path, self._rank = Path(path), rank
        self.history = self._path if alone else self._named(f"_rank{rank}")

    @property
    def out_of_memory(self) -> Path:
        """What is written when memory runs out."""
        return self._named(f"_oom_rank{self._rank}")

    def on_demand(self, first: int, last: int) -> Path:
        """For a window that was asked for while the run went on."""
        return self.history.with_name(f"{self.history.stem}_steps{first}-{last}{self.history.suffix}")

    def prepare(self):
        """Make the folder. Raises UserError where no file can be written there."""
        given = f"--memory-snapshot-path {self._path}"
        try:
            self.history.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{given}: its folder cannot be made ({error.strerror}); name another file.") from error
        if self.history.is_dir():
            raise UserError(f"{given} is a folder; name a file in it, such as {self._path / 'snapshot.pickle'}.")

    def _named(self, addition: str) -> Path:
        return self._path.with_name(f"{self._path.stem}{addition}{self._path.suffix}")


def write_snapshot(path: Path, snapshot: dict):
    """All of it or nothing. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.unlink(missing_ok=True)
        with open(temporary, "xb") as file:
            pickle.dump(snapshot, file, protocol=PROTOCOL)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
