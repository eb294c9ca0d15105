"""Waits of the tests: none ends before what it waits for, unless that hangs."""

import time
from collections.abc import Callable

LIMIT_S = 900  # far beyond anything that a busy machine needs


def wait_until(is_true: Callable[[], object], limit_s: float = LIMIT_S):
    """Poll `is_true` until it is."""
    end = time.monotonic() + limit_s
    while not is_true():
        assert time.monotonic() < end, f"{is_true} never came true"
        time.sleep(0.01)
