"""Messages written by the column are those that are written one by one."""

import struct

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.perfetto_reader import fields, first

from megatron_lite.report.protobuf import (
    Fixed64Column,
    MessageColumn,
    VarintColumn,
    bytes_field,
    number_field,
    tag,
    varint,
    write_messages,
)

ROW = st.tuples(st.integers(0, 2**62), st.integers(0, 300), st.floats(allow_nan=False), st.booleans(), st.booleans())


def test_numbers_as_the_format_describes_them():
    assert [varint(value).hex() for value in (0, 1, 127, 128, 150, 2**63)] == [
        "00",
        "01",
        "7f",
        "8001",
        "9601",
        "80808080808080808001",
    ]
    assert varint(-1).hex() == "ffffffffffffffffff01"
    assert tag(47, 1).hex() == "f902" and number_field(1, 150).hex() == "089601"
    assert bytes_field(2, "testing").hex() == "120774657374696e67"


@given(st.lists(ROW, max_size=20))
@settings(derandomize=True, max_examples=40, deadline=None)
def test_columns_are_messages_one_by_one(rows):
    large, small, number, has_small, has_inner = (np.array(column) for column in zip(*rows)) if rows else [
        np.empty(0, kind) for kind in (np.int64, np.int64, float, bool, bool)
    ]  # fmt: skip
    inner = (VarintColumn(1, small, has_inner), Fixed64Column(2, number, has_inner))
    columns = (VarintColumn(1, large), VarintColumn(300, small, has_small), MessageColumn(4, inner, has_inner))
    expected = b""
    for one, other, third, small_there, inner_there in rows:
        content = number_field(1, one)
        if small_there:
            content += number_field(300, other)
        if inner_there:
            content += bytes_field(4, number_field(1, other) + tag(2, 1) + struct.pack("<d", third))
        expected += bytes_field(7, content)
    written = write_messages(MessageColumn(7, columns)).tobytes()
    assert written == expected
    assert [first(content)[1] for _, content in fields(written)] == [row[0] for row in rows]
