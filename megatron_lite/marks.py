"""Marks by which readers of memory snapshots know the trainer's own code, whatever its files and functions are called.

A marked function carries its mark behind its name in every recorded stack, as in `__init__ [master weights]`.
"""

import re
from collections.abc import Callable
from types import FunctionType
from typing import TypeVar

MASTER_WEIGHTS = "master weights"
GRADIENT_BUFFER = "gradient buffer"
WEIGHT_GRADIENT = "weight gradient"
LOSS = "loss"
INPUT = "input"
WEIGHTS = "weights"
STEP = "step"
EVALUATION = "evaluation"
MARKED = re.compile(r"(.*) \[([a-z ]+)\]")

Marked = TypeVar("Marked", bound=Callable[..., object])  # a function or a class


def mark_memory(mark: str) -> Callable[[Marked], Marked]:
    """A decorator: what the function, or any function of the class, allocates is known by `mark`."""

    def apply(thing: Marked) -> Marked:
        functions = vars(thing).values() if isinstance(thing, type) else [thing]
        for function in functions:
            if isinstance(function, FunctionType):
                function.__code__ = function.__code__.replace(co_name=f"{function.__code__.co_name} [{mark}]")
        return thing

    return apply


def split_mark(name: str) -> tuple[str, str]:
    """Split a marked name into the name of the function and its mark; "" for a function without one."""
    found = MARKED.fullmatch(name)
    return (found[1], found[2]) if found else (name, "")
