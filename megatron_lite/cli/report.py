"""megatron-lite report: why a run is slow and why memory peaks, on the terminal, as a page and as JSON."""

import sys
from pathlib import Path

from megatron_lite.cli.parser import Parser
from megatron_lite.errors import UserError
from megatron_lite.live_line import LiveLine
from megatron_lite.run_folder import RUN_FILE
from megatron_lite.terminal import print_lines

HTML_FILE, JSON_FILE = "report.html", "report.json"


def run(argv: list[str]):
    """Print the report of what lies at the paths and write report.html and report.json."""
    options = _parser().parse_args(argv)
    if options.no_html and options.html:
        raise UserError("--html and --no-html exclude each other; keep one.")
    from megatron_lite.analysis.analyze import analyze  # numpy and all the rest: not for --help or a typing mistake
    from megatron_lite.report.terminal import terminal_lines
    from megatron_lite.report.text import get_style

    line = LiveLine()
    try:
        report = analyze([Path(path) for path in options.paths], line.draw)
    finally:
        line.wipe()
    written = _write(report, options)
    print_lines([*terminal_lines(report, get_style(sys.stdout), options.all), "", *written])


def _parser() -> Parser:
    parser = Parser(
        "report",
        "Says where the steps of a run go and why memory peaks. Reads run folders, PyTorch traces (.json, "
        ".json.gz; folders of several ranks), Nsight Systems exports (.sqlite) and memory snapshots "
        "(.pickle), of this trainer or any other PyTorch job.",
    )
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a run folder, or files of one run")
    parser.add_argument(
        "--html", metavar="FILE", help=f"the page [{HTML_FILE} in the run folder, else in the current one]"
    )
    parser.add_argument("--json", metavar="FILE", help=f"the numbers [{JSON_FILE} beside the page]")
    parser.add_argument(
        "--no-html", action="store_true", help="print only: no page, and no JSON unless --json asks for it"
    )
    parser.add_argument("--all", action="store_true", help="all rows of all tables on the terminal")
    return parser


def _write(report, options) -> list[str]:
    """Make the files; returns the line that names them. Only a file that the user asked for must not fail."""
    from megatron_lite.report.html import html_page
    from megatron_lite.report.json_file import json_text

    html, json = _files(options)
    done, failed = [], []
    for path, flag, make in (
        (html, options.html and "--html", html_page),
        (json, options.json and "--json", json_text),
    ):
        if path is None:
            continue
        try:
            path.write_text(make(report), encoding="utf-8")
            done.append(str(path))
        except OSError as error:
            why = f"{path}: cannot be written ({error.strerror or error})"
            if flag:
                raise UserError(f"{flag} {why}; name another file.") from error
            failed.append(f"{why}; --html FILE and --json FILE name other places")
    return [*([f"written: {', '.join(done)}"] if done else []), *failed]


def _files(options) -> tuple[Path | None, Path | None]:
    """(page, JSON): in a run's own folder; a report on foreign files is left where the user stands."""
    first = Path(options.paths[0])
    folder = first if len(options.paths) == 1 and (first / RUN_FILE).is_file() else Path()
    html = None if options.no_html else Path(options.html) if options.html else folder / HTML_FILE
    beside = html.parent / JSON_FILE if html else None
    return html, Path(options.json) if options.json else beside
