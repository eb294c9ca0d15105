"""Sentences of the program stand in tests/wording.json; asserts state codes and figures."""

import ast
import functools
from collections import Counter

import pytest
from support import wording as wordings
from support.english import count_pinned
from support.package_files import list_nodes, parse_file
from support.paths import REPO
from support.wording import find_new_wording, read_wording, wording

# Asserts that hold English of three words in a row themselves, by folder. A number only shrinks: move the sentences to
# tests/wording.json, or assert a code or a figure, then lower it.
STILL_ENGLISH = {
    "analysis": 2,
    "checkpoint": 1,
    "config": 1,
    "data": 3,
    "examples": 2,
    "house": 9,
    "instruments": 1,
    "model": 1,
    "parallel": 1,
    "train": 10,
    "watch": 3,
}


@functools.cache
def parse_tests() -> dict[str, list[ast.Module]]:
    """The syntax trees of the test files, by folder."""
    found = {}
    for path in sorted((REPO / "tests").rglob("*.py")):
        folder = path.relative_to(REPO / "tests").parts[0]
        found.setdefault(folder, []).append(parse_file(path))
    return found


def test_asserts_hold_no_more_english_than_before():
    counted = {folder: sum(map(count_pinned, trees)) for folder, trees in parse_tests().items()}
    assert {folder: count for folder, count in counted.items() if count} == STILL_ENGLISH, "lower what has shrunk"


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("assert 'no such file' in out", 1),
        ("assert out == f'{path}: no such file'", 1),
        ("assert any(line.endswith('no such file') for line in lines)", 1),
        ("assert 'no file' in out and '--no-such-file' in out", 0),
        ("assert rows['tokens per second'] == 3", 0),
        ("assert encode('the old cat') == [1, 2, 3]", 0),
        ("assert wording('data/no-such-file') in out", 0),
    ],
)
def test_what_counts_as_english(line, count):
    assert count_pinned(ast.parse(line)) == count


def list_calls(trees: list[ast.Module]) -> list[tuple[str, int]]:
    """The sentences that files ask for: (key, figures given)."""
    calls = (node for tree in trees for node in list_nodes(tree) if isinstance(node, ast.Call))
    named = (call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "wording")
    literal = (call for call in named if isinstance(call.args[0], ast.Constant))
    return [(call.args[0].value, len(call.args) - 1) for call in literal]


def list_cells(trees: list[ast.Module]) -> set[str]:
    """The cells of tables in texts, of which some are keys: `--rank 0 | config/is-set-by-launcher | --rank`."""
    nodes = (node for tree in trees for node in list_nodes(tree) if isinstance(node, ast.Constant))
    texts = (node.value for node in nodes if isinstance(node.value, str) and " | " in node.value)
    return {cell for text in texts for line in text.splitlines() for cell in line.split(" | ")}


def test_each_sentence_is_used_with_all_its_figures():
    by_folder = {folder: trees for folder, trees in parse_tests().items() if folder != "house"}
    used = {call for trees in by_folder.values() for call in list_calls(trees)}
    cells = {cell for trees in by_folder.values() for cell in list_cells(trees)}
    known = {(key, text.count(wordings.PLACE)) for key, text in read_wording().items()}
    assert used <= known
    assert {key for key, _ in known - used} - cells == set(), "drop what is not used"
    assert list(read_wording()) == sorted(read_wording())


def test_a_sentence_stands_in_the_file_once():
    several = {text: count for text, count in Counter(read_wording().values()).items() if count > 1}
    assert several == {}


@pytest.fixture
def sentence(tmp_path, monkeypatch):
    """A sentence with two figures, in a file of its own."""
    monkeypatch.setattr(wordings, "WORDING", tmp_path / "wording.json")
    wordings.WORDING.write_text('{"x/going-back": "{} is damaged, going back to iteration {}"}')
    read_wording.cache_clear()
    yield wording("x/going-back", "a/b.pt", 4)
    read_wording.cache_clear()


def test_new_words_around_the_same_figures_are_taken(sentence):
    assert sentence == "a/b.pt is damaged, going back to iteration 4"
    out = "loading.\nerror: cannot read damaged a/b.pt, going back to iteration 4.\ndone"
    found = find_new_wording("in", sentence, out)
    wordings.write_wording(found)
    assert wording("x/going-back", "a/b.pt", 4) in out
    whole = "a/b.pt cannot be read; iteration 4 is taken."
    template = {"x/going-back": "{} cannot be read; iteration {} is taken."}
    assert find_new_wording("==", whole, sentence) == template
    assert find_new_wording("==", [whole, 3], [sentence, 3]) == template


@pytest.mark.parametrize(
    "out",
    [
        "a/b.pt is damaged, going back to iteration 2",  # another figure
        "b.pt is damaged, going back to iteration 4",  # another file
        "a/b.pt is damaged, going back to iteration 4 of 8",  # a figure that the test does not state
        "a/b.pt is damaged, going back to iteration 4 by --load",  # a flag that it does not state
        "4 a/b.pt",  # the sentence is missing
        "",
    ],
)
def test_another_figure_or_a_missing_sentence_is_no_new_wording(sentence, out):
    assert find_new_wording("==", out, sentence) == {}
    assert find_new_wording("in", sentence, out.replace("4 of", "4, of")) == {} or sentence in out
    assert find_new_wording("not in", sentence, str(sentence)) == {}


def test_a_sentence_asks_for_each_of_its_figures(sentence):
    with pytest.raises(AssertionError):
        wording("x/going-back", "a/b.pt")
