"""Functions in the place of others, which do what those do and something more."""

import inspect
from collections.abc import Callable
from types import CodeType
from typing import ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Kind = TypeVar("Kind")
CODE = "__code__"  # the attribute of a function that stacks show


def add_calls(
    function: Callable[Parameters, Result], before: Callable[Parameters, object], after: Callable[[], object]
) -> Callable[Parameters, Result]:
    """Wrap a function so that others are called before and after it.

    Args:
        function: the function to wrap.
        before: called first, with the same arguments.
        after: called without arguments when the function has returned or failed.

    Returns:
        The wrapped function, which stacks show as part of `function`.
    """

    def call(*arguments: Parameters.args, **named: Parameters.kwargs) -> Result:
        before(*arguments, **named)
        try:
            return function(*arguments, **named)
        finally:
            after()

    return stand_in(call, function)


def stand_in(
    call: Callable[Parameters, Result], function: Callable[Parameters, Result]
) -> Callable[Parameters, Result]:
    """`call`, which stacks of allocations show as part of the function that it stands for.

    Args:
        call: a function that is written in Python.
        function: the function that it stands for, or a wrapper of it.
    """
    own: CodeType = getattr(call, CODE)
    shown: CodeType = getattr(inspect.unwrap(function), CODE)
    setattr(call, CODE, own.replace(co_filename=shown.co_filename))
    return call


def list_subclasses(kind: type[Kind]) -> list[type[Kind]]:
    """List the classes that a class has been derived into, at any depth."""
    found: list[type[Kind]] = []
    for child in kind.__subclasses__():
        found.append(child)
        found += list_subclasses(child)
    return found
