"""A start that is refused leaves the folder of the run before as it was."""

import json

from support.launch import flags, pretrain
from support.wording import wording

SHORT = "--train-iters 2 --lr-decay-iters 2"


def test_a_refused_start_leaves_the_record_of_the_run_before(tmp_path):
    save = tmp_path / "save"
    assert pretrain(flags(SHORT, "--save", save)).code == 0
    before = {path.name: path.read_bytes() for path in save.iterdir() if path.is_file()}
    assert json.loads(before["run.json"])["status"] == "finished"
    refused = pretrain(flags(SHORT, "--num-layers 3", "--save", save, "--load", save))
    assert refused.code == 2 and wording("train/holds-another-model") in refused.err
    assert {path.name: path.read_bytes() for path in save.iterdir() if path.is_file()} == before
    # a run that begins takes its place, and keeps the old one
    assert pretrain(flags(SHORT, "--save", save, "--load", save)).code == 0
    kept = [path for path in save.glob("run-*.json") if path.read_bytes() == before["run.json"]]
    assert len(kept) == 1 and (save / "run.json").read_bytes() != before["run.json"]


def test_a_refused_start_in_a_new_folder_is_recorded(tmp_path):
    save, run = tmp_path / "save", tmp_path / "run"
    assert pretrain(flags(SHORT, "--save", save)).code == 0
    assert pretrain(flags(SHORT, "--num-layers 3", "--load", save, "--run-dir", run)).code == 2
    assert json.loads((run / "run.json").read_text())["status"].startswith("failed")
