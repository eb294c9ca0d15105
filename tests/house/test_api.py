"""The names that `from megatron_lite import ...` has."""

import dataclasses
import html
import json
import re
import subprocess
import sys

import pytest
import torch

import megatron_lite
from megatron_lite.analysis.report import Report
from megatron_lite.cli.main import main
from megatron_lite.errors import UserError
from megatron_lite.report.json_file import as_json


def test_the_package_is_imported_without_what_it_needs_later():
    code = "import sys, megatron_lite\nassert not {'torch', 'numpy', 'megatron_lite.report'} & set(sys.modules)\n"
    code += "from megatron_lite import analyze\nassert 'torch' not in sys.modules\nfrom megatron_lite import Profiler"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="has no attribute Tracer"):
        megatron_lite.Tracer  # noqa: B018


def test_a_run_of_ones_own_is_analyzed_and_shown(tmp_path, capsys):
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with megatron_lite.Profiler(tmp_path / "mine", steps=range(4, 7)):
        for _ in range(8):
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
    found = megatron_lite.analyze(str(tmp_path / "mine"))
    assert isinstance(found, Report) and found.verdict.sentence and found.facts.run.steps == 8
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.title = ""
    capsys.readouterr()
    assert main(["report", str(tmp_path / "mine")]) == 0
    printed, page = capsys.readouterr().out, (tmp_path / "mine" / "report.html").read_text()
    assert str(found).split("\n", 1)[1].strip() in printed  # but for the line with the time that reading took
    frame = re.fullmatch(
        r'<iframe sandbox="allow-scripts" style="[\w:;%# -]+" srcdoc="([^"]*)"></iframe>', found._repr_html_()
    )
    assert html.unescape(frame[1]) == page
    written = json.loads((tmp_path / "mine" / "report.json").read_text())
    assert {**as_json(found), "read_s": 0.0} == {**written, "read_s": 0.0}
    assert megatron_lite.analyze(list((tmp_path / "mine").glob("*.pt.trace.json"))).facts.run is None
    with pytest.raises(UserError, match="nowhere"):
        megatron_lite.analyze(tmp_path / "nowhere")


@pytest.mark.parametrize("steps", [range(1, 3), range(5, 5), range(2, 10, 2)])
def test_a_window_that_cannot_be_is_refused(tmp_path, steps):
    with pytest.raises(ValueError, match=re.escape(f"steps={steps}: give a range")):
        megatron_lite.Profiler(tmp_path, steps=steps)
