"""Parameters under other names: stages of a pipeline, tied weights, parameters that one side lacks."""

import numpy as np
import pytest
from support.proof_maker import Layout, Output, Part, Truth, make_run, scale

from megatron_lite.analysis.equality.compare import compare
from megatron_lite.analysis.equality.placing import place_parameters
from megatron_lite.analysis.equality.same_data import find_roles, read_start
from megatron_lite.formats.prove_report import ErrorKind

TRUTH = Truth()


def test_stages_that_begin_their_names_anew_are_placed_by_content():
    run = make_run(TRUTH, Layout(pipeline=True))
    start, aliases = read_start(make_run(TRUTH))
    places = place_parameters(run, start, aliases)
    names = {key: place.name for key, place in places.found.items()}
    assert names[1, "0.weight"] == "3.weight" and names[1, "1.weight"] == "4.weight" and names[1, "1.bias"] == "4.bias"
    assert names[0, "0.weight"] == "0.weight" and names[0, "1.weight"] == "1.weight"


def tie(drafts):
    """In the reference, the head is the embedding "2.weight"."""
    for draft in drafts:
        draft.aliases = {"head.weight": "2.weight"}


def untie(gradients):
    """The second stage has a copy of "2.weight" as its head; the gradients that both stages have of it."""

    def plant(drafts):
        for step in range(2):
            whole = drafts[0].steps[step].gradients["2.weight"].array
            drafts[1].steps[step].gradients["head.weight"] = Part(gradients(whole)[1])
            drafts[1].steps[step].after["head.weight"] = drafts[0].steps[step].after["2.weight"]
            drafts[0].steps[step].gradients["2.weight"] = Part(gradients(whole)[0])
        drafts[1].weights["head.weight"] = drafts[0].weights["2.weight"]

    return plant


def test_a_weight_that_two_stages_have_is_right_with_the_whole_gradient():
    run = make_run(TRUTH, Layout(pipeline=True), untie(lambda whole: (whole, whole)))
    assert compare(run, make_run(TRUTH, None, tie)).differences == ()


def test_a_weight_that_two_stages_have_with_a_part_of_the_gradient_each():
    share = np.random.default_rng(3).normal(size=(8, 8))
    run = make_run(TRUTH, Layout(pipeline=True), untie(lambda whole: (share, whole - share)))
    report = compare(run, make_run(TRUTH, None, tie))
    assert [(one.kind, one.where) for one in report.differences] == [(ErrorKind.TIED_NOT_SUMMED, "2.weight")]


def test_replicas_of_one_name_are_no_tied_weight():
    share = np.random.default_rng(3).normal(size=(8, 8))

    def plant(drafts):
        for step in range(2):
            whole = drafts[0].steps[step].gradients["2.weight"].array
            for draft, part in zip(drafts, (share, whole - share)):
                draft.steps[step].gradients["2.weight"] = Part(part)

    report = compare(make_run(TRUTH, Layout(data=2), plant), make_run(TRUTH, None, tie))
    assert [one.kind for one in report.differences] == [ErrorKind.MISSING_REDUCTION]


def test_a_parameter_that_the_reference_lacks_is_named_and_not_compared():
    def plant(drafts):
        for draft in drafts:
            draft.weights["extra.weight"] = Part(np.random.default_rng(1).normal(size=(3, 3)))

    report = compare(make_run(TRUTH, Layout(data=2), plant), make_run(TRUTH))
    assert report.differences == () and report.coverage == "partial"
    assert any(line.startswith("extra.weight") for line in report.not_compared)


def test_experts_of_other_ranks_by_the_same_name_are_no_replicas():
    """Each rank calls its own expert "2.weight"; the reference has another one, "expert.weight"."""
    other = np.random.default_rng(8).normal(size=(8, 8))
    truth = Truth()

    def plant(drafts):
        drafts[1].weights["2.weight"] = Part(other)

    def add(drafts):
        for draft in drafts:
            draft.weights["expert.weight"] = Part(other + 1)

    report = compare(make_run(truth, Layout(data=2), plant), make_run(truth, None, add))
    assert ErrorKind.RANDOM_MUST_AGREE not in [one.kind for one in report.differences]
    assert report.coverage != "whole"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_a_record_is_named(rank):
    run = make_run(TRUTH, Layout(data=2))
    del run.ranks[rank]
    run = type(run)(run.ranks, 2, (f"rank {rank}: it left no record",))
    report = compare(run, make_run(TRUTH))
    assert report.coverage != "whole" and any(line.startswith(f"rank {rank}") for line in report.not_compared)


def hold_experts(first):
    """Each rank has four of eight parameters of its own between those of all ranks."""
    middle = list(TRUTH.weights)[1:-1]

    def plant(drafts):
        for number, draft in enumerate(drafts):
            own = middle[:4] if number == first else middle[4:]
            lacking = [name for name in middle if name not in own] if len(drafts) > 1 else []
            for name in lacking:
                del draft.weights[name]
                for step in draft.steps:
                    for parts in (step.gradients, step.local, step.after):
                        parts.pop(name, None)

    return plant


@pytest.mark.parametrize("first", [0, 1])
def test_ranks_with_experts_of_their_own_are_no_pipeline(first):
    run = make_run(TRUTH, Layout(data=2), hold_experts(first), has_clipping=False)
    reference = make_run(TRUTH, has_clipping=False)
    start, aliases = read_start(reference)
    roles = find_roles(run, place_parameters(run, start, aliases), reference)
    assert (roles.data_ranks, roles.stages) == ([0, 1], [[0, 1]])
    report = compare(run, reference)
    assert (report.differences, report.coverage) == ((), "whole")


def test_a_stage_with_the_weights_of_an_earlier_layer_has_wrong_ones():
    def plant(drafts):
        for draft in drafts:
            later = draft.weights["2.bias"]
            draft.weights["2.bias"] = draft.weights["0.bias"]
            draft.weights["0.bias"] = later

    report = compare(make_run(TRUTH, Layout(data=2), plant), make_run(TRUTH))
    assert [(one.kind, one.where) for one in report.differences] == [(ErrorKind.WRONG_SHARD, "0.bias")]


def test_experts_whose_gradients_are_sums_are_not_reduced_twice():
    hold = hold_experts(0)

    def plant(drafts):
        hold(drafts)
        for draft in drafts:
            for step in draft.steps:
                for name in list(TRUTH.weights)[1:-1]:
                    if name in step.gradients:
                        step.gradients[name] = scale(step.gradients[name], 2.0)

    run = make_run(TRUTH, Layout(data=2), plant, has_clipping=False)
    report = compare(run, make_run(TRUTH, has_clipping=False))
    assert [one.kind for one in report.differences] == [ErrorKind.FACTOR]


def test_a_weight_that_two_stages_have_by_one_name():
    """Stages may know the whole model's name of what they share, as Megatron-Core's do."""
    share = np.random.default_rng(3).normal(size=(8, 8))

    def plant(drafts):
        untie(lambda whole: (share, whole - share))(drafts)
        second = drafts[1]
        for parts in (second.weights, *(each for step in second.steps for each in (step.gradients, step.after))):
            parts["2.weight"] = parts.pop("head.weight")

    report = compare(make_run(TRUTH, Layout(pipeline=True), plant), make_run(TRUTH))
    assert [(one.kind, one.where) for one in report.differences] == [(ErrorKind.TIED_NOT_SUMMED, "2.weight")]


def test_a_module_of_which_a_stage_has_a_part_returns_another_output():
    """A decoder of two stages returns on the first one what is within the whole."""

    def give_decoder(drafts):
        drawn = np.random.default_rng(5)
        for draft in drafts:
            draft.outputs.append(Output("", "Decoder", 0, Part(drawn.normal(size=(12, 8)))))

    untied = untie(lambda whole: (whole + 1.0, whole))

    def plant(drafts):
        give_decoder(drafts)
        untied(drafts)

    report = compare(make_run(TRUTH, Layout(pipeline=True), plant), make_run(TRUTH, None, give_decoder, seed=2))
    assert "the model" not in [one.where for one in report.differences]


def test_ranks_with_some_of_the_experts_in_one_weight_take_samples_of_their_own():
    """Experts lie one behind the other in a weight, of which each rank has a block of rows."""
    layout = Layout(data=2)

    def plant(drafts):
        for draft in drafts:
            for parts in (draft.weights, *(each for step in draft.steps for each in (step.gradients, step.after))):
                array = parts["2.weight"].array
                half = array[4 * draft.rank : 4 * draft.rank + 4]
                parts["2.weight"] = Part(half, array.shape, (4 * draft.rank, 0), True)
            for step in draft.steps:
                del step.local["2.weight"]

    report = compare(make_run(TRUTH, layout, plant, has_clipping=False), make_run(TRUTH, has_clipping=False))
    assert (report.differences, report.coverage) == ((), "whole")
