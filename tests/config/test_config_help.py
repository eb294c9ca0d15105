"""--help: whole, readable, at once."""

import os
import re
import subprocess
import sys

import pytest
from support.command_lines import argv
from support.paths import REPO
from support.waiting import LIMIT_S

from megatron_lite.config.args import Args
from megatron_lite.config.command_line import read_command_line
from megatron_lite.config.flags import ABSENT, list_flags, read_flags
from megatron_lite.config.help import help_text

PAGE = help_text()
FLAGS = list_flags(Args)
REQUIRED = "--num-layers --hidden-size --num-attention-heads --seq-length --micro-batch-size --train-iters --lr"
DEFAULTS = {  # as one would type them
    "--initial-loss-scale": "4294967296", "--adam-eps": "1e-08", "--profile-ranks": "0", "--min-lr": "0.0",
    "--exit-signal": "SIGTERM", "--loss-scale-window": "1000",
}  # fmt: skip


def entry(spelling: str) -> str:
    """The lines of one knob, joined."""
    lines = PAGE.splitlines()
    start = next(i for i, line in enumerate(lines) if re.match(rf"  (\S+, )*{re.escape(spelling)}\b(?!-)", line))
    end = next(i for i in range(start + 1, len(lines)) if not lines[i].startswith(" " * 38))
    return " ".join(" ".join(lines[start:end]).split())


def test_every_knob_has_an_entry_with_its_meaning_and_default():
    for flag in FLAGS:
        text = entry(flag.spelling)
        assert flag.help in text, flag.spelling
        assert all(spelling in text for spelling in flag.spellings)
        assert all(choice in text for choice in flag.choices)
        shown = not flag.is_switch and flag.default not in (None, (), "")
        assert (re.search(r"\[\S+\]$", text) is not None) == shown, text
    for spelling, default in DEFAULTS.items():
        assert entry(spelling).endswith(f"[{default}]") and read_command_line([spelling, default]).mistakes == []
    required = {flag.spelling for flag in FLAGS if "Required" in flag.help}
    assert required == set(REQUIRED.split()) <= {word for word in argv() if word.startswith("--")}


def test_every_answer_of_the_tables_is_listed_below_the_groups():
    words = set(re.findall(r"--[\w-]+", PAGE))
    assert {"--yaml-cfg", *(flag.name for flag in read_flags().values() if flag.answer != ABSENT)} <= words
    head = (" ", "usage", "the ", "Trains", "Defaults", "Megatron")
    titles = [line for line in PAGE.splitlines() if line and not line.startswith(head)]
    groups = list(dict.fromkeys(flag.group for flag in FLAGS))
    assert titles[: len(groups)] == groups and len(titles) == len(groups) + 5
    assert all(f"\n\n{title}\n  --" in PAGE for title in titles)


@pytest.mark.parametrize("width", [80, 110])
def test_lines_fit_and_no_flag_is_broken(width):
    lines = help_text(width).splitlines()
    too_long = [line for line in lines[lines.index("Model") :] if len(line) > width and len(line.split()) > 3]
    assert too_long == [] or width == 80 and all(line.startswith("  --") for line in too_long)
    assert not [line for line in lines if line.rstrip().endswith("-")]


def test_the_smallest_run_of_the_page_is_right():
    example = PAGE[PAGE.index("  pretrain_gpt.py --mock-data") : PAGE.index("Defaults are")].split()[1:]
    line = read_command_line(example)
    assert line.mistakes == [] and line.args.data.mock_data


@pytest.mark.parametrize("words", [["-h"], ["--lr", "1", "--help"]])
def test_it_comes_at_once(words, tmp_path):
    code = (
        "import runpy, sys; sys.argv = ['pretrain_gpt.py', *sys.argv[1:]]\n"
        "try: runpy.run_path('pretrain_gpt.py', run_name='__main__')\n"
        "except SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'numpy'} & set(sys.modules), 'too slow'"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=REPO, capture_output=True, text=True, check=False, timeout=LIMIT_S,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, PAGE + "\n", "")
