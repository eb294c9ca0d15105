"""Modules that are imported when a test first uses them, so that collecting tests stays fast."""

import pytest


class LazyModule:
    """Stands for a module, which is imported when one of its names is asked for; the test is skipped without it.

    Names that begin with an underscore are none of them: pytest asks everything at the top of a test file for some.
    """

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str):
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        return getattr(pytest.importorskip(self._name), attribute)
