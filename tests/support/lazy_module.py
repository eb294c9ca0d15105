"""Modules that are imported when a test first uses them, so that collecting tests stays fast."""

import pytest


class LazyModule:
    """Stands for a module, which is imported when one of its names is asked for; the test is skipped without it."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str):
        return getattr(pytest.importorskip(self._name), attribute)
