"""Parts of JSON: found by a path such as "findings[0].evidence", and cut to a number of characters.

What is cut is named by such paths, so that whoever reads the answer can ask for it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from megatron_lite.errors import UserError

STEP = re.compile(r"""\.?([^.\[\]"]+)|\["([^"]*)"\]|\[(\d+)\]|\[(\d*):(\d*)\]""")
PLAIN_KEY = re.compile(r"""[^.\[\]"]+""")
MIN_PART_CHARACTERS = 400  # characters: of what is larger than its share, a smaller part is left out as a whole
MIN_ENTRY_CHARACTERS = 40  # characters: entries of an object with less each are kept in their order instead
MAX_PATH = 200  # characters of a path; a part with a longer one is named by what it lies in
MAX_CUTS = 16  # places that are named; further ones are counted
MAX_KEYS_NAMED = 20  # in the message on a section that is not there
SHRINK = 0.85  # of the room for a content, whose list of cuts took more than is left
ENTRY = len('"": ,')  # around an entry of an object
QUOTES = len('""')


class Cut(msgspec.Struct, frozen=True):
    """A part that an answer leaves out."""

    # The part's path, which the parameter `section` takes.
    section: str
    # Characters of it, as JSON.
    characters: int


class Shortened(msgspec.Struct, frozen=True):
    """Content that fits into a number of characters."""

    # What is left of it.
    content: Any
    # What is left out; the first places.
    cut: tuple[Cut, ...] = ()
    # Places that are left out, too, and not in `cut`.
    further_cuts: int = 0

    def count_characters(self) -> int:
        """Count the characters of the content and the list of cuts."""
        return count_characters(msgspec.to_builtins(self))


def find_section(content: Any, section: str) -> Any:
    """Find a part of JSON.

    Args:
        content: The whole.
        section: The path: keys behind dots, or as ["key"] where they hold dots; numbers of a list, and ranges of a
            list or text, in brackets: 'ranks_seen[0].time.phases["a.b"]', "findings[2:4]".

    Raises:
        UserError: Nothing is there.
    """
    at = 0
    found = content
    while at < len(section):
        step = STEP.match(section, at)
        if step is None:
            raise UserError(f"section {section}: not a path such as findings[0].evidence; check its brackets.")
        found = _take(found, step, section)
        at = step.end()
    return found


def _take(value: Any, step: re.Match[str], section: str) -> Any:
    """Take one step into a value; UserError where it leads nowhere."""
    plain_key, quoted_key, number, first, last = step.groups()
    key = plain_key if quoted_key is None else quoted_key
    is_list = isinstance(value, list)
    if isinstance(value, Mapping) and key in value:
        return value[key]
    if is_list and number and int(number) < len(value):
        return value[int(number)]
    is_range = first is not None
    if is_range and isinstance(value, (list, str)):
        begin = int(first or 0)
        end = int(last or len(value))
        return value[begin:end]
    raise UserError(f"section {section}: there is no {step[0].lstrip('.')}; there is {_list_steps(value)}.")


def _list_steps(value: Any) -> str:
    if isinstance(value, Mapping):
        keys = list(map(str, value))
        return ", ".join(keys[:MAX_KEYS_NAMED]) or "nothing in it"
    return f"a list of {len(value)}" if isinstance(value, list) else "nothing below it"


def count_characters(value: Any) -> int:
    """Count the characters of a value as JSON."""
    return len(json.dumps(value, ensure_ascii=False))


def shorten(content: Any, room: int, path: str = "") -> Shortened:
    """Cut a content so that it and the list of what was cut fit into a number of characters.

    Args:
        content: JSON.
        room: Characters of both, as JSON.
        path: Path of the content in the whole.
    """
    left = float(room)
    while left >= MIN_PART_CHARACTERS:
        cuts: list[Cut] = []
        kept = _fit(content, int(left), path, cuts)
        further = max(len(cuts) - MAX_CUTS, 0)
        found = Shortened(kept, tuple(cuts[:MAX_CUTS]), further)
        if found.count_characters() <= room:
            return found
        left *= SHRINK
    return Shortened(None, (Cut(path, count_characters(content)),))


def _fit(value: Any, room: int, path: str, cuts: list[Cut]) -> Any:
    """Cut a value to a room; adds what is left out to `cuts`."""
    if count_characters(value) <= room:
        return value
    if isinstance(value, Mapping):
        return _fit_object(value, room, path, cuts)
    if isinstance(value, list):
        return _fit_list(value, room, path, cuts)
    if isinstance(value, str):
        return _fit_text(value, room, path, cuts)
    cuts.append(Cut(path, count_characters(value)))
    return None


def _fit_text(text: str, room: int, path: str, cuts: list[Cut]) -> str:
    number = max(room - QUOTES, 0)
    while count_characters(text[:number]) > max(room, QUOTES):
        # quotes and ends of lines take two characters
        number = int(number * SHRINK)
    rest = text[number:]
    cuts.append(Cut(f"{path}[{number}:]", count_characters(rest)))
    return text[:number]


def _fit_object(value: Mapping[str, Any], room: int, path: str, cuts: list[Cut]) -> dict[str, Any]:
    """Keep small entries whole, and of each large one an equal share; in the order of the object."""
    sizes = {}
    for key, item in value.items():
        sizes[key] = count_characters(key) + ENTRY + count_characters(item)
    share = _find_share(list(sizes.values()), room)
    if share < MIN_ENTRY_CHARACTERS:
        return _fit_first_entries(value, sizes, room, path, cuts)
    kept: dict[str, Any] = {}
    for key, item in value.items():
        inner = _join(path, key)
        around = count_characters(key) + ENTRY
        if sizes[key] <= share:
            kept[key] = item
        elif share - around >= MIN_PART_CHARACTERS:
            kept[key] = _fit(item, share - around, inner, cuts)
        else:
            cuts.append(Cut(inner, sizes[key] - around))
    return kept


def _join(path: str, key: str) -> str:
    if PLAIN_KEY.fullmatch(key):
        inner = f"{path}.{key}" if path else key
    else:
        inner = f'{path}["{key}"]'
    return inner if len(inner) <= MAX_PATH else path


def _fit_first_entries(
    value: Mapping[str, Any], sizes: Mapping[str, int], room: int, path: str, cuts: list[Cut]
) -> dict[str, Any]:
    """Keep the first entries of an object with very many.

    Args:
        value: The object.
        sizes: Characters of each entry.
        room: Characters for all of them.
        path: The object's path.
        cuts: Gets what is left out.
    """
    kept: dict[str, Any] = {}
    left = room
    for key, item in value.items():
        left -= sizes[key]
        if left < 0:
            break
        kept[key] = item
    left_out = list(sizes.values())[len(kept) :]
    cuts.append(Cut(path, sum(left_out)))
    return kept


def _find_share(sizes: Sequence[int], room: int) -> int:
    """Find the size up to which entries are kept whole, so that all of them, cut to it, fill the room."""
    left = room
    ordered = sorted(sizes)
    for number, size in enumerate(ordered):
        share = left // (len(ordered) - number)
        if size > share:
            return max(share, 0)
        left -= size
    return room


def _fit_list(value: list[Any], room: int, path: str, cuts: list[Cut]) -> list[Any]:
    """Keep the first items; of the first one a part where not even it fits."""
    kept: list[Any] = []
    left = room - len("[]")
    for item in value:
        size = count_characters(item) + len(", ")
        if size > left:
            break
        kept.append(item)
        left -= size
    has_parts = isinstance(value[0], (list, Mapping))
    if not kept and has_parts and left >= MIN_PART_CHARACTERS:
        part = _fit(value[0], left, f"{path}[0]", cuts)
        kept.append(part)
    rest = value[len(kept) :]
    if rest:
        cuts.append(Cut(f"{path}[{len(kept)}:]", count_characters(rest)))
    return kept
