"""What `fit` takes from the words of a launcher."""

import pytest

from megatron_lite.cli.main import main


@pytest.mark.parametrize(
    "launcher",
    [
        ["torchrun"],
        ["python", "-m", "torch.distributed.run"],
        ["python3", "-m", "torch.distributed.launch"],
    ],
)
def test_torchrun_is_known_by_its_modules_too(launcher, capsys):
    """Its number of ranks is read, or asked for where a variable without a value stands in its place."""
    assert main(["fit", "--", *launcher, "--nproc-per-node", "", "train.py"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: megatron-lite fit: torchrun ")
