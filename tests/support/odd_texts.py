"""Texts to compare tokenizers on: plain prose, what is odd, and what no one writes."""

import random

PROSE = [
    f"the {a} cat sat on the {b} mat, {number}" for number in range(30) for a in ("old", "Grey") for b in ("wet", "red")
]
CHARACTERS = [
    range(0x80),
    range(0x300),
    range(0x300, 0x370),
    range(0x4E00, 0x4E80),
    range(0x1F300, 0x1F600),
    range(0x2000, 0x2070),
    range(0x600, 0x6FF),
    (9, 10, 13, 32, 0xA0, 0x85, 0x2028, 0x3000, 0x1C, 0xFEFF),
]


def texts(*more: str) -> list[str]:
    """Prose, what is odd, and 500 random strings of one or many scripts."""
    rng = random.Random(7)
    odd = ["", " ", "  x", "x  ", "a" * 20_000, "\0\1\x7f", "e\u0301" * 500, "ABCdefGHI's can't", "\r\n\r\n \n\t"]
    fuzz = ["".join(chr(rng.choice(rng.choice(CHARACTERS))) for _ in range(rng.randint(1, 80))) for _ in range(500)]
    return [*PROSE, *odd, "<s>the</s> <unk>", *fuzz, *more]
