"""Ranks of a recorded run count by their records, and a run that hangs is stopped."""

import msgspec
import pytest

from megatron_lite.cli.ranked_commands import RankedCommand
from megatron_lite.cli.recorded_runs import RunLimits, record_run, runs_trainer
from megatron_lite.errors import UserError
from megatron_lite.formats.prove_record import Feed, ProveRecord

WRITE = """
import json, os, pathlib, sys, time
rank = int(os.environ["RANK"])
folder = pathlib.Path(json.loads(os.environ["MEGATRON_LITE_PROVE"])["folder"])
def write(failure=""):
    record = json.dumps({"rank": rank, "ranks": 2, "failure": failure})
    (folder / f"rank{rank}.json").write_text(record)
"""


def record(tmp_path, script, limits):
    file = tmp_path / "train.py"
    file.write_text(WRITE + script)
    folder = tmp_path / "records"
    record_run(RankedCommand((str(file),), 2, {}), folder, limits, Feed(), 0.0, show=False)
    files = sorted(folder.glob("rank*.json"))
    return [msgspec.json.decode(path.read_bytes(), type=ProveRecord) for path in files]


def test_a_crash_behind_a_whole_record_is_no_failure(tmp_path):
    assert len(record(tmp_path, "write()\nos.abort()", RunLimits(2))) == 2


def test_the_rank_that_failed_first_is_named(tmp_path):
    """Rank 0 is ended for the sake of rank 1."""
    script = "time.sleep(60 * (1 - rank))\nwrite('ValueError: 7')\nsys.exit(1)"
    with pytest.raises(UserError, match="rank 1 .*code 1.*ValueError: 7"):
        record(tmp_path, script, RunLimits(2, grace_s=0.0))


def test_a_hang_is_stopped_and_its_ranks_named(tmp_path):
    with pytest.raises(UserError, match="1 .* 2 times after 2 s.*--timeout"):
        record(tmp_path, "write() if rank == 0 else time.sleep(60)", RunLimits(2, timeout_s=2.0))


@pytest.mark.parametrize(
    ("text", "found"),
    [("import torch\n  from megatron_lite.app import main", True), ("import megatron_lite_of_others\n", False)],
)
def test_scripts_that_import_the_trainer_are_known(tmp_path, text, found):
    """Its parameters and norms are those of the trainer, wherever main is called."""
    file = tmp_path / "train.py"
    file.write_text(text)
    assert runs_trainer([str(file), "--lr", "1"]) == found
    assert runs_trainer(["-m", "megatron_lite"])
    assert not runs_trainer(["-m", "trainer.main"])
