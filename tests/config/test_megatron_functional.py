"""Megatron-LM's own functional tests of pretraining as a yardstick: which of their command lines this trainer takes, and what
refuses the others."""

import re
from collections import Counter

import pytest
from support.megatron_functional import Configuration, read_configurations
from support.paths import REPO

from megatron_lite.config.args import Args
from megatron_lite.config.check import RULES_WITHOUT_FILES, check
from megatron_lite.config.command_line import read_command_line
from megatron_lite.config.flags import list_flags, read_flags
from megatron_lite.config.plan import resolve
from megatron_lite.config.world import World
from megatron_lite.config.yaml_file import YAML_FLAG
from megatron_lite.errors import ConfigError

CONFIGURATIONS = read_configurations()
RANKS_OF_A_NODE = 8
VOCABULARY = 50257
OF_EXPERTS = ("moe", "mixtral")  # folders
EXPERTS = "--num-experts"


def read_refused() -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """{configuration: flags that refuse it} and {configuration: why that is right} of megatron_functional_refused.txt."""
    refused = {}
    reasons = {}
    for line in (REPO / "tests/config/megatron_functional_refused.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        name, flags, reasons[name] = line.split(" | ")
        refused[name] = tuple(flags.split())
    return refused, reasons


REFUSED, REASONS = read_refused()


def answer(one: Configuration) -> list[str]:
    """The lines that refuse a configuration on its ranks, each with a GPU of its own; none if it is accepted."""
    per_node = min(one.ranks, RANKS_OF_A_NODE)
    world = World(size=one.ranks, local_size=per_node, gpus=per_node)
    line = read_command_line(one.words)
    try:
        check(line, world, RULES_WITHOUT_FILES)
        resolve(line.args, world, VOCABULARY)
    except ConfigError as error:
        return error.lines
    return []


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_configuration_is_accepted_or_refused_by_the_flags_that_are_listed(name):
    lines = answer(CONFIGURATIONS[name])
    assert all("\n" not in line and line.endswith(".") for line in lines)
    found = tuple(dict.fromkeys(re.match(r"--[\w-]+", line)[0] for line in lines))
    assert sorted(found) == sorted(REFUSED.get(name, ())), lines


def test_as_many_are_accepted_as_the_documentation_says():
    accepted = Counter(name.split("/")[0] in OF_EXPERTS for name in CONFIGURATIONS if name not in REFUSED)
    all_of_them = Counter(name.split("/")[0] in OF_EXPERTS for name in CONFIGURATIONS)
    assert set(REFUSED) <= set(CONFIGURATIONS)
    page = (REPO / "docs/train.md").read_text(encoding="utf-8")
    assert f"| all | {all_of_them[False]} | {all_of_them[True]} |" in page
    assert f"| accepted | {accepted[False]} | {accepted[True]} |" in page


def test_the_documentation_gives_each_reason_and_counts_what_it_refuses():
    page = (REPO / "docs/train.md").read_text(encoding="utf-8")
    found = Counter((reason, name.split("/")[0] in OF_EXPERTS) for name, reason in REASONS.items())
    for reason in REASONS.values():
        assert f"| {reason} | {found[reason, False]} | {found[reason, True]} |" in page


def test_every_flag_of_megatrons_parser_is_known_by_name():
    names = (REPO / "tests/config/megatron_names.txt").read_text(encoding="utf-8").splitlines()[1:]
    known = {spelling for flag in list_flags(Args) for spelling in flag.spellings} | set(read_flags()) | {YAML_FLAG}
    assert len(names) > 900 and [name for name in names if name not in known] == []
