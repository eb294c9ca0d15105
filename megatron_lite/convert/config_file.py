"""Reads a Hugging Face folder's config.json, with mistakes that name the file and the key."""

import enum
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import overload

from megatron_lite.errors import CheckpointError
from megatron_lite.shared_files import read_foreign_text

CONFIG_FILE = "config.json"
MAX_CONFIG_NUMBER = 2**26  # four times the positions of any model
MAX_VALUE_LETTERS = 80  # letters of a value


class Default(enum.Enum):
    """Stands for the default of a key that has none."""

    REQUIRED = "the key must be there"


class ConfigFile:
    """The values of a config.json; a key that is missing takes the given default, which is transformers' own."""

    def __init__(self, path: Path, values: Mapping[str, object]):
        self.path = path
        self.values = values

    def get(self, key: str, default: object) -> object:
        """The value as it is. CheckpointError for a missing one that is required."""
        value = self.values.get(key, default)
        if value is Default.REQUIRED:
            raise CheckpointError(f"--load-hf {self.path}: {key} is missing; give the folder of a whole model.")
        return value

    @overload
    def whole(self, key: str, default: int | Default = ..., most: int = ...) -> int: ...

    @overload
    def whole(self, key: str, default: int | None, most: int = ...) -> int | None: ...

    def whole(
        self, key: str, default: int | Default | None = Default.REQUIRED, most: int = MAX_CONFIG_NUMBER
    ) -> int | None:
        """Read a whole number from 1 on.

        Args:
            key: The name of the value.
            default: The value where the file lacks it. Where it is None, null in the file is None, too.
            most: The largest number that is allowed.

        Raises:
            CheckpointError: The value is something else.
        """
        value = self.get(key, default)
        if value is None and default is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or value % 1 != 0 or value < 1:
            raise self.wrong(key, value, "must be a whole number above 0")
        if value > most:
            raise self.wrong(key, value, f"must be at most {most}")
        return int(value)

    def number(self, key: str, default: float | Default = Default.REQUIRED) -> float:
        """A number of at most MAX_CONFIG_NUMBER. CheckpointError for any other value."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, value, "must be a number")
        # a whole number of many digits is no float
        if abs(value) > MAX_CONFIG_NUMBER or math.isnan(value):
            raise self.wrong(key, value, f"must be a number of at most {MAX_CONFIG_NUMBER}")
        return float(value)

    def switch(self, key: str, default: bool) -> bool:
        """True or false. CheckpointError for any other value."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, value, "must be true or false")
        return value

    def refuse_unless(self, key: str, allowed: tuple[object, ...], why: str) -> None:
        """Require that a value, if it is there, is one of those that conversion knows.

        Args:
            key: The name of the value.
            allowed: Values that are known; the first one is what a file without the key means.
            why: Words that follow another value in the message.

        Raises:
            CheckpointError: It is another one.
        """
        value = self.values.get(key, allowed[0])
        if value not in allowed:
            raise self.wrong(key, value, why)

    def wrong(self, key: str, value: object, why: str) -> CheckpointError:
        """Make the error for a value that cannot be.

        Args:
            key: The name of the value.
            value: The value, of any kind.
            why: Words that follow it in the message.
        """
        try:
            shown = json.dumps(value)
        except RecursionError:
            shown = f"a {type(value).__name__}"
        if len(shown) > MAX_VALUE_LETTERS:
            shown = shown[:MAX_VALUE_LETTERS] + "..."
        return CheckpointError(f"--load-hf {self.path}: {key} is {shown}: {why}; convert another model.")


def read_json(path: Path) -> dict[str, object]:
    """The JSON object in a file. CheckpointError if it cannot be read or is none."""
    try:
        values = json.loads(read_foreign_text(path))
    except OSError as error:
        raise CheckpointError(
            f"--load-hf {path}: cannot be read ({error.strerror}); give the folder that "
            "save_pretrained wrote or that was downloaded."
        ) from None
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise CheckpointError(f"--load-hf {path}: is no JSON object; copy or download it again.")
    return values


def write_json(path: Path, values: Mapping[str, object]) -> None:
    """Write a JSON object. OSError if it cannot be written."""
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
