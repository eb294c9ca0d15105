"""Puts functions in the place of torch's, for the rest of the process."""

from collections.abc import Callable
from typing import Any


def get_function(place: object, name: str) -> Callable[..., Any]:
    """Return what stands at a place of torch.

    Its type says Any: torch types few of its functions, and versions type them differently.

    Args:
        place: A module or class.
        name: The name of the function in it.
    """
    function: Callable[..., Any] = getattr(place, name)
    return function


def put_in_place(place: object, name: str, by: object) -> None:
    """Put something in the place of a function of torch.

    Args:
        place: A module or class.
        name: The name of the function in it.
        by: What stands there from now on.
    """
    setattr(place, name, by)
