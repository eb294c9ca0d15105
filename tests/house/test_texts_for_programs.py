"""What programs read instead of people: the skill and llms.txt name only what exists, and llms.txt names every page."""

import contextlib
import functools
import io
import json
import re
import shlex

import pytest
import yaml
from llms_text import FILE, SKILL, read_navigation, write_list
from support.paths import DOCS

from megatron_lite.analysis.compare.compare_results import Change
from megatron_lite.analysis.findings.rules import RULES
from megatron_lite.analysis.verdict_word import VerdictWord
from megatron_lite.cli.main import COMMANDS, main
from megatron_lite.mcp_server.calls import CALLS
from megatron_lite.postmortem.postmortem_results import Postmortem

MAX_NAME = 64  # characters, as of https://agentskills.io/specification
MAX_DESCRIPTION = 1024
MAX_LINES = 500  # of a skill
FIELDS = {"name", "description", "license", "compatibility", "metadata", "allowed-tools"}
# words in code that are neither commands nor keys: what an answer or the user's files hold
OTHER_WORDS = {
    "cut",
    "section",
    "null",
    "certain: false",
    "RUN",
    "A",
    "B",
    "report.html",
    "report.json",
    ".sqlite",
    ".pickle",
}


def read_skill() -> tuple[dict, str]:
    """The front matter of the skill, and its text."""
    _, head, text = (DOCS / SKILL).read_text(encoding="utf-8").split("---\n", 2)
    return yaml.safe_load(head), text


@functools.cache
def read_help(command: str) -> str:
    printed = io.StringIO()
    with pytest.raises(SystemExit), contextlib.redirect_stdout(printed):
        main([command, "--help"])
    return printed.getvalue()


def list_code(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def test_the_front_matter_is_that_of_a_skill():
    head, text = read_skill()
    assert head.keys() <= FIELDS
    assert head["name"] == (DOCS / SKILL).parent.name
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", head["name"]) and len(head["name"]) <= MAX_NAME
    assert 0 < len(head["description"]) <= MAX_DESCRIPTION
    assert len(text.splitlines()) <= MAX_LINES


def test_every_command_and_flag_of_the_skill_exists():
    _, text = read_skill()
    commands = [shlex.split(code) for code in list_code(text) if code.startswith("megatron-lite ")]
    assert len(commands) > 8
    for _, name, *words in commands:
        assert name in COMMANDS, name
        own = words[: words.index("--")] if "--" in words else words
        for flag in own:
            if flag.startswith("--"):
                assert re.search(rf"{flag}\b(?!-)", read_help(name)), (name, flag)
    flags = {code for code in list_code(text) if code.startswith("--")}
    assert all(any(re.search(rf"{flag}\b(?!-)", read_help(name)) for name in CALLS) for flag in flags)


def test_every_key_and_word_of_the_skill_exists():
    _, text = read_skill()
    schema = json.loads((DOCS / "report.schema.json").read_text(encoding="utf-8"))
    keys = {key for part in [schema, *schema["$defs"].values()] for key in part["properties"]}
    known = keys | set(COMMANDS) | set(Postmortem.__struct_fields__) | set(map(str, VerdictWord)) | OTHER_WORDS
    unknown = []
    for code in list_code(text):
        if not code.startswith(("megatron-lite ", "--")):
            parts = [code] if code in OTHER_WORDS else re.split(r"[.\[\]]+", code)
            unknown += [part for part in parts if part not in known]
    assert unknown == []
    quoted = set(re.findall(r'`compare` calls "([^"]+)" or "([^"]+)"', text)[0])
    assert quoted <= set(map(str, Change))
    assert set(re.findall(r"explain ([a-z]+-[a-z-]+)", text)) <= set(RULES)
    assert {name for name in CALLS if f"`{name}`" not in text} == set()


def test_the_list_of_pages_is_that_of_the_site():
    assert FILE.read_text(encoding="utf-8") == write_list(), "python tests/llms_text.py writes it anew"


def test_the_list_has_the_form_that_programs_expect():
    """https://llmstxt.org: a title, a quoted summary, then lists of links under titles."""
    lines = FILE.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# ") and lines[2].startswith("> ")
    links = [line for line in lines if line.startswith("- ")]
    pages = [re.fullmatch(r"- \[[^\]]+\]\((\S+)\.md\)(: .+)?", line)[1] for line in links]
    assert pages == [page for section in read_navigation() for page in section.pages]
    on_disk = {path.stem for path in DOCS.glob("*.md")} - {"index"}
    assert on_disk <= set(pages)
    assert [line for line in lines if line.startswith("## ")][-1] == "## Optional"
