"""Numbers as people read them."""

import random

import pytest

from megatron_lite.units import counted, short_count, significant


@pytest.mark.parametrize(
    ("value", "text"),
    [(2312.4, "2,312"), (999.6, "1,000"), (4294967296, "4,294,967,296"), (0.0000456, "0.0000456"), (0.0, "0")],
)
def test_no_number_has_an_exponent(value, text):
    assert significant(value) == text and significant(-value).lstrip("-") == text


def test_counts_have_none_either():
    shown = {9: "9", 1234: "1.23K", 355919872: "356M", 1e-5: "0.00001", 2.5e18: "2,500,000T"}
    assert {value: short_count(value) for value in shown} == shown
    assert significant(-1e-5, 2, signed=True) == "-0.00001" and significant(2312.4, signed=True) == "+2,312"


def test_what_needs_none_is_as_g_has_it():
    drawn = random.Random(0)
    for _ in range(1000):
        value, digits = 10 ** drawn.uniform(-3.9, 2.9), drawn.choice((2, 3, 4))
        assert float(significant(value, digits).replace(",", "")) == pytest.approx(value, rel=0.5 * 10 ** (1 - digits))
        if value < 10**digits - 1:
            assert float(significant(value, digits)) == float(f"{value:.{digits}g}")


def test_what_is_counted_has_its_plural():
    told = [counted(1, "copy"), counted(2, "copy"), counted(0, "pass"), counted(3, "micro-batch"), counted(2, "way")]
    assert told == ["1 copy", "2 copies", "0 passes", "3 micro-batches", "2 ways"]
    assert [counted(value, "wait") for value in (0.5, 1.0004, 1.5, 12345)] == [
        "0.5 waits",
        "1 wait",
        "1.5 waits",
        "12,345 waits",
    ]
