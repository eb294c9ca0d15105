"""--dataloader-inter-document-masking: what files tell of documents is what their ends would tell, on any ranks."""

import contextlib
import io
import json

import numpy as np
import pytest
from layout_table import LLAMA
from support.data_maker import write_data
from support.launch import VOCABULARY, alone, flags, losses, on_ranks, train, train_all, write_documents

FILES = "--dataloader-inter-document-masking"
ENDS = "--reset-attention-mask --reset-position-ids"
TRAIN = "--train-iters 6 --global-batch-size 4 --log-interval 1 --eval-iters 0 --make-vocab-size-divisible-by 32"
MODELS = {"learned positions": "", "llama": LLAMA}


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Documents of several lengths, with an end of document after each, and without any."""
    folder = tmp_path_factory.mktemp("corpora")
    lengths = np.random.default_rng(0).integers(1, 12, size=200)
    endless = [np.random.default_rng(length).integers(VOCABULARY, size=length).tolist() for length in lengths]
    return {
        "ended": write_documents(folder / "ended", lengths),
        "endless": write_data(folder / "endless", endless, VOCABULARY + 1),
    }


@pytest.fixture(scope="module")
def runs(corpora, tmp_path_factory):
    """The folder of runs on one rank, in "1", and on two that split sequences, in "2"."""
    folder = tmp_path_factory.mktemp("runs")
    argvs = {
        f"{model}; {corpus}": flags(TRAIN, words, FILES, data=corpora[corpus])
        for model, words in MODELS.items()
        for corpus in corpora
    }
    others = {
        f"{model}; {name}": flags(TRAIN, words, ends, data=corpora["ended"])
        for model, words in MODELS.items()
        for name, ends in (("by ends", ENDS), ("plain", ""))
    }
    others["endless, plain"] = flags(TRAIN, data=corpora["endless"])
    with alone(), contextlib.redirect_stdout(io.StringIO()):
        for name, argv in (argvs | others).items():
            train(argv, folder / "1" / name)
    on_two = {name: [*argv, "--context-parallel-size", "2"] for name, argv in argvs.items()}
    (folder / "2.json").write_text(json.dumps(on_two))
    on_ranks(train_all, folder / "2", str(folder / "2.json"))
    return folder


@pytest.mark.parametrize("model", MODELS)
def test_documents_of_files_are_those_that_ends_tell(runs, model):
    of_files = losses(runs / "1" / f"{model}; ended")
    assert of_files == losses(runs / "1" / f"{model}; by ends")
    assert of_files != pytest.approx(losses(runs / "1" / f"{model}; plain"), rel=0, abs=1e-4)


def test_documents_need_no_ends(runs):
    masked = losses(runs / "1" / "learned positions; endless")
    assert masked != pytest.approx(losses(runs / "1" / "endless, plain"), rel=0, abs=1e-4)


@pytest.mark.parametrize("corpus", ["ended", "endless"])
@pytest.mark.parametrize("model", MODELS)
def test_two_ranks_of_a_sequence_are_one(runs, model, corpus):
    one, two = (losses(runs / ranks / f"{model}; {corpus}") for ranks in "12")
    assert len(one) == 6 and two == pytest.approx(one, rel=0, abs=2e-6)
