"""Numbers of any size: what is shown reads back as close as its digits are, and blocks are rounded as little as needed."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.caching_allocator import MIN_BLOCK_BYTES, round_up, rounded
from megatron_lite.units import GIB, KIB, MIB, duration, significant, size

EXAMPLES = settings(max_examples=80, deadline=None, derandomize=True, database=None)
BYTES = st.integers(0, 2**45)
UNITS = {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB}
SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600}


@EXAMPLES
@given(BYTES)
def test_a_size_reads_back_to_half_of_its_last_digit(num_bytes):
    number, unit = size(num_bytes).split()
    last_digit = 10.0 ** -len(number.partition(".")[2])
    assert float(number) * UNITS[unit] == pytest.approx(num_bytes, abs=0.51 * last_digit * UNITS[unit])


@EXAMPLES
@given(st.floats(0, 1e6))
def test_a_duration_reads_back_to_half_of_its_last_digit(seconds):
    told = duration(seconds)
    parts = re.findall(r"([\d.]+)(ms|s|m|h)", told)
    assert "".join(number + unit for number, unit in parts) == told
    read = sum(float(number) * SECONDS[unit] for number, unit in parts)
    last_unit = parts[-1][1]
    # minutes behind hours are cut off rather than rounded
    off = 60.5 if last_unit == "m" else 0.51 * SECONDS[last_unit]
    assert read == pytest.approx(seconds, abs=off)


@EXAMPLES
@given(st.floats(1e-9, 1e15), st.integers(1, 6))
def test_significant_digits_read_back_and_never_have_an_exponent(value, digits):
    told = significant(value, digits)
    assert "e" not in told
    assert float(told.replace(",", "")) == pytest.approx(value, rel=0.51 * 10.0 ** (1 - digits))
    assert significant(-value, digits) == f"-{told}"


@EXAMPLES
@given(BYTES, st.integers(1, 2**25))
def test_rounding_up_adds_less_than_a_step_and_once_is_enough(num_bytes, step):
    up = round_up(num_bytes, step)
    assert up % step == 0 and 0 <= up - num_bytes < step
    assert round_up(up, step) == up


@EXAMPLES
@given(BYTES, BYTES)
def test_a_larger_allocation_never_takes_a_smaller_block(one, other):
    low, high = sorted((one, other))
    assert MIN_BLOCK_BYTES <= rounded(low) <= rounded(high)
