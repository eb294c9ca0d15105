"""The tools, asked by the package's own client in this process; test_mcp_processes.py asks them as users do."""

import json
import shutil

import anyio
import pytest
from support.flight_recordings import RecordedJob
from support.trace_maker import gpu_run

pytest.importorskip("mcp_types", reason="pip install -e '.[mcp]'")

from mcp import Client
from support.mcp_cases import ask, count_characters, make_options, read_text, run_here

from megatron_lite.analysis.findings.rules import RULES
from megatron_lite.cli.main import main
from megatron_lite.mcp_server.calls import CALLS
from megatron_lite.mcp_server.server import MAX_PROGRESS_CHARACTERS, build_server
from megatron_lite.mcp_server.start_server import MIN_CHARACTERS

FLAGS = [
    "--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2", "--seq-length", "32",
    "--max-position-embeddings", "32", "--micro-batch-size", "1", "--lr", "1e-3", "--train-iters", "2",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two small traces, recordings of a job that hangs, and a file that is no trace."""
    path = tmp_path_factory.mktemp("served")
    gpu_run(steps=5).write(path / "a")
    gpu_run(steps=5, data_us=300.0).write(path / "b")
    job = RecordedJob(2)
    job.call("all_reduce")
    job.call("all_reduce", without=[1])
    job.write(path / "hung")
    (path / "broken.pt.trace.json").write_text('{"traceEvents": [')
    return path


@pytest.mark.parametrize("mode", ["auto", "legacy"])  # of clients that know the newest protocol, and of older ones
def test_the_tools_are_listed_with_what_they_take(folder, mode):
    async def list_tools():
        async with Client(build_server(make_options(folder)), mode=mode) as client:
            return (await client.list_tools()).tools, client.instructions

    tools, instructions = anyio.run(list_tools)
    assert [tool.name for tool in tools] == ["report", "compare", "postmortem", "plan", "fit", "explain"]
    assert str(folder) in instructions
    for tool in tools:
        assert "Use it" in tool.description
        schema = tool.input_schema
        assert schema["type"] == "object" and schema["additionalProperties"] is False
        assert set(schema["properties"]) == set(CALLS[tool.name].__struct_fields__)
        assert all(field["description"] for field in schema["properties"].values())
        assert tool.annotations.read_only_hint is (tool.name != "fit")


@pytest.mark.parametrize(
    ("name", "arguments", "key"),
    [
        ("report", {"paths": ["a"]}, "verdict"),
        ("compare", {"a": "a", "b": "b"}, "sentence"),
        ("postmortem", {"paths": ["hung"]}, "kind"),
        ("plan", {"command": FLAGS, "gpu": ["H100"]}, "verdicts"),
        ("explain", {"what": "starved-loader"}, "lines"),
    ],
)
def test_a_tool_answers_what_its_command_does(folder, name, arguments, key):
    result = ask(make_options(folder), name, **arguments)
    assert not result.is_error, read_text(result)
    assert result.structured_content["exit_code"] == 0
    assert key in result.structured_content["content"]
    assert count_characters(result) <= 24_000
    assert "answer.json" not in read_text(result)


def test_the_content_is_the_json_of_the_command(folder, tmp_path, capsys):
    asked = tmp_path / "asked.json"
    main(["report", str(folder / "a"), "--no-html", "--json", str(asked)])
    whole = json.loads(asked.read_text())
    found = ask(make_options(folder, max_characters=10**7), "report", paths=["a"]).structured_content
    assert {**found["content"], "read_s": 0} == {**whole, "read_s": 0} and found["cut"] == []


def test_parts_that_are_cut_can_be_asked_for(folder):
    options = make_options(folder, max_characters=MIN_CHARACTERS)
    result = ask(options, "report", paths=["a"])
    assert count_characters(result) <= MIN_CHARACTERS
    assert "text[" in read_text(result).splitlines()[-1]
    [cut, *_] = result.structured_content["cut"]
    part = ask(options, "report", paths=["a"], section=cut["section"])
    assert part.structured_content["section"] == cut["section"] and part.structured_content["content"]
    assert count_characters(part) <= MIN_CHARACTERS
    rest = ask(options, "report", paths=["a"], section="text[20:]")
    assert json.loads(read_text(rest).splitlines()[0]) == rest.structured_content["content"]


def test_one_finding_is_returned_whole(folder):
    options = make_options(folder)
    codes = [one["code"] for one in ask(options, "report", paths=["b"]).structured_content["content"]["findings"]]
    assert codes
    result = ask(options, "report", paths=["b"], finding=codes[-1])
    assert result.structured_content["section"] == f"findings[{len(codes) - 1}]"
    assert result.structured_content["content"]["code"] == codes[-1]
    missing = next(code for code in RULES if code not in codes)
    assert missing in read_text(ask(options, "report", paths=["b"], finding=missing))


@pytest.mark.parametrize(
    ("name", "arguments", "named"),
    [
        ("report", {"paths": ["/etc"]}, "/etc"),
        ("report", {"paths": ["../"]}, "../"),
        ("report", {"paths": ["none"]}, "broken.pt.trace.json"),
        ("report", {"paths": ["broken.pt.trace.json"]}, "broken.pt.trace.json"),
        ("report", {"paths": ["a"], "section": "nothing"}, "nothing"),
        ("report", {"paths": ["a"], "section": "verdict", "finding": "x"}, "section"),
        ("report", {"paths": []}, "paths"),
        ("report", {"path": "a"}, "path"),
        ("compare", {"a": "a", "b": "b", "limits": ["step_ms"]}, "step_ms"),
        ("plan", {"command": ["--num-layers", "2"]}, "--hidden-size"),
        ("plan", {"command": FLAGS, "gpu": ["--page=x"]}, "gpu"),
        ("plan", {"command": FLAGS, "gpus": 0}, "gpus"),
        ("explain", {"what": "starved-loadr"}, "starved-loader"),
        ("explain", {"what": "--help"}, "--help"),
        ("fit", {"script": "a"}, "--allow-running-scripts"),
        ("postmortem", {"paths": ["a"]}, "a"),
        ("train", {}, "report"),
    ],
)
def test_a_mistake_is_an_error_that_names_it(folder, name, arguments, named):
    result = ask(make_options(folder), name, **arguments)
    assert result.is_error and result.structured_content is None
    assert named in read_text(result)
    assert len(read_text(result).splitlines()) == 1 or name == "plan"


def test_names_of_files_may_be_no_text(tmp_path):
    """A half of a letter would end the connection: no message can hold it."""
    odd = tmp_path / "odd\udcff"
    shutil.copy(gpu_run(steps=5).write(tmp_path / "run"), tmp_path / "run" / "a\udcff.pt.trace.json")
    odd.mkdir()
    options = make_options(tmp_path)
    answers = [
        ask(options, "report", paths=["run"]),
        ask(options, "report", paths=["none"]),
        ask(make_options(odd), "report", paths=["none"]),
    ]
    assert [answer.is_error for answer in answers] == [False, True, True]
    for answer in answers:
        answer.model_dump_json()
    assert build_server(make_options(odd)).instructions.encode()


def test_long_work_reports_its_seconds(folder):
    reported = []

    async def note(progress, total, message):
        reported.append((progress, total, message))

    async def run_for_long(command, roots, limit_s, report):
        await report(2.0, "reading" * 1000)
        await report(4.0, "")
        return await run_here(command, roots, limit_s, report)

    assert not ask(make_options(folder), "report", run=run_for_long, progress=note, paths=["a"]).is_error
    assert [(progress, total) for progress, total, _ in reported] == [(2.0, 300), (4.0, 300)]
    # a line that a file made long
    assert [len(message or "") for _, _, message in reported] == [MAX_PROGRESS_CHARACTERS, 0]


def test_a_defect_of_ours_ends_the_call_only(folder):
    async def fail(*given):
        raise RuntimeError("unforeseen")

    result = ask(make_options(folder), "report", run=fail, paths=["a"])
    assert result.is_error and "unforeseen" in read_text(result)


def test_without_the_package_one_line_says_what_to_install(folder, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "mcp", None)
    assert main(["mcp", str(folder)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "megatron_lite[mcp]" in line


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["{}/none"], "none"),
        (["{}", "--time-limit", "0"], "--time-limit"),
        (["{}", "--max-characters", "10"], "--max-characters"),
        ([], "FOLDER"),
    ],
)
def test_mistakes_of_the_command_are_one_line(folder, words, named, capsys):
    assert main(["mcp", *(word.format(folder) for word in words)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert named in line
