"""Who takes which samples, and what a reference takes from a run so that both train on the same."""

import numpy as np
import pytest
from support.proof_maker import Layout, Truth, make_run, split_evenly

from megatron_lite.analysis.equality.compare import compare
from megatron_lite.analysis.equality.fed_tensors import Source, write_fed_tensors
from megatron_lite.analysis.equality.same_data import decide_feed
from megatron_lite.formats.prove_record import LoaderRecord, SeenMicroBatch
from megatron_lite.formats.prove_report import ErrorKind

TRUTH = Truth()
SAMPLES = TRUTH.samples


def give_loaders(drafts, epochs=None, samples=SAMPLES, sampler="DistributedSampler"):
    """Loaders that drew what the drafts' micro-batches hold."""
    for number, draft in enumerate(drafts):
        batches = [list(batch.indices) for step in draft.steps for batch in step.batches]
        epoch = [] if epochs is None else epochs[number]
        draft.loaders = [LoaderRecord(samples=samples, batches=batches, sampler=sampler, epoch=epoch)]


def take(draft, batches, has_indices=True):
    """Let a rank take other samples, each step in one micro-batch."""
    for step, rows in zip(draft.steps, batches):
        names = tuple(f"row {row}" for row in rows)
        step.batches = [
            SeenMicroBatch(
                rows=names, indices=tuple(rows) if has_indices else (), loss=1.0, random_state=str(draft.rank)
            )
        ]


def prove(plant, layout=None, batches=None, reference=None):
    run = make_run(TRUTH, layout or Layout(data=2), plant, batches=batches)
    return compare(run, reference or make_run(TRUTH, seed=2), make_run(TRUTH, seed=3))


def list_kinds(report):
    return [difference.kind for difference in report.differences]


@pytest.mark.parametrize("has_indices", [True, False])
def test_ranks_that_take_the_same_samples(has_indices):
    def plant(drafts):
        for draft in drafts:
            take(draft, [TRUTH.draw_batch(0), TRUTH.draw_batch(1)], has_indices)
        if has_indices:
            give_loaders(drafts)

    assert list_kinds(prove(plant)) == [ErrorKind.DATA_TWICE]


def test_ranks_that_split_layers_take_the_same_samples():
    assert prove(None, Layout(tensor=2)).differences == ()


def test_a_slice_of_the_batch_that_two_ranks_take():
    """The second rank begins too early: it takes samples of the first, and the last ones are on none."""
    batch = TRUTH.draw_batch(0)

    def plant(drafts):
        take(drafts[0], [batch[:6]], has_indices=False)
        take(drafts[1], [batch[3:9]], has_indices=False)

    first = prove(plant, batches=[batch]).differences[0]
    assert (first.kind, first.confidence) == (ErrorKind.DATA_TWICE, "high")


def test_samples_of_the_batch_that_no_rank_takes():
    batch = TRUTH.draw_batch(0)

    def plant(drafts):
        take(drafts[0], [batch[:4]], has_indices=False)
        take(drafts[1], [batch[6:10]], has_indices=False)

    assert list_kinds(prove(plant, batches=[batch]))[0] is ErrorKind.DATA_NEVER


def test_a_dataset_may_hold_a_sample_twice():
    """Two ranks have the same row by chance, and the reference's batch has it twice, too."""
    rows = [0, 1, 2, 0, 3, 4]

    def plant(drafts):
        take(drafts[0], [rows[:3]], has_indices=False)
        take(drafts[1], [rows[3:]], has_indices=False)

    def repeat(drafts):
        take(drafts[0], [rows], has_indices=False)

    reference = make_run(TRUTH, None, repeat, batches=[rows])
    assert prove(plant, batches=[rows], reference=reference).differences == ()


def test_samplers_that_are_told_another_number_of_ranks():
    def plant(drafts):
        give_loaders(drafts, split_evenly(range(SAMPLES), 4))

    first = prove(plant).differences[0]
    assert (first.kind, first.where) == (ErrorKind.DATA_NEVER, "DataLoader") and str(SAMPLES // 2) in first.evidence


def test_samplers_that_draw_half_of_the_dataset_on_both_ranks():
    whole = list(range(SAMPLES))

    def plant(drafts):
        give_loaders(drafts, [whole[:40], whole[24:]])

    assert list_kinds(prove(plant)) == [ErrorKind.DATA_TWICE]


@pytest.mark.parametrize("samples", [SAMPLES, SAMPLES - 1, SAMPLES - 2])
def test_padding_and_what_is_dropped_at_the_end_are_right(samples):
    whole = list(range(samples))
    padded = whole + whole[: -samples % 3]
    dropped = whole[: samples - samples % 3]
    for epoch in (padded, dropped):

        def plant(drafts, epoch=epoch):
            give_loaders(drafts, split_evenly(epoch, 3), samples)

        assert prove(plant, Layout(data=3)).differences == ()


def test_datasets_that_ranks_have_a_piece_of_begin_with_the_same_index():
    def plant(drafts):
        for draft in drafts:
            for step in draft.steps:
                step.batches = [
                    SeenMicroBatch(rows=batch.rows, indices=tuple(range(len(batch.rows))), loss=batch.loss)
                    for batch in step.batches
                ]
        give_loaders(drafts, samples=SAMPLES // 2)

    assert prove(plant).differences == ()


def test_pieces_that_are_not_the_whole_dataset():
    def plant(drafts):
        give_loaders(drafts, samples=SAMPLES // 4)

    reference = make_run(TRUTH, None, give_loaders, seed=2)
    assert list_kinds(prove(plant, reference=reference)) == [ErrorKind.DATA_NEVER]


# --- what a reference takes


def test_runs_on_the_same_samples_take_nothing():
    decision = decide_feed(make_run(TRUTH, Layout(data=2)), make_run(TRUTH))
    assert decision.has_same_data and not decision.weights and not decision.reason


def make_unfed(layout, has_loaders=True, micro_batches=1):
    """A run, and one rank that takes the first rank's share of the batch."""
    plant = give_loaders if has_loaders else None
    run = make_run(TRUTH, layout, plant)
    shares = [split_evenly(TRUTH.draw_batch(step), layout.data)[0] for step in range(2)]
    one = make_run(TRUTH, Layout(micro_batches=micro_batches), plant, batches=shares)
    return run, one


def test_loaders_draw_what_all_ranks_drew():
    run, one = make_unfed(Layout(data=2))
    decision = decide_feed(run, one)
    expected = [[row for share in split_evenly(TRUTH.draw_batch(step), 2) for row in share] for step in range(2)]
    assert not decision.has_same_data and decision.indices == [expected]


def test_micro_batches_are_put_together_one_by_one():
    run, one = make_unfed(Layout(data=2, micro_batches=3), micro_batches=3)
    first = split_evenly(split_evenly(TRUTH.draw_batch(0), 2)[0], 3)[0]
    second = split_evenly(split_evenly(TRUTH.draw_batch(0), 2)[1], 3)[0]
    assert decide_feed(run, one).indices[0][0] == first + second
    assert len(decide_feed(run, one).indices[0]) == 6


def test_one_rank_that_takes_more_micro_batches_takes_them_one_after_the_other():
    run, one = make_unfed(Layout(data=2), micro_batches=2)
    shares = split_evenly(TRUTH.draw_batch(0), 2)
    assert decide_feed(run, one).indices[0][:2] == shares


def test_tensors_are_fed_where_no_loader_was_seen():
    run, one = make_unfed(Layout(data=2), has_loaders=False)
    decision = decide_feed(run, one)
    sources = [[(source.rank, source.micro_batch) for source in group] for group in decision.tensors]
    assert decision.indices == [] and sources == [[(0, 0), (1, 0)], [(0, 1), (1, 1)]]


def test_what_cannot_be_laid_out_is_said():
    run, one = make_unfed(Layout(data=2), micro_batches=3)
    decision = decide_feed(run, one)
    assert decision.reason and not decision.indices and not decision.tensors


@pytest.mark.parametrize(
    "layout", [Layout(data=2), Layout(data=3, shards_rows=True), Layout(tensor=2), Layout(tensor=2, is_placed=False)]
)
def test_weights_are_put_together_and_fed_where_they_differ(layout):
    other = Truth(seed=5)
    other.gradients = TRUTH.gradients
    decision = decide_feed(make_run(TRUTH, layout), make_run(other))
    assert set(decision.weights) == set(TRUTH.weights)
    assert all(np.array_equal(decision.weights[name], TRUTH.weights[name]) for name in TRUTH.weights)


def test_weights_of_a_pipeline_with_the_same_names_cannot_be_fed():
    decision = decide_feed(make_run(TRUTH, Layout(pipeline=True)), make_run(Truth(seed=5)))
    assert decision.reason and not decision.weights


def test_inputs_with_a_row_of_each_sample_are_laid_together_although_they_are_alike(tmp_path):
    """Positions are the same on all ranks, a row of each sample; a mask of positions is one of all samples."""
    run, _ = make_unfed(Layout(data=2), has_loaders=False)
    for number, rank in run.ranks.items():
        rank.tensors["inputs/0/0"] = np.full((2, 5), number)
        rank.tensors["inputs/0/1"] = np.arange(5) * np.ones((2, 1))
        rank.tensors["inputs/0/2"] = np.ones((5, 5))
        rank.tensors["targets/0/0"] = np.zeros(10)
    write_fed_tensors(run, [[Source(0, 0), Source(1, 0)]], tmp_path / "feed.npz")
    fed = np.load(tmp_path / "feed.npz")
    shapes = {key: fed[key].shape for key in fed}
    assert shapes == {"inputs/0/0": (4, 5), "inputs/0/1": (4, 5), "inputs/0/2": (5, 5), "targets/0/0": (20,)}


def test_weights_of_another_shape_are_two_models():
    """As of a vocabulary that tensor-parallel ranks pad to another size."""

    def pad(drafts):
        for draft in drafts:
            part = draft.weights["4.weight"]
            part.array = np.concatenate([part.array, part.array])
            part.whole = part.array.shape
            part.starts = (0, 0)
            part.is_placed = True

    found = decide_feed(make_run(TRUTH, Layout(tensor=2), pad), make_run(TRUTH)).other_shape
    assert found.where == "4.weight"
    assert "8 x 8" in found.evidence
    assert "4 x 8" in found.evidence
    assert decide_feed(make_run(TRUTH, Layout(tensor=2)), make_run(TRUTH)).other_shape is None
