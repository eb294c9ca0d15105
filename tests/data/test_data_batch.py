"""Masks, positions and document numbers against a walk over every token; and the way to the device without a GPU.

See tests/gpu for the rest.
"""

import pytest
import torch
from support.launch import flags, plan_of

from megatron_lite.data.batch import ToDevice, make_batch
from megatron_lite.errors import DataError
from megatron_lite.train.step import BatchMaker

CPU = torch.device("cpu")
EOD = 0
OFF = {"eod_mask_loss": False, "reset_position_ids": False, "reset_attention_mask": False}
ON = dict.fromkeys(OFF, True)


def slow(tokens):
    mask, positions, documents = [], [], []
    position = document = 0
    for token in tokens:
        mask.append(0.0 if token == EOD else 1.0)
        positions.append(position)
        documents.append(document)
        position, document = (0, document + 1) if token == EOD else (position + 1, document)
    return mask, positions, documents


def random_raw(seed):
    return torch.randint(0, 4, (3, 18), generator=torch.Generator().manual_seed(seed))


def test_equals_the_slow_walk():
    for seed in range(10):
        raw_BT1 = random_raw(seed)
        batch = make_batch(raw_BT1, eod=EOD, **ON)
        rows = zip(batch.loss_mask_BT.tolist(), batch.positions_BT.tolist(), batch.documents_BT.tolist())
        assert list(rows) == [slow(tokens) for tokens in raw_BT1[:, :-1].tolist()]


def test_labels_are_the_tokens_one_further():
    raw_BT1 = random_raw(0)
    batch = make_batch(raw_BT1, eod=None, **OFF)
    assert torch.equal(batch.tokens_BT, raw_BT1[:, :-1])
    assert torch.equal(batch.labels_BT, raw_BT1[:, 1:])
    assert batch.tokens_BT.is_contiguous() and batch.labels_BT.is_contiguous()


@pytest.mark.parametrize("option", OFF)
def test_each_option_adds_its_field_only(option):
    fields = dict(zip(OFF, ("loss_mask_BT", "positions_BT", "documents_BT")))
    batch = make_batch(random_raw(0), eod=EOD, **{**OFF, option: True})
    extras = {name: getattr(batch, name) for name in fields.values()}
    [(field, value)] = [(name, value) for name, value in extras.items() if value is not None]
    assert field == fields[option]
    assert value.dtype == (torch.float32 if option == "eod_mask_loss" else torch.int64)
    with pytest.raises(DataError, match=r"^--eod-mask-loss, .*: this tokenizer has no end-of-document token; .*$"):
        make_batch(random_raw(0), eod=None, **{**OFF, option: True})


def test_marked_begins_decide_and_not_the_end_of_document():
    raw_BT1 = torch.tensor([[~5, EOD, 6, ~EOD, 7, ~8, ~9], [5, 6, ~7, 8, EOD, 9, ~1]])
    for options in (OFF, ON):
        batch = make_batch(raw_BT1, eod=EOD, begins_are_marked=True, **options)
        assert batch.tokens_BT.tolist() == [[5, EOD, 6, EOD, 7, 8], [5, 6, 7, 8, EOD, 9]]
        assert batch.labels_BT.tolist() == [[EOD, 6, EOD, 7, 8, 9], [6, 7, 8, EOD, 9, 1]]
        assert batch.positions_BT.tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 0, 1, 2, 3]]
        assert batch.documents_BT.tolist() == [[1, 1, 1, 2, 2, 3], [0, 0, 1, 1, 1, 1]]
    assert batch.loss_mask_BT.tolist() == [[1, 0, 1, 0, 1, 1], [1, 1, 1, 1, 0, 1]]


def test_marked_begins_need_no_end_of_document():
    options = {**ON, "eod_mask_loss": False}
    assert make_batch(torch.tensor([[~0, 1, ~2, 3]]), eod=None, begins_are_marked=True, **options).loss_mask_BT is None
    with pytest.raises(DataError):
        make_batch(random_raw(0), eod=None, begins_are_marked=True, **ON)


@pytest.mark.parametrize("are_marked", [False, True])
def test_never_waits_for_the_device(are_marked):
    """Meta tensors have no values: whatever had to look at one would fail."""
    raw_BT1 = torch.empty(2, 9, dtype=torch.int64, device="meta")
    batch = make_batch(raw_BT1, eod=EOD, begins_are_marked=are_marked, **ON)
    assert batch.positions_BT.shape == (2, 8)


def test_on_the_cpu_a_tensor_stays_what_it_is():
    tensor = torch.arange(6)
    assert ToDevice(CPU)(tensor) is tensor


def test_batches_come_in_their_order_and_no_further_than_asked_for():
    drawn = []

    def source():
        for number in range(3):
            drawn.append(number)
            yield torch.full((1, 17), number)
        raise RuntimeError("the loader's own")

    plan = plan_of(flags())
    make = BatchMaker(plan.args.data, plan.layout, CPU, 127)
    stream = map(make, source())
    for number in range(3):
        assert next(stream).tokens_BT.unique().tolist() == [number]
        assert drawn == [*range(number + 1)]
    with pytest.raises(RuntimeError, match="^the loader's own$"):
        next(stream)
