"""Gradients beside the mean of what the ranks made alone, where there is no reference."""

import numpy as np
import pytest
from support.proof_maker import Layout, Part, Truth, make_run, scale

from megatron_lite.analysis.equality.compare import compare, compare_with_own_sum
from megatron_lite.analysis.equality.facts import OWN_MEAN
from megatron_lite.formats.prove_report import ErrorKind

TRUTH = Truth()


@pytest.mark.parametrize("layout", [Layout(data=2), Layout(data=3), Layout(data=2, micro_batches=2)])
def test_a_right_run_is_silent(layout):
    report = compare_with_own_sum(make_run(TRUTH, layout))
    assert report.differences == () and report.coverage == "partial"
    assert [row.name for row in report.rows] == ["step 1: gradients", "step 2: gradients"]


def plant_factor(drafts):
    for draft in drafts:
        for step in draft.steps:
            step.gradients = {name: scale(part, 2.0) for name, part in step.gradients.items()}


def plant_nothing_reduced(drafts):
    for draft in drafts:
        for step in draft.steps:
            step.gradients = dict(step.local)


def plant_other_weights(drafts):
    for draft in drafts:
        draft.weights["0.weight"] = Part(draft.weights["0.weight"].array + draft.rank)


@pytest.mark.parametrize(
    ("plant", "kind", "confidence"),
    [
        (plant_factor, ErrorKind.FACTOR, "medium"),
        (plant_nothing_reduced, ErrorKind.MISSING_REDUCTION, "high"),
        (plant_other_weights, ErrorKind.RANDOM_MUST_AGREE, "high"),
    ],
)
def test_kinds_that_ranks_show_alone(plant, kind, confidence):
    first = compare_with_own_sum(make_run(TRUTH, Layout(data=2), plant)).differences[0]
    assert (first.kind, first.confidence) == (kind, confidence)
    # there is none
    assert "reference" not in first.evidence
    assert (OWN_MEAN in first.evidence) == (kind is not ErrorKind.RANDOM_MUST_AGREE)


def test_a_mean_by_weights_may_be_meant():
    def plant(drafts):
        for step in range(2):
            for name in TRUTH.weights:
                parts = [draft.steps[step].local[name].array for draft in drafts]
                for draft in drafts:
                    draft.steps[step].gradients[name] = Part(0.3 * parts[0] + 0.7 * parts[1])

    report = compare_with_own_sum(make_run(TRUTH, Layout(data=2), plant, has_clipping=False))
    assert report.differences == () and any("weigh" in line for line in report.not_compared)


def test_ranks_that_split_layers_are_not_compared():
    report = compare_with_own_sum(make_run(TRUTH, Layout(tensor=2)))
    assert report.differences == () and report.coverage == "nothing"


def test_a_reference_on_other_samples_leaves_the_ranks_own_gradients():
    other = make_run(TRUTH, batches=[TRUTH.draw_batch(3), TRUTH.draw_batch(4)])
    report = compare(make_run(TRUTH, Layout(data=2), plant_nothing_reduced), other)
    assert [one.kind for one in report.differences] == [ErrorKind.MISSING_REDUCTION]
    assert report.coverage == "partial"


def weigh(shares):
    """Losses that each rank divides by its own number of tokens: the whole batch weighs ranks by their shares."""

    def plant(drafts):
        for step in range(2):
            for name in TRUTH.weights:
                local = [
                    np.mean(TRUTH.gradients[name][list(draft.steps[step].batches[0].indices)], axis=0)
                    for draft in drafts
                ]
                mean = np.mean(local, axis=0)
                for draft in drafts:
                    draft.steps[step].gradients[name] = Part(mean)

    return plant


def test_ranks_that_count_their_own_tokens_only():
    truth = Truth()
    halves = [truth.draw_batch(0)[0::2], truth.draw_batch(0)[1::2]]
    weights = np.zeros(truth.samples)
    weights[halves[0]] = 0.25 / len(halves[0])
    weights[halves[1]] = 0.75 / len(halves[1])
    right = {name: np.tensordot(weights, gradients, 1) for name, gradients in truth.gradients.items()}

    def plant(drafts):
        for name, gradient in right.items():
            drafts[0].steps[0].gradients[name] = Part(gradient)

    report = compare(make_run(truth, Layout(data=2)), make_run(truth, None, plant))
    assert [one.kind for one in report.differences] == [ErrorKind.FACTOR]
    assert "0.5 for 0.25" in report.differences[0].evidence
