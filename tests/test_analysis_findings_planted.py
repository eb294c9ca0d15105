"""Real runs with a planted cause: the first finding names it; sound runs have none of the ten."""

import pytest
from planted_causes import CAUSES, CLEAN_RUNS, PLANTED, trained

pytestmark = pytest.mark.slow


def codes(name: str, folder) -> list[str]:
    return [finding.code for finding in trained(name, folder).findings]


@pytest.mark.parametrize("name", CAUSES)
def test_the_first_finding_names_the_cause(tmp_path, name):
    assert codes(name, tmp_path)[:1] == [CAUSES[name].code]


@pytest.mark.parametrize("name", CLEAN_RUNS)
def test_a_sound_run_has_none_of_them(tmp_path, name):
    assert PLANTED & set(codes(name, tmp_path)) == set()
