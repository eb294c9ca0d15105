"""Layers of which a rank has several blocks: queries, keys and values in one weight, gated layers."""

import msgspec
import numpy as np
import pytest
from support.proof_maker import Layout, Part, Truth, make_run

from megatron_lite.analysis.equality.compare import compare
from megatron_lite.analysis.equality.proved_run import ProvedRun, RankRun, number_parts
from megatron_lite.analysis.equality.same_data import decide_feed
from megatron_lite.formats.prove_report import ErrorKind

TRUTH = Truth()
ROWS = {0: [0, 1, 4, 5], 1: [2, 3, 6, 7]}  # of "2.weight" on each rank: a block of each half
FUSED = ("2.weight", "2.bias")


def take_rows(drafts):
    for draft in drafts:
        draft.outputs = [output for output in draft.outputs if output.module != "2"]
        for parts in (draft.weights, *(each for step in draft.steps for each in (step.gradients, step.after))):
            for name in FUSED:
                parts[name] = Part(parts[name].array[ROWS[draft.rank]])


def make_fused(plant=None, truth=TRUTH):
    def change(drafts):
        take_rows(drafts)
        if plant is not None:
            plant(drafts)

    return make_run(truth, Layout(tensor=2, is_placed=False, splits=("0.weight", "0.bias")), change)


def test_blocks_are_placed_by_their_contents():
    reference = make_run(TRUTH)
    decision = decide_feed(make_fused(), reference)
    assert decision.has_same_data and decision.weights == {}
    report = compare(make_fused(), reference)
    assert (report.differences, report.coverage) == ((), "whole")


def test_a_bias_of_zeros_lies_as_its_weight_does():
    truth = Truth()
    truth.weights["2.bias"] = np.zeros(8)
    report = compare(make_fused(truth=truth), make_run(truth))
    assert (report.differences, report.coverage) == ((), "whole")


def test_an_error_in_one_of_them_is_found():
    def plant(drafts):
        for draft in drafts:
            for step in draft.steps:
                step.gradients["2.weight"] = Part(2.0 * step.gradients["2.weight"].array)

    report = compare(make_fused(plant), make_run(TRUTH))
    assert [(one.kind, one.where) for one in report.differences] == [(ErrorKind.REDUCED_TWICE, "2.weight")]


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_several_parts_of_one_name_are_all_compared(factor):
    """Megatron-Core's gated layers, and gradients that its distributed optimizer shards."""
    run = make_run(TRUTH)
    rank = run.ranks[0]
    steps = []
    tensors = dict(rank.tensors)
    for step in rank.record.steps:
        parts = []
        for part in step.gradients:
            if part.name != "2.weight":
                parts.append(part)
                continue
            halves = np.split(tensors[part.key], 2)
            for number, half in enumerate(halves):
                key = f"{part.key} half {number}"
                tensors[key] = half * (factor if number else 1.0)
                parts.append(type(part)(name=part.name, key=key, whole=(8, 8), starts=(4 * number, 0), is_placed=True))
        steps.append(msgspec.structs.replace(step, gradients=tuple(parts)))
    record = number_parts(msgspec.structs.replace(rank.record, steps=tuple(steps)))
    report = compare(ProvedRun({0: RankRun(record, tensors)}, 1), make_run(TRUTH))
    assert bool(report.differences) == (factor != 1.0)


def test_blocks_of_which_nothing_tells_the_place_lower_the_confidence():
    def plant(drafts):
        for draft in drafts:
            for step in draft.steps:
                step.gradients["4.bias"] = Part(2.0 * step.gradients["4.bias"].array)

    other = Truth(seed=5)
    other.gradients = TRUTH.gradients
    run = make_run(TRUTH, Layout(tensor=2, is_placed=False), plant)
    probe = make_run(other)
    decision = decide_feed(run, probe)
    report = compare(run, make_run(TRUTH), probe=probe, start=decision.weights)
    assert [one.confidence for one in report.differences] == ["low"]
    assert any(line.startswith("0.weight") for line in report.not_compared)


def test_shards_of_a_gradient_that_differ_are_no_sum_of_the_ranks_own():
    """Each rank has half of the rows of every gradient, and its own gradient as a whole."""

    def plant(drafts):
        drawn = np.random.default_rng(2)
        for draft in drafts:
            for step in draft.steps:
                for name, part in step.gradients.items():
                    half = len(part.array) // 2
                    rows = slice(half * draft.rank, half * (draft.rank + 1))
                    starts = (half * draft.rank, *(0 for _ in part.array.shape[1:]))
                    array = part.array[rows] + drawn.normal(size=part.array[rows].shape)
                    step.gradients[name] = Part(array, part.array.shape, starts, True)

    report = compare(make_run(TRUTH, Layout(data=2), plant), make_run(TRUTH))
    assert report.differences[0].kind is ErrorKind.UNKNOWN
