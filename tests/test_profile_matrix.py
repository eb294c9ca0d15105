"""The table of profile_matrix.py, cell by cell."""

import pytest
from profile_matrix import CASES, WAYS, one


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("way", WAYS)
def test_the_file_holds_the_window(tmp_path, way, case):
    found, complaints = one(WAYS[way], case, tmp_path)
    assert complaints == [], found
