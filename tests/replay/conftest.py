"""A run whose steps are replayed in this process."""

import sys

import pytest
from support.launch import flags, write_documents
from support.paths import REPO

sys.path.insert(0, str(REPO))


@pytest.fixture(scope="session")
def short_run(tmp_path_factory):
    """A run of 12 steps on files, with checkpoints of iterations 4, 8 and 12."""
    from benchmarks.planted_steps import train

    folder = tmp_path_factory.mktemp("short_run")
    data = write_documents(folder / "documents", [17] * 200)
    save = folder / "save"
    train(flags("--train-iters 12 --save-interval 4 --split 100,0,0 --log-interval 1 --save", save, data=data))
    return save
