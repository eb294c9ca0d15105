"""What tests of whole trainings share."""

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def copy(saved, tmp_path) -> Path:
    """The checkpoints of the file's own fixture `saved`, to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))
