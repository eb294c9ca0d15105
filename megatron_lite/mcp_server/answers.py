"""Answers of tools: the JSON of a command, or a part of it, and text, both cut to a number of characters."""

import json
from typing import Any

import msgspec

from megatron_lite.errors import UserError
from megatron_lite.mcp_server.bounded import SHRINK, Cut, Shortened, count_characters, find_section, shorten
from megatron_lite.mcp_server.run_command import CommandResult

TEXT = "text"  # the section of what a command prints
SHARE_OF_TEXT = 1 / 3  # of an answer's characters
ROOM_FOR_NOTE = 300  # characters of the line on what was cut


class ToolAnswer(msgspec.Struct, frozen=True):
    """The structured content of an answer."""

    # The exit code of the command: 0, or what its page says of other ones.
    exit_code: int
    # The part of the JSON that `content` is; "" for the whole.
    section: str
    # The JSON that the command writes with --json.
    content: Any
    # Parts that are left out, in the order of the content: each can be asked for by the parameter `section`.
    cut: tuple[Cut, ...]
    # Parts that are left out, too, and not named in `cut`.
    further_cuts: int


class BoundedAnswer(msgspec.Struct, frozen=True):
    """An answer, both of whose forms together have no more than a number of characters."""

    text: str
    answer: ToolAnswer


def bound_answer(result: CommandResult, section: str, finding: str, max_characters: int) -> BoundedAnswer:
    """Choose what of a command's answer is returned.

    Args:
        result: What the command answered.
        section: The part that is asked for; "" for the whole.
        finding: Code of the finding that is asked for; "" for none.
        max_characters: Of text and structured content together, as JSON.

    Raises:
        UserError: There is no such section or finding.
    """
    if finding:
        section = _find_finding(result.content, finding)
    around = ToolAnswer(result.exit_code, section, None, (), 0)
    room = max_characters - count_characters(msgspec.to_builtins(around))
    if section:
        whole = {TEXT: result.lines, **result.content}
        part = find_section(whole, section)
        text, shortened = _bound_part(part, section, room)
    else:
        text = _cut_lines(result.lines, int(max_characters * SHARE_OF_TEXT))
        shortened = shorten(result.content, room - count_characters(text))
    answer = ToolAnswer(result.exit_code, section, shortened.content, shortened.cut, shortened.further_cuts)
    return BoundedAnswer(text, answer)


def _bound_part(part: Any, section: str, room: int) -> tuple[str, Shortened]:
    """Bound a part of the JSON, and write it as text, too, for clients that show only text.

    Args:
        part: The part.
        section: Its path.
        room: Characters of both forms together.
    """
    room_for_json = room // 2
    while True:
        shortened = shorten(part, room_for_json, section)
        lines = [json.dumps(shortened.content, ensure_ascii=False), *_describe_cuts(shortened)]
        text = "\n".join(lines)
        if count_characters(text) + shortened.count_characters() <= room:
            return text, shortened
        # quotes within quotes take more characters in the text
        room_for_json = int(room_for_json * SHRINK)


def _find_finding(content: dict[str, Any], code: str) -> str:
    """The section of the finding with a code; UserError where there is none."""
    findings = content.get("findings", [])
    codes = [finding["code"] for finding in findings]
    if code not in codes:
        there = ", ".join(codes) or "none"
        raise UserError(f"finding {code}: the report has no such finding; it has {there}.")
    number = codes.index(code)
    return f"findings[{number}]"


def _cut_lines(lines: list[str], room: int) -> str:
    """The first lines, as many as fit, and a last one that says how many there are."""
    text = "\n".join(lines)
    if count_characters(text) <= room:
        return text
    left = room - ROOM_FOR_NOTE
    number = 0
    while number < len(lines) and count_characters(lines[number]) <= left:
        left -= count_characters(lines[number])
        number += 1
    missing = len(lines) - number
    note = f'... {missing} of {len(lines)} lines are left out; section "{TEXT}[{number}:]" has them'
    return "\n".join([*lines[:number], note])


def _describe_cuts(shortened: Shortened) -> list[str]:
    """Write the line that names what was left out; none where nothing was."""
    if not shortened.cut:
        return []
    first = shortened.cut[0]
    more = len(shortened.cut) - 1 + shortened.further_cuts
    others = f", and {more} more parts, see `cut`" if more else ""
    return [f'left out: section "{first.section}" ({first.characters} characters){others}']
