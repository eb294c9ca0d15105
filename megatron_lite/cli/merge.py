"""megatron-lite merge: several .bin/.idx data sets to one."""

import time
from collections.abc import Sequence

from megatron_lite.cli.parser import Parser
from megatron_lite.data.merge import merge
from megatron_lite.live_line import LiveLine
from megatron_lite.units import count, duration


def run(argv: list[str]):
    """Merge as `argv` says and print what was written. UserError for a mistake."""
    parser = Parser("merge", "Joins data sets to one, in the order in which they are named.")
    parser.add_argument("--inputs", nargs="+", required=True, metavar="PREFIX", help="data sets, without .bin or .idx")
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX", help="writes PREFIX.bin and PREFIX.idx")
    options = parser.parse_args(argv)
    merge_and_say(options.inputs, options.output_prefix, "--inputs")


def merge_and_say(inputs: Sequence[str], output_prefix: str, flag: str):
    """Merge, with a line that shows how far it is and one for the result. `flag` is the one that named the inputs."""
    started, line = time.monotonic(), LiveLine()
    try:
        written = merge(inputs, output_prefix, flag, lambda tokens: line.draw(f"{count(tokens)} tokens"))
    finally:
        line.wipe()
    print(f"{count(written.documents)} documents of {len(inputs)} data sets: {count(written.tokens)} tokens "
          f"in {duration(time.monotonic() - started)}; --data-path {output_prefix}")
