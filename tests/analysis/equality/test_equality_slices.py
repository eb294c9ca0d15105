"""Ranks that take a slice of each sequence: they are known by what they take, whatever order slices are dealt out in."""

import numpy as np
import pytest
from support.proof_maker import Layout, Truth, make_run

from megatron_lite.analysis.equality.compare import compare
from megatron_lite.analysis.equality.same_data import decide_feed
from megatron_lite.formats.prove_record import SeenMicroBatch

TRUTH = Truth()
LENGTH = 16
SEQUENCES = np.random.default_rng(7).integers(0, 50, size=(TRUTH.samples, LENGTH))


def cut_contiguous(sequences, rank, ranks):
    return np.split(sequences, ranks, axis=1)[rank]


def cut_zigzag(sequences, rank, ranks):
    chunks = np.split(sequences, 2 * ranks, axis=1)
    return np.concatenate([chunks[rank], chunks[-1 - rank]], axis=1)


def take_all(drafts):
    """Every rank takes the whole batch, of which rows and indices say nothing."""
    for draft in drafts:
        draft.outputs = []
        for number, step in enumerate(draft.steps):
            rows = tuple(f"rank {draft.rank} of {len(drafts)}, row {row}" for row in TRUTH.draw_batch(number))
            step.batches = [SeenMicroBatch(rows=rows, random_state="state", loss=1.0)]


def make_sliced(ranks, cut, sequences=SEQUENCES):
    run = make_run(TRUTH, Layout(data=ranks), take_all)
    for number, rank in run.ranks.items():
        for step in range(2):
            whole = sequences[TRUTH.draw_batch(step)]
            rank.tensors[f"inputs/{step}/0"] = cut(whole, number, ranks) if ranks > 1 else whole
    return run


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("cut", [cut_contiguous, cut_zigzag])
def test_slices_of_the_references_sequences_are_the_same_samples(cut, ranks):
    run = make_sliced(ranks, cut)
    reference = make_sliced(1, cut)
    decision = decide_feed(run, reference)
    assert decision.has_same_data and decision.tensors == []
    report = compare(run, reference)
    assert (report.differences, report.coverage) == ((), "whole")


def test_slices_of_other_sequences_are_not_fed_as_samples():
    others = np.random.default_rng(8).integers(0, 50, size=SEQUENCES.shape)
    decision = decide_feed(make_sliced(2, cut_contiguous, others), make_sliced(1, cut_contiguous))
    assert not decision.has_same_data and decision.tensors == [] and decision.reason


def test_samples_that_do_not_lie_one_behind_the_other_are_not_fed():
    run = make_sliced(2, cut_contiguous)
    run.ranks[1].tensors["inputs/0/0"] = np.zeros((12, 5))
    decision = decide_feed(run, make_sliced(1, cut_contiguous))
    assert decision.tensors == [] and decision.reason
