"""The program's sentences that tests expect, in one file: tests/wording.json.

A test names a sentence by its key and states the figures in it:

    assert wording("train/going-back", 4) in out

Figures, flags and paths stand in the test; the file has {} where they come. `python -m pytest --write-wording` takes
new words from what the program prints, and never another figure: a comparison whose figures differ fails as before.
"""

import difflib
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path

WORDING = Path(__file__).parent.parent / "wording.json"
PLACE = "{}"  # where a figure comes
MIN_LIKENESS = 0.5  # a passage with fewer words in common is another sentence
CLOSERS = ".,;:)"
# Numbers that stand alone, neither within a word, such as bf16, nor within a file's name; checkpoints; and flags.
FIGURE = re.compile(
    r"(?<![\w.])(?<![A-Za-z]-)\d+(?:[.,]\d+)*(?!\w|\.\w|-[A-Za-z])"
    r"|\biter_\d+\b"
    r"|(?<![\w-])--[a-zA-Z][\w-]*"
)


@functools.cache
def read_wording() -> dict[str, str]:
    """The sentences with their places for figures, by key."""
    return json.loads(WORDING.read_text(encoding="utf-8"))


class Wording(str):
    """A sentence that a test expects. It knows its key, so that the file can be rewritten where it differs."""

    key: str
    template: str
    figures: tuple[str, ...]


def wording(key: str, *figures: object) -> Wording:
    """The sentence that the file has under a key.

    Args:
        key: folder and subject, such as "train/going-back".
        figures: what comes in the places of the sentence, in order.
    """
    template = read_wording()[key]
    texts = tuple(map(str, figures))
    assert template.count(PLACE) == len(texts), f"{key} has {template.count(PLACE)} places for figures: {template}"
    first, *others = template.split(PLACE)
    sentence = Wording(first + "".join(text + other for text, other in zip(texts, others)))
    sentence.key = key
    sentence.template = template
    sentence.figures = texts
    return sentence


def make_template(passage: str, sentence: Wording) -> str | None:
    """A passage with places for a sentence's figures, or None if its figures are others."""
    done = ""
    rest = passage
    for figure in sentence.figures:
        match = re.search(rf"(?<!\w){re.escape(figure)}(?!\w)", rest) or re.search(re.escape(figure), rest)
        if match is None:
            return None
        done += rest[: match.start()] + PLACE
        rest = rest[match.end() :]
    template = done + rest
    return template if FIGURE.findall(template) == FIGURE.findall(sentence.template) else None


def list_words(text: str) -> list[str]:
    return [word.strip(CLOSERS) for word in text.split()]


def find_passage(text: str, sentence: Wording) -> str | None:
    """The passage of a text that has most words of a sentence, at least half, and its figures; None if none has."""
    wanted = list_words(sentence)
    spans = [match.span() for match in re.finditer(r"\S+", text)]
    best = None
    likeness = MIN_LIKENESS
    for count in range(len(wanted) // 2 + 1, 2 * len(wanted)):
        for at in range(len(spans) - count + 1):
            passage = text[spans[at][0] : spans[at + count - 1][1]]
            matcher = difflib.SequenceMatcher(None, wanted, list_words(passage), autojunk=False)
            if matcher.ratio() > likeness and make_template(passage, sentence) is not None:
                best = passage
                likeness = matcher.ratio()
    if best is None or sentence[-1] in CLOSERS:
        return best
    return best.rstrip(CLOSERS)


def pair_sentences(operator: str, left: object, right: object) -> Iterator[tuple[Wording, str]]:
    """Expected sentences of a comparison that failed, each with what the program printed in its place."""
    if operator == "in" and isinstance(left, Wording):
        text = right if isinstance(right, str) else "\n".join(map(str, right))
        yield left, find_passage(text, left) or ""
    if isinstance(left, (set, frozenset)) and isinstance(right, (set, frozenset)):
        printed = "\n".join(map(str, (left | right) - (left & right)))
        missing = [text for text in left ^ right if isinstance(text, Wording)]
        yield from ((sentence, find_passage(printed, sentence) or "") for sentence in missing)
    if operator != "==":
        return
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)) and len(left) == len(right):
        for one, other in zip(left, right):
            yield from pair_sentences("==", one, other)
    for expected, printed in ((left, right), (right, left)):
        if isinstance(expected, Wording) and isinstance(printed, str) and expected != printed:
            yield expected, printed


def find_new_wording(operator: str, left: object, right: object) -> dict[str, str]:
    """What the file should have for the sentences of a comparison that failed: {key: template}."""
    found = {}
    for sentence, printed in pair_sentences(operator, left, right):
        template = make_template(printed, sentence) if printed else None
        if template is not None:
            found[sentence.key] = template
    return found


def write_wording(changes: dict[str, str]) -> None:
    """Puts sentences into the file, sorted by key."""
    entries = dict(sorted((read_wording() | changes).items()))
    WORDING.write_text(json.dumps(entries, indent=0, ensure_ascii=False) + "\n", encoding="utf-8")
    read_wording.cache_clear()
