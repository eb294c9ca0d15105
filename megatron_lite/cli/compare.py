"""megatron-lite compare: two runs or traces beside each other."""

import sys
from pathlib import Path

from megatron_lite.cli.parser import Parser
from megatron_lite.errors import UserError
from megatron_lite.live_line import LiveLine
from megatron_lite.terminal import print_lines

COMPARISON_SCHEMA = 1  # of the JSON; raised when a reader of the old form would be wrong


def run(argv: list[str]):
    """Print what changed from A to B. ConfigError where they are not comparable and --force is not given."""
    options = _parser().parse_args(argv)
    from megatron_lite.analysis.analyze import analyze  # numpy and all the rest: not for --help or a typing mistake
    from megatron_lite.analysis.compare.compare import compare
    from megatron_lite.report.compare_terminal import comparison_lines
    from megatron_lite.report.text import get_style

    line = LiveLine()
    try:
        reports = [analyze([Path(path)], line.draw) for path in (options.a, options.b)]
    finally:
        line.wipe()
    found = compare(*(report.facts for report in reports), options.force, tuple(report.title for report in reports))
    written = _write(Path(options.json), found) if options.json else []
    print_lines([*comparison_lines(found, get_style(sys.stdout), options.all), "", *written])


def _parser() -> Parser:
    parser = Parser(
        "compare",
        "Says what changed from run A to run B, and what did not: flags, steps, phases, kernels, memory, "
        "each against the noise of its steps. Reads what `report` reads.",
    )
    parser.add_argument("a", metavar="A", help="a run folder, a trace, a folder of several ranks, or a snapshot")
    parser.add_argument("b", metavar="B", help="what to compare with it")
    parser.add_argument("--force", action="store_true", help="compare although model or batch differ")
    parser.add_argument("--json", metavar="FILE", help="the numbers, for programs")
    parser.add_argument("--all", action="store_true", help="all rows of all tables")
    return parser


def _write(path: Path, found) -> list[str]:
    """The line that names the file."""
    import json

    from megatron_lite.report.json_file import plain

    try:
        path.write_text(
            json.dumps({"schema": COMPARISON_SCHEMA, **plain(found)}, indent=1, allow_nan=False) + "\n",
            encoding="utf-8",
        )
    except OSError as error:
        raise UserError(f"--json {path}: cannot be written ({error.strerror or error}); name another file.") from error
    return [f"written: {path}"]
