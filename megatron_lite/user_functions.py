"""Functions of the user's own code, named by a flag as FILE.py:FUNCTION or MODULE:FUNCTION."""

import functools
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from megatron_lite.errors import UserError
from megatron_lite.shared_files import read_foreign

# code of the user, which may say nothing of its types
UserFunction = Callable[..., Any]


def find_function(flag: str, spelled: str, takes: Sequence[str], by_name: Sequence[str] = ()) -> UserFunction:
    """Find the function that a flag names. A file's code runs once, however often it is asked for.

    Args:
        flag: The flag, for messages.
        spelled: Value of the flag, FILE.py:FUNCTION or MODULE:FUNCTION.
        takes: Names of the arguments that it will be called with.
        by_name: Names of those that are passed by name.

    Raises:
        UserError: There is no such function, or it cannot be called so. What the user's own code raises stays as it is.
    """

    def refuse(why: str) -> NoReturn:
        raise UserError(f"{flag} {spelled}: {why}") from None

    place, colon, name = spelled.rpartition(":")
    if not (place and colon and name):
        refuse("names no function; give FILE.py:FUNCTION or MODULE:FUNCTION")
    if place.endswith(".py"):
        if not Path(place).is_file():
            refuse(f"there is no file {place}; check the path")
        module = _run_file(str(Path(place).absolute()), hash_file(place))
    elif place.startswith("."):
        refuse(f"{place} is relative to no package; give the module's whole name, or FILE.py:FUNCTION")
    else:
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            refuse(f"there is no module {error.name}; give FILE.py:FUNCTION, or set PYTHONPATH")
    function: UserFunction | None = getattr(module, name, None)
    if function is None or not callable(function):
        refuse(f"{place} has no function {name}; check its name")
    if why := why_not_callable(function, takes, by_name):
        refuse(why)
    return function


def why_not_callable(function: UserFunction, takes: Sequence[str], by_name: Sequence[str] = ()) -> str:
    """Describe why a function cannot be called with some arguments, with the remedy; empty if it can.

    Args:
        function: The user's function.
        takes: Names of the arguments that it will be called with.
        by_name: Names of those that are passed by name.
    """
    try:
        inspect.signature(function).bind(*takes, **dict.fromkeys(by_name))
    except (TypeError, ValueError) as error:  # the second: a function in C that does not tell what it takes
        words = ", ".join(takes) + (f", and by name {', '.join(by_name)}" if by_name else "")
        return f"cannot be called ({error}); let it take {words}"
    return ""


def describe_source(spelled: str) -> dict[str, str | None]:
    """Where the code of a function that `find_function` found stands, for records: function, file, sha256."""
    place = spelled.rpartition(":")[0]
    spec = None if place.endswith(".py") else importlib.util.find_spec(place)
    path = Path(place if spec is None else spec.origin or "")
    known = path.is_file()
    return {
        "function": spelled,
        "file": str(path.absolute()) if known else None,
        "sha256": hash_file(path) if known else None,
    }


def hash_file(path: str | Path) -> str:
    """SHA-256 of its bytes, in hexadecimal digits."""
    return hashlib.sha256(read_foreign(path)).hexdigest()


@functools.cache
def _run_file(path: str, contents: str) -> ModuleType:
    """The module of a file with these contents (their hash)."""
    # a name of its own, which worker processes of the user's loader can look up too
    name = f"user_file_{hashlib.sha256(path.encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
