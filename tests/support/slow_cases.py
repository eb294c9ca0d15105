"""Cases of a test that only the slow tests run."""

import pytest


def slowly(*cases: tuple) -> list:
    """Parameters of a test, each with the mark of the slow tests."""
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]
