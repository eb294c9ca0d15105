"""megatron-lite audit: eighteen questions to one profiled run, each answered from what the run shows."""

import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_lite.cli.parser import Parser
from megatron_lite.errors import UserError
from megatron_lite.live_line import LiveLine
from megatron_lite.terminal import print_lines

FAILED = 1  # exit code of --strict, as of any check


def run(argv: list[str]) -> int:
    """Print the answers. Returns 0, or with --strict 1 where a point fails."""
    options = _parser().parse_args(argv)
    from megatron_lite.analysis.analyze import analyze  # numpy and all the rest: not for --help or a typing mistake
    from megatron_lite.analysis.audit.answers import Answer
    from megatron_lite.analysis.audit.audit import audit_run
    from megatron_lite.report.audit_terminal import audit_lines
    from megatron_lite.report.text import get_style

    line = LiveLine()
    try:
        report = analyze([Path(path) for path in options.paths], line.draw)
        other = analyze([Path(options.against)], line.draw) if options.against else None
    finally:
        line.wipe()
    points = audit_run(report.facts, report.findings, other.facts if other else None)
    titles = [one.title for one in (report, other) if one]
    written = _write(Path(options.json), points, titles) if options.json else []
    print_lines(
        [*audit_lines(points, titles, get_style(sys.stdout), options.all), *(["", *written] if written else [])]
    )
    return FAILED if options.strict and any(point.answer is Answer.FAIL for point in points) else 0


def _parser() -> Parser:
    parser = Parser(
        "audit",
        "Asks a run 18 questions about its performance: pass and fail with the evidence, not seen with what to record. "
        "Most needs a run folder with a trace (shapes on) and a memory snapshot; it reads what `report` reads.",
    )
    parser.add_argument("paths", nargs="+", metavar="RUN", help="a run folder, or files of one run")
    parser.add_argument(
        "--against", metavar="OTHER_RUN", help="a second run: do the losses agree, do 16 bits pay against fp32"
    )
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a point fails, for CI")
    parser.add_argument("--json", metavar="FILE", help="the answers, for programs")
    parser.add_argument("--all", action="store_true", help="all evidence of each point")
    return parser


def _write(path: Path, points: Sequence, titles: Sequence[str]) -> list[str]:
    """The line that names the file."""
    import json

    from megatron_lite.analysis.audit.audit import AUDIT_SCHEMA
    from megatron_lite.report.json_file import plain

    against = titles[1] if len(titles) > 1 else None
    content = {"schema": AUDIT_SCHEMA, "title": titles[0], "against": against, "points": plain(points)}
    try:
        path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--json {path}: cannot be written ({error.strerror or error}); name another file.") from error
    return [f"written: {path}"]
