"""Every model on some layouts, and every layout with some models, train as on one rank.

A file of its own, since it takes as long as all others of the folder. `python tests/layout_table.py` runs every pair: to
be run after a change of megatron_lite/parallel.
"""

import pytest
from layout_table import FEWER_BATCHES, LAYOUTS, MODELS, QUICK, SLOW, check_case, go_together, run_cases

ON_FOUR_RANKS = ("fp32, llama", "fp16", "fp32, experts, deepseek")  # untied and tied, and a scale
ONE_OF = {2: 12, 4: 2}  # ranks: of so many pairs one


def list_cases(ranks: int) -> list[tuple[str, str]]:
    """Pairs of model and layout that go together, without those of test_parallel_layouts.py.

    The pairs of SLOW, and of the table's diagonals those with a model or a layout that no named pair has: none is left out.
    """
    models = tuple(MODELS) if ranks == 2 else ON_FOUR_RANKS
    layouts = [layout for layout, (_, needed) in LAYOUTS.items() if needed == ranks]
    plain = [model for model in models if "experts" not in model]
    dense = [
        (model, layout)
        for row, model in enumerate(plain)
        for column, layout in enumerate(layouts)
        if (row + column) % ONE_OF[ranks] == 0 and go_together(model, layout)
    ]
    # each layout of experts with one model of experts
    mixed = [model for model in models if "experts" in model]
    of_experts = [layout for layout in layouts if layout.startswith("ep")]
    pairs = [(mixed[number % len(mixed)], layout) for number, layout in enumerate(of_experts)]
    named = [(model, layout) for model, layout in SLOW if layout in layouts]
    further = [pair for pair in dense + pairs if not is_named(*pair)]
    return [pair for pair in dict.fromkeys(further + named) if pair not in QUICK]


def is_named(model: str, layout: str) -> bool:
    """Whether named pairs have the model, and named pairs have the layout."""
    named = QUICK + SLOW
    return model in {one for one, _ in named} and layout in {one for _, one in named}


def test_no_model_and_no_layout_is_left_out():
    chosen = {*list_cases(2), *list_cases(4), *QUICK}
    assert {model for model, _ in chosen} == {*MODELS}
    assert {layout for _, layout in chosen} == {*LAYOUTS}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_models_on_layouts_are_one_rank(tmp_path, ranks):
    cases = list_cases(ranks)
    run_cases(tmp_path, cases, FEWER_BATCHES if ranks == 2 else "")
    for model, layout in cases:
        check_case(tmp_path, model, layout)
