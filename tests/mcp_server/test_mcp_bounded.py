"""Parts of JSON: every path that a cut names leads to what was left out, and nothing is longer than its room."""

import json
import random

import pytest

from megatron_lite.errors import UserError
from megatron_lite.mcp_server.bounded import MAX_CUTS, find_section, shorten

KEYS = ("a", "long_name", "with.dot", "[x]", "é", "b" * 30)
MIN_ROOM = 600


def make_value(draw: random.Random, depth: int):
    """JSON of any form, with long texts and lists, seldom deeper than `depth`."""
    kind = draw.choice(("object", "list", "text", "number")) if depth else draw.choice(("text", "number"))
    if kind == "object":
        return {key: make_value(draw, depth - 1) for key in draw.sample(KEYS, draw.randint(0, len(KEYS)))}
    if kind == "list":
        return [make_value(draw, depth - 1) for _ in range(draw.choice((0, 1, 5, 40)))]
    if kind == "text":
        return draw.choice(('"', "ab\n", "é", "c")) * draw.choice((1, 20, 700))
    return draw.choice((None, True, 1.5, -(10**9)))


def count(value) -> int:
    return len(json.dumps(value, ensure_ascii=False))


@pytest.mark.parametrize("seed", range(12))
def test_content_fits_and_what_is_missing_can_be_asked_for(seed):
    draw = random.Random(seed)
    value = {"first": make_value(draw, 4), "second": make_value(draw, 4), "third": make_value(draw, 3)}
    for room in (MIN_ROOM, 3000, 10**7):
        found = shorten(value, room)
        assert found.count_characters() <= room
        assert (found.content == value) is (found.cut == ())
        for cut in found.cut[:MAX_CUTS]:
            part = find_section(value, cut.section)
            assert count(part) >= cut.characters - len("[]")
        missing = count(value) - count(found.content)
        assert found.further_cuts or missing <= sum(cut.characters + 100 for cut in found.cut)


def test_a_path_leads_through_objects_lists_ranges_and_texts():
    value = {"a": [{"b.c": "text"}, 1, 2, 3], "d": {"e": {"f": 4}}}
    assert find_section(value, "") == value
    assert find_section(value, 'a[0]["b.c"][1:3]') == "ex"
    assert find_section(value, "a[2:]") == [2, 3]
    assert find_section(value, "a[1:][:2]") == [1, 2]
    assert find_section(value, "d.e.f") == 4


@pytest.mark.parametrize("section", ["x", "a[9]", "a.b", "a[", "d[0]", "a[x]", "a[1][0]", "..", "a[-1]"])
def test_a_path_to_nothing_is_a_mistake(section):
    with pytest.raises(UserError):
        find_section({"a": [1, 2], "d": {"e": 1}}, section)


def test_small_parts_come_whole_beside_a_large_one():
    value = {"large": list(range(10_000)), "small": {"x": 1}, "text": "y" * 10}
    found = shorten(value, 2000)
    assert found.content["small"] == {"x": 1} and found.content["text"] == "y" * 10
    [cut] = found.cut
    first = len(found.content["large"])
    assert cut.section == f"large[{first}:]" and first > 200
    assert found.content["large"] + find_section(value, cut.section) == value["large"]
