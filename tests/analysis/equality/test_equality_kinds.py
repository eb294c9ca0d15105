"""Each kind of error that `prove` names is planted in records, beside near misses that are another kind or none."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from support.proof_maker import MODULES, Layout, Part, Truth, make_run, scale

from megatron_lite.analysis.equality.compare import compare
from megatron_lite.formats.prove_report import ErrorKind, ProofReport

TRUTH = Truth()
LAYOUTS = {
    "data": Layout(data=2),
    "three": Layout(data=3),
    "four": Layout(data=4),
    "accumulated": Layout(data=2, micro_batches=2),
    "rows": Layout(data=3, shards_rows=True),
    "tensor": Layout(tensor=2),
    "tensor by hand": Layout(tensor=2, is_placed=False),
    "tensor and data": Layout(tensor=2, data=2),
    "pipeline": Layout(pipeline=True),
    "pipeline and data": Layout(pipeline=True, data=2),
}


def prove(layout, plant=None, dtype="float32", is_measured=True, **settings):
    run = make_run(TRUTH, layout, plant, dtype, **settings)
    reference = make_run(TRUTH, dtype=dtype, seed=2)
    perturbed = make_run(TRUTH, dtype=dtype, seed=3) if is_measured else None
    return compare(run, reference, perturbed)


def find_kind(report):
    """The kind that is named first; None where nothing differs."""
    return report.differences[0].kind if report.differences else None


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("is_measured", [True, False])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_right_run_is_silent(name, is_measured, dtype):
    report = prove(LAYOUTS[name], dtype=dtype, is_measured=is_measured)
    assert report.differences == ()
    assert (report.coverage, report.not_compared) == ("whole", ())
    assert {row.name for row in report.rows} >= {"step 1: gradients", "step 2: gradients", "step 1: loss"}
    assert all(row.difference is not None and row.difference <= row.tolerance for row in report.rows)


def scale_gradients(factor, names=None, ranks=None):
    def plant(drafts):
        for draft in drafts:
            if ranks is not None and draft.rank not in ranks:
                continue
            for step in draft.steps:
                step.gradients = {
                    name: scale(part, factor) if names is None or name in names else part
                    for name, part in step.gradients.items()
                }

    return plant


@pytest.mark.parametrize("name", ["data", "three", "four", "accumulated", "rows"])
@pytest.mark.parametrize("factor", [2.0, 3.0, 0.5, 1.0005, 0.9995, -1.0, 1.7])
def test_a_factor_of_all_gradients(name, factor):
    report = prove(LAYOUTS[name], scale_gradients(factor))
    assert find_kind(report) is ErrorKind.FACTOR
    assert len(report.differences) == 1


def test_a_factor_of_the_ranks_is_told_from_one_of_micro_batches():
    layout = Layout(data=3, micro_batches=2)
    ranks = prove(layout, scale_gradients(3.0)).differences[0]
    micro_batches = prove(layout, scale_gradients(2.0)).differences[0]
    either = prove(Layout(data=2, micro_batches=2), scale_gradients(2.0)).differences[0]
    assert "ranks" in ranks.evidence and ranks.confidence == "high"
    assert "micro-batches" in micro_batches.evidence and micro_batches.confidence == "high"
    assert "data-parallel ranks" in either.evidence and "micro-batches" in either.evidence
    assert (either.confidence, either.where) == ("high", "4.weight")


@pytest.mark.parametrize("name", ["data", "tensor", "tensor and data"])
def test_a_factor_of_the_group_of_some_gradients_is_a_second_reduction(name):
    report = prove(LAYOUTS[name], scale_gradients(2.0, {"1.weight", "1.bias"}))
    first = report.differences[0]
    assert (first.kind, first.where, first.others) == (ErrorKind.REDUCED_TWICE, "1.weight", ("1.bias",))


@pytest.mark.parametrize("factor", [1.3, 0.5, 1.001])
def test_another_factor_of_some_gradients_is_no_reduction(factor):
    report = prove(LAYOUTS["data"], scale_gradients(factor, {"2.weight"}))
    assert (find_kind(report), report.differences[0].where) == (ErrorKind.FACTOR, "2.weight")


def keep_local(names=None):
    def plant(drafts):
        for draft in drafts:
            for step in draft.steps:
                step.gradients.update({name: part for name, part in step.local.items() if not names or name in names})

    return plant


@pytest.mark.parametrize("name", ["data", "three", "four", "accumulated"])
@pytest.mark.parametrize("names", [None, {"2.weight"}, {"4.bias", "0.weight"}])
def test_gradients_that_ranks_keep_to_themselves(name, names):
    report = prove(LAYOUTS[name], keep_local(names))
    first = report.differences[0]
    assert first.kind is ErrorKind.MISSING_REDUCTION and "mean" in first.evidence
    assert first.where == max(names or {"4.weight"}, key=list(TRUTH.weights).index)
    assert len(report.differences) == 1


def test_gradients_that_are_brought_together_in_halves_of_the_group():
    def plant(drafts):
        for step in range(2):
            for pair in (drafts[:2], drafts[2:]):
                for name in TRUTH.weights:
                    mean = np.mean([draft.steps[step].local[name].array for draft in pair], axis=0)
                    for draft in pair:
                        draft.steps[step].gradients[name] = Part(mean)

    assert find_kind(prove(LAYOUTS["four"], plant)) is ErrorKind.MISSING_REDUCTION


def split_gradients(names):
    """Parts on the two tensor ranks that only add up to the gradient."""

    def plant(drafts):
        drawn = np.random.default_rng(5)
        for step in range(2):
            for name in names:
                whole = drafts[0].steps[step].gradients[name]
                share = drawn.normal(size=whole.array.shape)
                for draft, array in zip(drafts, (share, whole.array - share)):
                    draft.steps[step].gradients[name] = replace(whole, array=array)

    return plant


@pytest.mark.parametrize("name", ["tensor", "tensor by hand"])
def test_partial_sums_of_a_norm_that_are_not_added_up(name):
    report = prove(LAYOUTS[name], split_gradients({"1.weight", "1.bias"}))
    first = report.differences[0]
    assert first.kind is ErrorKind.MISSING_REDUCTION and "sum" in first.evidence
    assert (first.where, first.others) == ("1.weight", ("1.bias",))


def test_partial_sums_that_say_so_are_added_up():
    def plant(drafts):
        split_gradients({"1.weight", "1.bias"})(drafts)
        for draft in drafts:
            for step in draft.steps:
                for name in ("1.weight", "1.bias"):
                    step.gradients[name].is_partial = True

    assert prove(LAYOUTS["tensor"], plant).differences == ()


def test_replicas_that_add_up_to_nothing_known_are_unknown():
    def plant(drafts):
        for step in drafts[1].steps:
            step.gradients["2.weight"] = Part(np.random.default_rng(7).normal(size=(8, 8)))

    assert find_kind(prove(LAYOUTS["data"], plant)) is ErrorKind.UNKNOWN


@pytest.mark.parametrize("name", ["rows", "data", "pipeline"])
def test_ranks_that_clip_by_hand_by_their_own_norm(name):
    def plant(drafts):
        for draft in drafts:
            for step in draft.steps:
                factor = 0.4 + 0.17 * draft.rank
                step.gradients = {name: scale(part, factor) for name, part in step.gradients.items()}

    report = prove(LAYOUTS[name], plant)
    assert find_kind(report) is ErrorKind.LOCAL_NORM


def test_one_rank_alone_multiplies_its_gradients():
    report = prove(LAYOUTS["data"], scale_gradients(1.7, ranks={1}))
    assert find_kind(report) is ErrorKind.LOCAL_NORM and "rank 0 1, rank 1 1.7" in report.differences[0].evidence


def test_torch_clips_by_the_norm_of_the_ranks_own_rows():
    def plant(drafts):
        for draft in drafts:
            for step in draft.steps:
                step.norm = float(np.sqrt(sum(np.square(part.array).sum() for part in step.gradients.values())))

    first = prove(LAYOUTS["rows"], plant).differences[0]
    assert (first.kind, first.confidence) == (ErrorKind.LOCAL_NORM, "high")


@pytest.mark.parametrize(
    ("factors", "kind"), [((1.3, 0.6), ErrorKind.LOCAL_NORM), ((1.3, 1.3), ErrorKind.WRONG_UPDATE)]
)
def test_gradients_that_are_shortened_otherwise_behind_the_norm(factors, kind):
    def plant(drafts):
        for draft, factor in zip(drafts, factors):
            for step in draft.steps:
                step.shortened *= factor

    assert find_kind(prove(LAYOUTS["data"], plant)) is kind


def test_a_norm_that_counts_replicas_twice():
    def plant(drafts):
        for draft in drafts:
            for step in draft.steps:
                squares = sum(
                    np.square(part.array).sum() for other in drafts for part in other.steps[0].gradients.values()
                )
                step.norm = float(np.sqrt(squares))

    first = prove(LAYOUTS["tensor"], plant).differences[0]
    assert (first.kind, first.confidence) == (ErrorKind.LOCAL_NORM, "medium")


def test_rows_that_ranks_swap():
    def plant(drafts):
        for step in range(2):
            one = drafts[0].steps[step].gradients["0.weight"]
            other = drafts[1].steps[step].gradients["0.weight"]
            one.array, other.array = other.array, one.array

    first = prove(LAYOUTS["tensor"], plant).differences[0]
    assert (first.kind, first.where) == (ErrorKind.WRONG_SHARD, "0.weight")


def test_weights_of_which_both_ranks_take_the_first_block():
    def plant(drafts):
        drafts[1].weights["0.weight"] = drafts[0].weights["0.weight"]

    first = prove(LAYOUTS["tensor by hand"], plant).differences[0]
    assert (first.kind, first.where) == (ErrorKind.WRONG_SHARD, "0.weight")


def test_weights_that_are_placed_at_another_block_than_they_are():
    def plant(drafts):
        one, other = (draft.weights["2.weight"] for draft in drafts)
        one.array, other.array = other.array, one.array

    first = prove(LAYOUTS["tensor"], plant).differences[0]
    assert (first.kind, first.where) == (ErrorKind.WRONG_SHARD, "2.weight")


def test_shards_that_begin_with_the_same_random_weights():
    def plant(drafts):
        same = np.random.default_rng(9).normal(size=(4, 6))
        for draft in drafts:
            draft.weights["0.weight"].array = same

    for name in ("tensor", "tensor by hand"):
        first = prove(LAYOUTS[name], plant).differences[0]
        assert (first.kind, first.where) == (ErrorKind.RANDOM_MUST_DIFFER, "0.weight")


def test_shards_of_a_constant_may_be_the_same():
    def plant(drafts):
        for draft in drafts:
            draft.weights["0.bias"].array = np.zeros(4)

    truth = Truth()
    truth.weights["0.bias"] = np.zeros(8)
    run = make_run(truth, LAYOUTS["tensor"], plant)
    assert compare(run, make_run(truth)).differences == ()


def test_replicas_that_begin_with_other_weights():
    def plant(drafts):
        for name in ("0.weight", "2.weight"):
            drafts[1].weights[name] = Part(np.random.default_rng(3).normal(size=drafts[1].weights[name].array.shape))

    report = prove(LAYOUTS["data"], plant)
    first = report.differences[0]
    assert (first.kind, first.where, first.others) == (ErrorKind.RANDOM_MUST_AGREE, "0.weight", ("2.weight",))
    assert len(report.differences) == 1


def drop(drafts, states):
    for draft, state in zip(drafts, states):
        draft.dropouts = {"1": 0.1}
        for step in draft.steps:
            step.batches = [replace_state(batch, state) for batch in step.batches]


def replace_state(batch, state):
    return type(batch)(rows=batch.rows, indices=batch.indices, random_state=state, loss=batch.loss)


def test_masks_of_dropout_that_are_the_same_for_other_samples():
    report = prove(LAYOUTS["data"], lambda drafts: drop(drafts, "aa"))
    assert (find_kind(report), report.differences[0].where) == (ErrorKind.RANDOM_MUST_DIFFER, "1")
    assert prove(LAYOUTS["data"], lambda drafts: drop(drafts, "ab")).differences == ()


def test_masks_of_dropout_that_differ_for_the_same_samples():
    report = prove(LAYOUTS["tensor"], lambda drafts: drop(drafts, "ab"))
    assert (find_kind(report), report.differences[0].confidence) == (ErrorKind.RANDOM_MUST_AGREE, "medium")
    assert prove(LAYOUTS["tensor"], lambda drafts: drop(drafts, "aa")).differences == ()


def test_a_gradient_that_is_missing():
    def plant(drafts):
        for draft in drafts:
            for step in draft.steps:
                step.gradients["1.weight"] = None

    first = prove(LAYOUTS["data"], plant).differences[0]
    assert (first.kind, first.where) == (ErrorKind.NO_GRADIENT, "1.weight")


def test_weights_that_one_rank_does_not_update():
    def plant(drafts):
        before = drafts[1].weights
        for step in drafts[1].steps:
            step.after = dict(before)

    first = prove(LAYOUTS["data"], plant).differences[0]
    assert (first.kind, first.step) == (ErrorKind.WRONG_UPDATE, 1)


def test_weights_that_are_updated_at_another_rate():
    def plant(drafts):
        for draft in drafts:
            for name, part in draft.steps[0].after.items():
                change = part.array - draft.weights[name].array
                draft.steps[0].after[name] = replace(part, array=draft.weights[name].array + 1.1 * change)

    first = prove(LAYOUTS["data"], plant).differences[0]
    assert first.kind is ErrorKind.WRONG_UPDATE and "1.1" in first.evidence


def normalize_locally(drafts):
    drawn = np.random.default_rng(4)
    for draft in drafts:
        for output in draft.outputs:
            if output.module == "1":
                output.class_name = "BatchNorm1d"
                output.has_local_statistics = True
            if output.module != "0":
                output.part = Part(output.part.array + 0.1 * drawn.normal(size=output.part.array.shape))
        for step in draft.steps:
            for name in step.gradients:
                step.gradients[name] = Part(
                    step.gradients[name].array + drawn.normal(size=step.gradients[name].array.shape)
                )


def test_statistics_of_each_ranks_own_batch():
    first = prove(LAYOUTS["data"], normalize_locally).differences[0]
    assert (first.kind, first.where, first.confidence) == (ErrorKind.LOCAL_STATISTICS, "1", "high")


def test_a_module_that_differs_before_a_norm_of_batches_is_not_explained_by_it():
    def plant(drafts):
        normalize_locally(drafts)
        for draft in drafts:
            for output in draft.outputs:
                if output.module == "0":
                    output.part = Part(output.part.array**2)

    first = prove(LAYOUTS["data"], plant).differences[0]
    assert (first.kind, first.where) == (ErrorKind.UNKNOWN, "0")


def test_a_norm_of_batches_that_makes_no_difference_is_a_note():
    def plant(drafts):
        for draft in drafts:
            for output in draft.outputs:
                output.has_local_statistics = output.module == "1"

    report = prove(LAYOUTS["data"], plant)
    assert report.differences == () and any(note.startswith("1:") for note in report.notes)


def test_an_output_that_is_not_added_up_over_ranks():
    def plant(drafts):
        drawn = np.random.default_rng(4)
        share = drawn.normal(size=(12, 8))
        for draft in drafts:
            for output in draft.outputs:
                if output.module == "2":
                    output.part = Part(share if draft.rank else output.part.array - share)
                if output.module in "34":
                    output.part = Part(output.part.array + drawn.normal(size=output.part.array.shape))
            for step in draft.steps:
                for part in step.gradients.values():
                    part.array = part.array + drawn.normal(size=part.array.shape)

    first = prove(LAYOUTS["tensor"], plant).differences[0]
    assert (first.kind, first.where) == (ErrorKind.MISSING_REDUCTION, "2")


def test_a_layer_that_leaves_the_sum_to_who_calls_it_is_right():
    def plant(drafts):
        share = np.random.default_rng(4).normal(size=(12, 8))
        for draft in drafts:
            for output in draft.outputs:
                if output.module == "2":
                    output.part = Part(share if draft.rank else output.part.array - share)

    assert prove(LAYOUTS["tensor"], plant).differences == ()


def test_numbers_that_are_not_finite_are_unknown_in_a_row():
    report = prove(LAYOUTS["data"], scale_gradients(float("inf")))
    row = next(row for row in report.rows if row.name == "step 1: gradients")
    assert row.difference is None and row.proved is None
    assert msgspec.json.decode(msgspec.json.encode(report), type=ProofReport) == report
    assert report.differences


def test_outputs_that_differ_are_no_row_where_gradients_agree():
    """A module whose outputs are in another order than was thought is named in a note."""

    def plant(drafts):
        for draft in drafts:
            for output in draft.outputs:
                if output.module == "2":
                    output.part = Part(output.part.array + 1.0)

    report = prove(LAYOUTS["data"], plant)
    row = next(row for row in report.rows if row.name == "step 1: outputs of modules")
    assert report.differences == () and row.tensors == len(MODULES) - 1
    assert row.difference <= row.tolerance
    assert any("2" in note for note in report.notes)


def test_a_module_without_a_name_is_the_model():
    def plant(drafts):
        for draft in drafts:
            for output in draft.outputs:
                if output.module == "4":
                    output.module = ""
                    output.part = Part(output.part.array + (draft.rank if len(drafts) > 1 else 0.0))
        scale_gradients(3.3)(drafts[1:])

    report = compare(make_run(TRUTH, LAYOUTS["data"], plant), make_run(TRUTH, None, plant))
    assert report.differences[0].where == "the model"


def test_an_output_that_differs_before_one_that_agrees_was_another_one():
    """Errors spread to what follows: the first of the modules that all differ is named, not one by itself."""
    wrong = {"0": 5.0, "3": 1.0, "4": 1.0}

    def plant(drafts):
        drawn = np.random.default_rng(4)
        for draft in drafts:
            for output in draft.outputs:
                added = drawn.normal(size=output.part.array.shape)
                output.part = Part(output.part.array + wrong.get(output.module, 0.0) * added)
        scale_gradients(3.3)(drafts[1:])

    first = prove(LAYOUTS["data"], plant).differences[0]
    assert (first.kind, first.where) == (ErrorKind.UNKNOWN, "3")


@pytest.mark.parametrize(("product", "bias"), [(2.0, 1.0), (1.0, 2.0)])
def test_a_layer_that_adds_up_its_output_or_its_bias_twice(product, bias):
    added = TRUTH.weights["2.bias"]

    def plant(drafts):
        for draft in drafts:
            for output in draft.outputs:
                if output.module == "2":
                    output.part = Part(product * (output.part.array - added) + bias * added)
                if output.module in "34":
                    output.part = Part(output.part.array**2)
            for step in draft.steps:
                step.gradients = {name: Part(part.array**2) for name, part in step.gradients.items()}

    first = prove(LAYOUTS["tensor"], plant).differences[0]
    assert (first.kind, first.where, first.confidence) == (ErrorKind.REDUCED_TWICE, "2", "high")


def exchange(name):
    """Ranks take each other's blocks of a weight, by which outputs from the module on differ."""

    def plant(drafts):
        first, second = (draft.weights[name] for draft in drafts)
        drafts[0].weights[name] = second
        drafts[1].weights[name] = first
        drawn = np.random.default_rng(4)
        for draft in drafts:
            for output in draft.outputs:
                if output.module in "234":
                    output.part = Part(output.part.array + drawn.normal(size=output.part.array.shape))
            for step in draft.steps:
                for part in step.gradients.values():
                    part.array = part.array + drawn.normal(size=part.array.shape)

    return plant


def test_blocks_of_one_layer_in_another_order_than_of_the_others():
    first = prove(LAYOUTS["tensor by hand"], exchange("2.weight")).differences[0]
    assert (first.kind, first.where) == (ErrorKind.WRONG_SHARD, "2")


def test_ranks_that_split_layers_and_take_other_samples():
    def plant(drafts):
        for draft in drafts:
            for step in draft.steps:
                rows = tuple(f"rank {draft.rank} {row}" for row in step.batches[0].rows)
                step.batches = [msgspec.structs.replace(step.batches[0], rows=rows, indices=())]

    assert find_kind(prove(LAYOUTS["tensor by hand"], plant)) is ErrorKind.RANDOM_MUST_AGREE


def test_factors_of_ranks_that_are_near_each_other_are_those_of_their_own_norms():
    def plant(drafts):
        for draft, factor in zip(drafts, (1.1384, 1.1397)):
            scale_gradients(factor)([draft])

    assert find_kind(prove(LAYOUTS["tensor"], plant)) is ErrorKind.LOCAL_NORM


def test_ranks_that_clip_before_gradients_are_brought_together():
    def plant(drafts):
        for draft in drafts:
            for step in draft.steps:
                step.gradients = dict(step.local)
                step.norm = float(np.sqrt(sum(np.square(part.array).sum() for part in step.local.values())))

    report = prove(LAYOUTS["data"], plant)
    assert find_kind(report) is ErrorKind.LOCAL_NORM and len(report.differences) == 1


def test_a_forward_whose_result_is_right_has_no_error():
    """Parts of sequences may lie otherwise than was thought, in all modules but the model itself."""

    def give_result(drafts):
        for draft in drafts:
            last = [output for output in draft.outputs if output.module == "4"]
            draft.outputs += [replace(output, module="", class_name="Model") for output in last]

    def plant(drafts):
        give_result(drafts)
        drawn = np.random.default_rng(4)
        for draft in drafts:
            for output in draft.outputs:
                if output.module:
                    output.part = Part(drawn.normal(size=output.part.array.shape))
        keep_local({"3.weight"})(drafts)

    report = compare(make_run(TRUTH, LAYOUTS["data"], plant), make_run(TRUTH, None, give_result, seed=2))
    assert [(one.kind, one.where) for one in report.differences] == [(ErrorKind.MISSING_REDUCTION, "3.weight")]
