"""Damage of foreign files: documents with values that are anything, bytes that are changed, an end in time."""

import contextlib
import copy
import json
import signal

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

GENEROUS_S = 60  # for one example
EXAMPLES = settings(
    max_examples=40, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
FEW = settings(EXAMPLES, max_examples=12)  # of what several commands read


def _nest(depth: int) -> list:
    made: list = []
    for _ in range(depth):
        made = [made]
    return made


EXTREMES = [
    None, True, 0, -1, 1, 2**31, 2**63, 2**64, 10**400, -(10**400), 0.5, -0.0, 1e308, float("nan"), float("inf"),
    float("-inf"), "", "x", "\ud800", "\x1b[2J\x9b31m\u202e", "a\0b", "(", "9" * 5000, "../..", [], [1], [[]],
    {}, {"a": {}}, _nest(200),
]  # fmt: skip
TEXTS = ["1e400", "-1e400", "NaN", "[" * 5000, "{" * 5000, '"\\ud800"', "9" * 5000, "{", "", "null", "[]", "\0"]


def list_places(value, above=()) -> list[tuple]:
    """The paths of all values in a document."""
    places = [above]
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        places += list_places(part, (*above, key))
    return places


@st.composite
def documents(draw, sound):
    """`sound` with up to three values that are anything, or missing."""
    made = copy.deepcopy(sound)
    for _ in range(draw(st.integers(1, 3))):
        places = list_places(made)[1:]
        if not places:
            break
        *above, last = draw(st.sampled_from(places))
        holder = made
        for key in above:
            holder = holder[key]
        if draw(st.integers(0, 5)):
            holder[last] = copy.deepcopy(draw(st.sampled_from(EXTREMES)))
        else:
            del holder[last]
    return made


@st.composite
def json_texts(draw, sound) -> bytes:
    """A document as text; at times with what Python's own writer does not write."""
    text = json.dumps(draw(documents(sound)))
    if not draw(st.integers(0, 3)):
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(st.sampled_from(TEXTS)) + text[at + draw(st.integers(0, 3)) :]
    return text.encode("utf-8", "surrogatepass")


@st.composite
def damaged(draw, sound: bytes) -> bytes:
    """Bytes with up to four of them changed, cut out or put in, or cut off."""
    made = bytearray(sound)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(made)))
        match draw(st.integers(0, 4)):
            case 0:
                made[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
            case 1:
                made[at:at] = draw(st.binary(max_size=9))
            case 2:
                del made[at : at + draw(st.integers(1, 40))]
            case 3:
                made[at : at + 8] = draw(st.sampled_from([0, 2**31, 2**62, 2**64 - 1])).to_bytes(8, "little")
            case _:
                del made[at:]
    return bytes(made)


@contextlib.contextmanager
def bounded():
    """Fails where an example takes for ever."""

    def stop(*_):
        raise AssertionError(f"it takes more than {GENEROUS_S} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(GENEROUS_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
