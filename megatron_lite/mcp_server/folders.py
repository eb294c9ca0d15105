"""The folders that a server was started with: what lies in them may be read, and nothing else."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_lite.errors import UserError

# What separates a path from what stands around it in a word of a command line: --load=A, 0.5:A, A,B, "A B".
SEPARATORS = re.compile(r"[=,:;\s\"']+")
MAX_NAMED = 20  # files and folders of a named folder, in a message
MAX_PATH_LETTERS = 200  # of a path that a message repeats


@dataclass(frozen=True)
class NamedFolders:
    """The folders that a server was started with.

    Attributes:
        roots: Their paths, absolute and without links.
    """

    roots: tuple[Path, ...]

    def find(self, text: str) -> Path:
        """Find a file or folder within the named folders.

        Args:
            text: Its path, absolute or relative to one of the named folders.

        Returns:
            The path, absolute and without links.

        Raises:
            UserError: Nothing is there, or it lies outside: also behind "..", or behind a link.
        """
        named = text[:MAX_PATH_LETTERS]
        for root in self.roots:
            place = _resolve(root, text)
            if not self._contains(place):
                raise UserError(
                    f"{named}: {self._describe_outside()}; name a path within them, or start it with that folder, too."
                )
            if os.path.exists(place):
                return place
        raise UserError(f"{named}: there is no such file or folder; {self._describe_content()}")

    def _contains(self, place: Path) -> bool:
        """Whether a path, absolute and without links, lies in one of the folders, or is one of them."""
        return any(place.is_relative_to(root) for root in self.roots)

    def find_root(self, place: Path) -> Path:
        """The named folder that holds a path which `find` returned."""
        return next(root for root in self.roots if place.is_relative_to(root))

    def check_words(self, words: Sequence[str], folder: Path) -> None:
        """Refuse words of a command line that name something outside, whether it exists or not.

        Args:
            words: The words, as typed; a word may hold several paths.
            folder: Where relative paths begin.

        Raises:
            UserError: One of them names something outside.
        """
        for word in words:
            for piece in SEPARATORS.split(word):
                if piece and not self._contains(_resolve(folder, piece)):
                    raise UserError(
                        f"{piece[:MAX_PATH_LETTERS]}: {self._describe_outside()}; leave it out, since a plan needs "
                        "neither data nor checkpoints, or start the server with that folder, too."
                    )

    def _describe_outside(self) -> str:
        return f"lies outside of the folders that this server was started with ({self._list()})"

    def _describe_content(self) -> str:
        """Name what lies in the folders, so that a program that guesses a path can choose one."""
        parts = []
        for root in self.roots:
            names = sorted(os.listdir(root)) if root.is_dir() else []
            more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
            parts.append(f"{root} has {', '.join(names[:MAX_NAMED]) or 'nothing in it'}{more}")
        return "; ".join(parts)

    def _list(self) -> str:
        return ", ".join(map(str, self.roots))


def _resolve(folder: Path, text: str) -> Path:
    """Follow all links and ".." of a path; UserError for a text that no path can be."""
    try:
        return Path(os.path.realpath(folder / text))
    except (OSError, ValueError) as error:
        named = text[:MAX_PATH_LETTERS].replace("\0", "?")
        raise UserError(f"{named}: is no path ({error}); check it.") from None
