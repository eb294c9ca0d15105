"""Every model on every layout trains as on one rank; a file of its own, since it takes as long as all others of the folder."""

import itertools

import pytest
from layout_table import LAYOUTS, MODELS, QUICK, check_case, go_together, run_cases

ON_FOUR_RANKS = ("fp32, llama", "fp16")  # untied and tied, and a scale


def list_cases(ranks: int) -> list[tuple[str, str]]:
    """Pairs of model and layout that go together, without those of test_parallel_layouts.py."""
    pairs = itertools.product(MODELS if ranks == 2 else ON_FOUR_RANKS, LAYOUTS)
    return [
        (model, layout)
        for model, layout in pairs
        if LAYOUTS[layout][1] == ranks and go_together(model, layout) and (model, layout) not in QUICK
    ]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_models_on_all_layouts_are_one_rank(tmp_path, ranks):
    cases = list_cases(ranks)
    run_cases(tmp_path, cases)
    for model, layout in cases:
        check_case(tmp_path, model, layout)
