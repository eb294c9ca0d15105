"""Printing many lines to whatever stands behind standard output."""

import sys
from collections.abc import Sequence


def print_lines(lines: Sequence[str]):
    """A terminal that cannot show a letter gets a question mark. BrokenPipeError is for the command's main."""
    encoding = sys.stdout.encoding or "ascii"
    print("\n".join(lines).rstrip().encode(encoding, "replace").decode(encoding), flush=True)
