"""From the words of the data flags to data sets."""

import numpy as np
import pytest

from megatron_lite.config.args import DataArgs
from megatron_lite.data.blend_order import BlendedDataset
from megatron_lite.data.build import DataSpec, build_datasets, parse_blend
from megatron_lite.data.gpt_dataset import GPTDataset, MockDataset
from megatron_lite.data.indexed_writer import IndexedWriter
from megatron_lite.errors import DataError


@pytest.fixture
def corpora(tmp_path):
    """Three data sets; the tokens of number n are all n, so that a sample tells where it is from."""
    prefixes = []
    for number, length in enumerate([400, 800, 1200], start=1):
        prefixes.append(str(tmp_path / f"corpus{number}"))
        with IndexedWriter(prefixes[-1], 10) as writer:
            for _ in range(40):
                writer.add_document([number] * (length // 40))
    return prefixes


def build(sizes=(30, 5, 5), vocab_size=10, split="8,1,1", **paths):
    return build_datasets(DataSpec(DataArgs(split=split, **paths), sizes, 8, 1, vocab_size))


def origins(dataset):
    """How many samples come from each corpus."""
    return np.bincount([dataset[i][0] for i in range(len(dataset))], minlength=4)[1:].tolist()


def test_one_prefix_is_split_and_what_is_not_wanted_or_has_no_share_is_none(corpora):
    built = build(data_path=(corpora[0],))
    assert all(isinstance(dataset, GPTDataset) for dataset in built)
    used = [set(dataset.document_index.tolist()) for dataset in built]
    assert used == [set(range(32)), set(range(32, 36)), set(range(36, 40))]
    assert len(built.train) >= 30
    assert built.train.indexed is built.test.indexed  # opened, and checked, once
    # as in Megatron: too few sequences for a small share of a single data set are no mistake
    for changes, present in (({"sizes": (30, 0, 0)}, 1), ({"split": "9,1"}, 2), ({"split": "999,1,0"}, 1)):
        built = build(data_path=(corpora[0],), **changes)
        assert [dataset is not None for dataset in built] == [number < present for number in range(3)]


def test_weights_give_proportions(corpora):
    built = build(data_path=("3", corpora[0], "1", corpora[1]), sizes=(400, 0, 0))
    assert isinstance(built.train, BlendedDataset)
    assert origins(built.train) == [300, 100, 0]


def test_without_weights_length_is_the_weight_and_one_epoch_the_limit(corpora):
    built = build(data_path=tuple(corpora), sizes=(10_000, 5, 0))
    assert origins(built.train) == [(400 * 8 // 10 - 1) // 8, (800 * 8 // 10 - 1) // 8, (1200 * 8 // 10 - 1) // 8]
    assert len(built.valid) == 5


def test_one_weighted_prefix_is_a_blend_of_one(corpora):
    built = build(data_path=("0.5", corpora[2]))
    assert isinstance(built.train, BlendedDataset) and len(built.train) == 30


def test_own_paths_for_each_split(corpora):
    built = build(train_data_path=("1", corpora[0], "1", corpora[1]), valid_data_path=(corpora[2],))
    assert origins(built.train) == [15, 15, 0]
    assert origins(built.valid)[:2] == [0, 0]
    assert set(built.valid.document_index.tolist()) == set(range(40))
    assert built.test is None


def test_mock_data_needs_no_files():
    built = build(mock_data=True, sizes=(3, 2, 0))
    assert isinstance(built.train, MockDataset) and (len(built.train), len(built.valid)) == (3, 2)
    assert built.test is None
    assert not np.array_equal(built.train[0], built.valid[0])


def test_words_of_a_blend():
    for words, prefixes, weights in (
        (["a"], ["a"], None),
        (["a", "b"], ["a", "b"], None),
        (["a", "b", "c"], ["a", "b", "c"], None),
        (["1", "b", "c"], ["1", "b", "c"], None),
        (["0.3", " a ", "7e-1", "b"], ["a", "b"], [0.3, 0.7]),
    ):
        assert parse_blend(words, "--data-path") == (prefixes, weights)
    with pytest.raises(DataError, match=r"^--valid-data-path 1 a b c: 'b' should be a weight; .*$"):
        parse_blend(["1", "a", "b", "c"], "--valid-data-path")


REFUSED = {  # what to build, of corpora {0} to {2}, or {3}: what is said
    "nothing": ({}, "--data-path: missing; .*--mock-data"),
    "weights of nothing": ({"data_path": ("0", "{0}", "0", "{1}")}, r"--data-path: weights \[0.0, 0.0\] must all .*"),
    "no file": ({"data_path": ("/no/prefix",)}, "--data-path /no/prefix: no file .*"),
    "no training file": ({"train_data_path": ("/no/prefix",)}, "--train-data-path /no/prefix: no file .*"),
    "no validation file": (
        {"train_data_path": ("{0}",), "valid_data_path": ("/no/prefix",)},
        "--valid-data-path /no/prefix: no file .*",
    ),
    "no training path": ({"valid_data_path": ("{0}",)}, "--train-data-path: missing beside --valid-data-path .*"),
    "an id outside": (
        {"data_path": ("{0}", "{1}", "{2}"), "vocab_size": 3},
        r"\S+corpus3\.bin: token id 3 is outside the vocabulary of 3; use the token.*",
    ),
    "an id below 0": (
        {"data_path": ("{3}",), "vocab_size": 1001},
        r"\S+labels\.bin: token id -100 is outside the vocabulary of 1,001; use the token.*",
    ),
    "no share": ({"data_path": ("{0}",), "split": "0,1,1"}, "--split 0,1,1: no share is left for training; .*"),
    "no sequence": (
        {"data_path": ("1", "{0}", "1", "{0}"), "split": "999,1,0"},
        r"--split 999,1,0: the validation share of \S+ is none of its 40 sequences; .*",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_built_is_one_line(corpora, tmp_path, kind):
    changes, message = REFUSED[kind]
    labels = str(tmp_path / "labels")  # of another program: what is stored as int32 may be below 0
    with IndexedWriter(labels, 100_000) as writer:
        writer.add_document(np.arange(1000))
    ids = np.fromfile(f"{labels}.bin", np.int32)
    ids[500] = -100
    ids.tofile(f"{labels}.bin")
    paths = {name: words for name, words in changes.items() if isinstance(words, tuple)}
    filled = {name: tuple(word.format(*corpora, labels) for word in words) for name, words in paths.items()}
    with pytest.raises(DataError, match=rf"^{message}$"):
        build(**changes | filled)
