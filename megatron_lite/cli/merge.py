"""megatron-lite merge: several .bin/.idx data sets to one."""

import os
import time
from collections.abc import Sequence

from megatron_lite.cli.megatron_tools import MERGE_REFUSED, add_answers
from megatron_lite.cli.parser import Parser
from megatron_lite.data.merge import merge
from megatron_lite.errors import UserError
from megatron_lite.live_line import LiveLine
from megatron_lite.terminal import print_lines
from megatron_lite.units import count, duration


def run(argv: list[str]):
    """Merge as `argv` says and print what was written. UserError for a mistake."""
    parser = Parser("merge", "Joins data sets to one, in the order in which they are named.")
    inputs = parser.add_mutually_exclusive_group(required=True)
    inputs.add_argument("--inputs", nargs="+", metavar="PREFIX", help="data sets, without .bin or .idx")
    inputs.add_argument("--input", metavar="FOLDER", help="all data sets of a folder, in the order of their names")
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX", help="writes PREFIX.bin and PREFIX.idx")
    add_answers(parser, {}, MERGE_REFUSED)
    options = parser.parse_args(argv)
    if options.input is not None:
        merge_and_say(_of_folder(options.input), options.output_prefix, "--input")
    else:
        merge_and_say(options.inputs, options.output_prefix, "--inputs")


def _of_folder(folder: str) -> list[str]:
    """The prefixes of its .bin and .idx files, sorted as Megatron's tool does; one without its other half is refused later."""
    try:
        names = [name for name in os.listdir(folder) if name.endswith((".bin", ".idx"))]
    except OSError as error:
        raise UserError(
            f"megatron-lite merge --input {folder}: cannot be read ({error.strerror}); "
            "give a folder, or name data sets by --inputs"
        ) from None
    if not names:
        raise UserError(
            f"megatron-lite merge --input {folder}: holds no .bin and .idx files; "
            "give another folder, or name data sets by --inputs"
        )
    return sorted({os.path.join(folder, name[:-4]) for name in names})


def merge_and_say(inputs: Sequence[str], output_prefix: str, flag: str):
    """Merge, with a line that shows how far it is and one for the result. `flag` is the one that named the inputs."""
    started, line = time.monotonic(), LiveLine()
    try:
        written = merge(inputs, output_prefix, flag, lambda tokens: line.draw(f"{count(tokens)} tokens"))
    finally:
        line.wipe()
    seconds = duration(time.monotonic() - started)
    print_lines(
        [
            f"{count(written.documents)} documents of {len(inputs)} data sets: {count(written.tokens)} tokens in {seconds}; --data-path {output_prefix}"
        ]
    )
