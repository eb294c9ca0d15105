"""Command lines for the tests of the configuration: a good one, changes to it, and what they are answered."""

import ast
import sys
from dataclasses import replace
from pathlib import Path

from megatron_lite.cli.planned_flags import take_fp8
from megatron_lite.config.check import check
from megatron_lite.config.command_line import CommandLine, read_command_line
from megatron_lite.config.plan import Plan, resolve
from megatron_lite.config.world import World
from megatron_lite.errors import ConfigError

ALONE = World()
_WORDS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 100 --lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 99"
)
GOOD = dict(zip(_WORDS.split()[::2], _WORDS.split()[1::2])) | {"--mock-data": ""}


def argv(changes: str | list[str] = "") -> list[str]:
    """GOOD with `changes` behind it; `!--lr` takes a flag of GOOD out."""
    words = changes.split() if isinstance(changes, str) else changes
    out = {word[1:] for word in words if word.startswith("!")}
    good = [part for name, value in GOOD.items() if name not in out for part in (name, value) if part]
    return good + [word for word in words if not word.startswith("!")]


def read(changes: str | list[str] = "") -> CommandLine:
    return read_command_line(argv(changes))


def mistakes(changes: str | list[str] = "", world: World = ALONE) -> list[str]:
    """The lines that the user sees."""
    try:
        check(read(changes), world)
    except ConfigError as error:
        return error.lines
    return []


def plan(changes: str | list[str] = "", world: World = ALONE, vocab_size: int = 100) -> Plan:
    line = read(changes)
    check(line, world)
    return resolve(line.args, world, vocab_size)


def plan_on_paper(changes: str | list[str] = "", world: World = ALONE, vocab_size: int = 100) -> Plan:
    """As plan, with the flags that only a plan knows."""
    fp8, flags = take_fp8(argv(changes))
    line = read_command_line(flags)
    check(line, world)
    return replace(resolve(line.args, world, vocab_size), fp8=fp8)


def read_table(text: str, **replaced: str) -> list[tuple[str, ...]]:
    """The columns, apart by |, of each line that is no comment; `replaced`: words that stand for others."""
    rows = [line for line in text.splitlines() if line and not line.startswith("# ")]
    for word, instead in replaced.items():
        rows = [row.replace(word, instead) for row in rows]
    return [tuple(row.split(" | ")) for row in rows]


def split_cases(text: str, **replaced: str) -> list[str]:
    """Changes apart by ; or line ends; `replaced`: words that stand for others."""
    for word, instead in replaced.items():
        text = text.replace(word, instead)
    return [case.strip() for line in text.splitlines() for case in line.split(" ; ") if case.strip()]


def yields_missed(files: list[Path], action) -> list[str]:
    """The `yield` statements of `files` that `action` did not reach, as FILE:LINE."""
    reached: set[tuple[str, int]] = set()
    watched = {str(path) for path in files}

    def trace(frame, event, _):
        if frame.f_code.co_filename not in watched:
            return None
        if event == "line":
            reached.add((frame.f_code.co_filename, frame.f_lineno))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return [
        f"{path.name}:{node.lineno}"
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Yield)
        and not any((str(path), number) in reached for number in range(node.lineno, node.end_lineno + 1))
    ]
