"""Files of PyTorch that hold plain values, as pickles or JSON, read without running anything that they name."""

import json
import re
from dataclasses import dataclass
from typing import Any

import msgspec

from megatron_lite.pickle_bounds import BoundedUnpickler, OutsideError, PickleBoundError
from megatron_lite.terminal import make_printable

PICKLE = re.compile(rb"\x80[\x02-\x05]|[}\]]q|\((dp|lp)\d+\n")  # protocols 2 to 5, 1, 0
JSON = re.compile(rb"\s*[\[{]")
ENDS_EARLY = ("pickle data was truncated", "Ran out of input", "pickle exhausted before end of frame")
MAX_DESCRIBED_LETTERS = 200


class RefusedError(Exception):
    """A pickle that names something else than plain values."""


class PlainUnpickler(BoundedUnpickler):
    """An unpickler that runs no code: every way to code leads through find_class."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return _make_dict
        raise RefusedError(f"names {module}.{name}")


def _make_dict() -> dict[Any, Any]:
    """An empty dict. A pickle fills it item by item, which is bounded, whereas a call with lists would not be."""
    return {}


def parse_json(text: bytes) -> Any:
    """The values in JSON, strict or as Python writes it."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return json.loads(text)  # takes NaN and single surrogates, too


@dataclass(frozen=True)
class PlainFile:
    """A kind of file that holds plain values: what messages call it, and what they advise."""

    # "memory snapshot"
    name: str
    # "snapshot"
    short_name: str
    # how such a file is written again
    remedy: str

    def describe_failure(self, error: Exception) -> str:
        """Describe what was seen of a file that could not be read, behind its path."""
        if isinstance(error, OSError) and error.errno is not None:
            return f"cannot be read ({error.strerror}); check the file."
        text = make_printable(str(error), MAX_DESCRIBED_LETTERS)
        if isinstance(error, RefusedError | OutsideError):
            return (
                f"{text}, but a {self.name} holds plain values only; reading it could run "
                f"its code and is refused; {self.remedy}."
            )
        if isinstance(error, MemoryError):
            why = f"asks for far more memory than its size explains, as no {self.short_name} of PyTorch does"
            return f"{why}; {self.remedy}."
        if isinstance(error, EOFError) or text in ENDS_EARLY:
            return f"ends before its data does ({text}); copy or write it again."
        if isinstance(error, PickleBoundError):
            return f"cannot be read as a {self.short_name}: {text}; {self.remedy}."
        return f"cannot be read as a {self.short_name} ({type(error).__name__}: {text}); {self.remedy}."
