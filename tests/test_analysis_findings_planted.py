"""Real runs with a planted cause: the first finding names it; sound runs have none of the ten.

A machine's other work can be, for seconds, what makes a real run slow, and a report is right to say so: a run gets three
tries, and what the code gets wrong it gets wrong in all of them.
"""

from collections.abc import Callable

import pytest
from planted_causes import CAUSES, CLEAN_RUNS, HAS_BF16_PRODUCTS, NEED_BF16_PRODUCTS, PLANTED, trained

pytestmark = [pytest.mark.slow, pytest.mark.timed]


TRIES = 3


def codes(name: str, folder, good: Callable[[list[str]], bool]) -> list[str]:
    """Of the findings of the first run that is good, else of the last one."""
    for number in range(TRIES):
        found = [finding.code for finding in trained(name, folder / str(number)).findings]
        if good(found):
            break
    return found


@pytest.mark.parametrize("name", CAUSES)
def test_the_first_finding_names_the_cause(tmp_path, name):
    if name in NEED_BF16_PRODUCTS and not HAS_BF16_PRODUCTS:
        pytest.skip("this processor has no units for bf16 products")
    assert codes(name, tmp_path, lambda found: found[:1] == [CAUSES[name].code])[:1] == [CAUSES[name].code]


@pytest.mark.parametrize("name", CLEAN_RUNS)
def test_a_sound_run_has_none_of_them(tmp_path, name):
    assert PLANTED.isdisjoint(codes(name, tmp_path, PLANTED.isdisjoint))
