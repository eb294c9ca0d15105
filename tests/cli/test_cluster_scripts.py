"""Scripts of clusters are planned as they are: their batch system's variables, small programs and written files are known."""

from pathlib import Path

import pytest
from support.cluster_scripts import SCRIPTS

from megatron_lite.cli.launch_script import read_launch_script
from megatron_lite.cli.planned_run import planned_run


@pytest.mark.parametrize("kind", SCRIPTS)
def test_a_published_kind_of_script_is_planned_unchanged(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = SCRIPTS[kind]
    for name, text in {script.name: script.text, **script.files}.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    before = sorted(tmp_path.rglob("*"))
    found = planned_run([script.name, *script.arguments], None)
    assert found.plan.world.size == script.size
    values = {flag: value for flag, value in zip(found.flags, found.flags[1:]) if flag.startswith("--")}
    assert {flag: values.get(flag) for flag in script.flags} == script.flags
    assert sorted(tmp_path.rglob("*")) == before
    noted = [note for note in found.notes if f"of {script.launches} that" in note]
    assert len(noted) == (script.launches > 1)
    if script.launches > 1:
        last = read_launch_script(script.name, list(script.arguments), script.launches)
        assert last.flags != found.flags
