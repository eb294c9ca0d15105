"""Plans of published runs: no bound is beaten, what fitted fits, activations are those of the papers' formulas."""

from dataclasses import replace

import pytest
from published_layouts import ALL_AGAIN, PUBLISHED, SELECTIVE, Published, find_place, measure

from megatron_lite.config.model_size import step_flops
from megatron_lite.pipeline_schedule import Stage
from megatron_lite.planner.find_processors import find_processor
from megatron_lite.planner.memory import activation_bytes
from megatron_lite.planner.micro_batch import plan_micro_batch

RUNS = [run for runs in PUBLISHED.values() for run in runs]


@pytest.mark.parametrize("run", RUNS, ids=[run.name for run in RUNS])
def test_no_published_run_beats_its_bound_and_each_fits(run):
    best_ms, gib = measure(run)
    assert 1.3 < run.step_ms / best_ms < 3.4
    assert not run.fits or gib < (find_processor(run.gpu).memory_gib or 0.0)


def test_torchtitans_memory_lies_between_all_activations_kept_and_all_computed_again():
    """It measured 82.4 GiB on 8 GPUs and 67.0 on 128, with every other product computed again."""
    for run, measured in zip(PUBLISHED["torchtitan 2024"], (82.4, 67.0), strict=True):
        again = replace(run, words=f"{run.words} {ALL_AGAIN}")
        assert measure(again)[1] < measured < measure(run)[1]


def test_nanotrons_fastest_layouts_have_low_bounds():
    """Of the 8B model on 8 GPUs the two fastest of 9 layouts are among the first five by the bound, of 1B those without splits first."""
    runs = {run: measure(run)[0] for run in PUBLISHED["nanotron 2025"]}
    for model, fastest, places in (("8B", [(1, 4), (2, 1)], 5), ("1B", [(1, 1)], 1)):
        by_bound = sorted((one for one in runs if one.name.startswith(model)), key=lambda one: runs[one])
        layouts = list(dict.fromkeys((one.tensor, one.pipeline) for one in by_bound))
        assert all(layouts.index(one) < places for one in fastest), layouts


def test_model_flops_are_counted_as_others_count_them():
    """NeMo AutoModel says 389 TFLOP/s per GPU of the step of its table."""
    [run] = PUBLISHED["NeMo 2026"]
    flops = step_flops(run.plan().shape, run.batch, causal=True)
    assert flops / run.gpus / run.step_ms / 1e9 == pytest.approx(389, abs=0.5)


def layer_bytes(run: Published) -> float:
    """Activations of one more layer of a rank."""
    plan = run.plan()
    model = plan.args.model
    batch = plan_micro_batch(
        plan.shape, run.micro_batch, plan.precision, "cuda", "local", False, model.recompute_granularity, 1,
        plan.layout,
    )  # fmt: skip
    one, two = (activation_bytes(batch, Stage(0, 1, (range(layers),)), 1) for layers in (1, 2))
    return two - one


MODELS = [run for run in PUBLISHED["Korthikanti 2022"] if "sp" not in run.name]


@pytest.mark.parametrize("run", MODELS, ids=[run.name for run in MODELS])
def test_a_layers_activations_are_korthikantis(run):
    """Equations 1 to 4 and table 2: sbh (10 + 24/t + 5as/ht) with tensor, sbh/t (34 + 5as/h) with sequence parallelism, and without the
    last term where core attention is computed again."""
    s, h, t = run.length, run.hidden, run.tensor
    sbh, scores = s * run.micro_batch * h, 5 * run.heads * s / h
    for words, times in (
        ("--attention-backend local", 10 + 24 / t + scores / t),
        ("--attention-backend local --sequence-parallel", (34 + scores) / t),
        (SELECTIVE, 34 / t),
    ):
        one = Published(run.name, run.heads, h, run.layers, t, 1, t, run.micro_batch, 1.0, words, run.micro_batch)
        assert layer_bytes(one) == pytest.approx(sbh * times, rel=0.05), words


def test_a_published_layout_is_found():
    place = find_place(PUBLISHED["SC21"][0])
    assert place.startswith("1 of "), place
