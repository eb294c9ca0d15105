"""Functions in the place of others, which do what those do and something more."""

import inspect


def add_calls(function, before, after):
    """Wrap a function so that others are called before and after it.

    Args:
        function: the function to wrap.
        before: called first, with the same arguments.
        after: called without arguments when the function has returned or failed.

    Returns:
        The wrapped function, which stacks show as part of `function`.
    """

    def call(*arguments, **named):
        before(*arguments, **named)
        try:
            return function(*arguments, **named)
        finally:
            after()

    return stand_in(call, function)


def stand_in(call, function):
    """`call`, which stacks of allocations show as part of the function that it stands for."""
    call.__code__ = call.__code__.replace(co_filename=inspect.unwrap(function).__code__.co_filename)
    return call


def list_subclasses(kind: type) -> list[type]:
    return [one for child in kind.__subclasses__() for one in (child, *list_subclasses(child))]
