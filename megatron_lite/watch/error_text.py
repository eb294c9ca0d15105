"""Text of an exception for the record of a failed rank."""

import traceback

from megatron_lite.marks import split_mark

MAX_TOLD_CHARACTERS = 8000
MAX_ERROR_FRAMES = 40
LEFT_OUT = "\n[...]\n"


def name_error(error: BaseException) -> str:
    """Name the class of an exception: "RuntimeError", "torch.OutOfMemoryError"."""
    kind = type(error)
    if kind.__module__ in ("builtins", "__main__"):
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def describe_error(error: BaseException, whole: bool = False) -> str:
    """Describe what an exception says.

    Args:
        error: The exception.
        whole: All of what it says, and what it was raised from; otherwise its class and the first line.
    """
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - an exception of the script's may fail itself
        text = ""
    if not whole:
        return f"{type(error).__name__}: {(text.splitlines() or [''])[0][:MAX_TOLD_CHARACTERS]}"
    if error.__cause__ is not None:
        text += f"\ncaused by {describe_error(error.__cause__)}"
    if len(text) <= MAX_TOLD_CHARACTERS:
        return text
    half = MAX_TOLD_CHARACTERS // 2
    return text[:half] + LEFT_OUT + text[-half:]


def describe_error_stack(error: BaseException) -> tuple[str, ...]:
    """Describe where an exception was raised: calls of its traceback, innermost first, "function (file.py:12)"."""
    calls = traceback.StackSummary.extract(traceback.walk_tb(error.__traceback__), lookup_lines=False)
    innermost = reversed(calls[-MAX_ERROR_FRAMES:])
    return tuple(f"{split_mark(call.name)[0]} ({call.filename}:{call.lineno})" for call in innermost)
