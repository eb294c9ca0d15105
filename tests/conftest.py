"""What all tests share."""

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def little_garbage():
    """Every training collects garbage; it must not walk each time through all that pytest and big packages hold."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
