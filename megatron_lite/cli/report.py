"""`megatron-lite report`, `compare` and `audit` explain finished runs."""

import argparse
import gc
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_lite.cli.parser import Parser, write_json, write_text
from megatron_lite.errors import UserError
from megatron_lite.formats.file_names import BUNDLE_ENDINGS, REPORT_FILE, REPORT_PAGE, RUN_FILE
from megatron_lite.live_line import LiveLine
from megatron_lite.terminal import print_lines

if TYPE_CHECKING:
    from megatron_lite.analysis.compare.limits import Judged
    from megatron_lite.analysis.report import Report

COMPARISON_FILE = "comparison.html"
RANKS_SUFFIX = ".ranks.jsonl"  # report.ranks.jsonl: details of many ranks, which report.json leaves out
AUDIT_SCHEMA = 1  # of the audit's JSON; raised when a reader of the old form would be wrong
COMPARISON_SCHEMA = 1  # of the JSON; raised when a reader of the old form would be wrong
CHECK_FAILED = 1  # exit code of audit --strict and of compare --fail-if, as of any check
UNCLEAR = 3  # of compare --fail-if, where the noise is too large to tell


def _analyze(*groups: list[str]) -> "list[Report]":
    """A report for each group of paths."""
    from megatron_lite.analysis.analyze import analyze  # numpy and all the rest: not for --help or a typing mistake

    gc.freeze()  # what was imported stays: collections need not walk it
    line = LiveLine()
    with tempfile.TemporaryDirectory() as unpacked:
        try:
            return [analyze([_open_packed(Path(path), unpacked) for path in paths], line.draw) for paths in groups]
        finally:
            line.wipe()


def _open_packed(path: Path, folder: str) -> Path:
    """A run folder in `folder` of a baseline or a bundle; the path itself where it is neither."""
    from megatron_lite.analysis.run.baseline import unpack_baseline

    if path.name.endswith(BUNDLE_ENDINGS):
        from megatron_lite.bundle.archive import open_bundle

        return open_bundle(path, Path(tempfile.mkdtemp(dir=folder))) or path
    return unpack_baseline(path, Path(tempfile.mkdtemp(dir=folder))) or path


def run(argv: list[str]) -> None:
    """Print the report and write the files that `argv` asks for. UserError for a mistake."""
    parser = Parser(
        "report",
        "Shows where the steps of a run spend their time and why memory peaks. Reads run folders, PyTorch traces "
        "(.json, .json.gz, .pftrace; folders of several ranks), Nsight Systems exports (.sqlite) and memory snapshots "
        "(.pickle), of this trainer or any other PyTorch job.",
    )
    add = parser.add_argument
    add("paths", nargs="+", metavar="PATH", help="a run folder, or files of one run")
    add(
        "--html",
        metavar="FILE",
        help=f"write the page here [{REPORT_PAGE} in the run folder, else in the current one]",
    )
    add("--json", metavar="FILE", help=f"write the numbers here [{REPORT_FILE} beside the page]")
    add(
        "--perfetto",
        metavar="FILE",
        help="write one trace of all ranks here, for ui.perfetto.dev (.pftrace or .pftrace.gz)",
    )
    add("--open", action="store_true", help="open the page in the browser")
    add("--no-html", action="store_true", help="print only: no page, and no JSON without --json")
    add("--all", action="store_true", help="print all rows of all tables")
    add(
        "--baseline",
        metavar="FILE",
        help="write what `compare` needs of the run (a few kB, to commit)",
    )
    add(
        "--bundle",
        metavar="FILE",
        help="write the report and what it was made from, without names of users, machines and folders and without "
        "texts, into a .zip or .tar.gz to show to others; what was taken out is printed first",
    )
    options = parser.parse_args(argv)
    for flag, given in (("--html", options.html), ("--open", options.open)):
        if options.no_html and given:
            raise UserError(f"{flag} and --no-html exclude each other; keep one.")
    if options.perfetto:
        from megatron_lite.report.perfetto_file import check_file

        _check_place("--perfetto", Path(options.perfetto))
        check_file("--perfetto", Path(options.perfetto))
    if options.bundle:
        from megatron_lite.bundle.archive import check_archive_name

        check_archive_name(Path(options.bundle))
        _check_place("--bundle", Path(options.bundle))
    [report] = _analyze(options.paths)
    from megatron_lite.report.terminal import terminal_lines
    from megatron_lite.report.text import get_style

    written = _write_files(report, options)
    print_lines([*terminal_lines(report, get_style(sys.stdout), options.all), "", *written])
    if options.bundle:
        from megatron_lite.cli.bundle import write_bundle

        for lines in write_bundle(options.paths, report, Path(options.bundle)):
            print_lines(["", *lines])


def _check_place(flag: str, path: Path) -> None:
    """Refuse a file that cannot be written before anything is read: reading may take minutes.

    Args:
        flag: what names it.
        path: the file.

    Raises:
        UserError: there is something else of that name, or no folder for it.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise UserError(f"{flag} {path}: there is a folder, a pipe or a device of that name; name another file.")
    if not os.path.isdir(path.parent):
        raise UserError(f"{flag} {path}: there is no folder {path.parent}; make it, or name another file.")


def _write_files(report: "Report", options: argparse.Namespace) -> list[str]:
    """Write the page, the numbers, the baseline and the merged trace. Returns lines that name them."""
    from megatron_lite.report.html import html_page
    from megatron_lite.report.json_file import json_text, ranks_text

    page = None if options.no_html else Path(options.html or _choose_folder(options.paths) / REPORT_PAGE)
    numbers = None
    if options.json:
        numbers = Path(options.json)
    elif page:
        numbers = page.parent / REPORT_FILE
    done: list[str] = []
    failed: list[str] = []
    if page:
        is_asked = bool(options.html or options.open)
        _write_file("--html", page, html_page(report), is_asked, done, failed)
    if numbers:
        is_asked = bool(options.json)
        _write_file("--json", numbers, json_text(report), is_asked, done, failed)
        _write_file("--json", numbers.with_suffix(RANKS_SUFFIX), ranks_text(report), is_asked, done, failed)
    lines = failed
    if done:
        lines.insert(0, f"written: {', '.join(done)}")
    if options.baseline:
        lines.append(_write_baseline(report, options.baseline))
    if options.perfetto:
        lines.append(_write_timeline(report, Path(options.perfetto)))
    if page and options.open:
        lines.append(_open_page(page))
    return lines


def _write_timeline(report: "Report", path: Path) -> str:
    """Write one trace of all ranks. Returns the line that names it and its size; UserError without a trace."""
    from megatron_lite.analysis.timeline.build import build_timeline
    from megatron_lite.report.perfetto_file import write_perfetto
    from megatron_lite.units import size

    timeline = build_timeline(report)
    if timeline is None:
        raise UserError(f"--perfetto {path}: there is no trace among the paths; name a folder that holds one.")
    num_bytes = write_perfetto("--perfetto", path, timeline)
    return f"written: {path} ({size(num_bytes)}), for ui.perfetto.dev"


def _choose_folder(paths: list[str]) -> Path:
    """Choose where a report lies: in a run's own folder; one on foreign files is left where the user stands."""
    first = Path(paths[0])
    if len(paths) == 1 and (first / RUN_FILE).is_file():
        return first
    return Path()


def _write_file(flag: str, path: Path, text: str, is_asked: bool, done: list[str], failed: list[str]) -> None:
    """Write a file of a report, and add it to those that are done or failed. UserError for one that was asked for.

    Args:
        flag: what names it.
        path: where it lies.
        text: what is written; nothing is written for ''.
        is_asked: whether the user asked for it: such a file must not fail.
        done: the files that were written.
        failed: lines on those that could not be written.
    """
    if not text:
        return
    try:
        write_text(flag, path, text)
        done.append(str(path))
    except UserError as error:
        if is_asked:
            raise
        why = str(error).removeprefix(f"{flag} ").removesuffix("; name another file.")
        failed.append(f"{why}; --html FILE and --json FILE name other places")


def _write_baseline(report: "Report", path: str) -> str:
    """Write what `compare` needs of the run. Returns the line that says so; UserError without typical steps."""
    from megatron_lite.analysis.run.baseline import make_baseline

    run = report.facts.run
    if run is None or not run.ordinary.any():
        none = "there is no run folder with typical steps among the paths."
        raise UserError(f"--baseline {path}: {none}")
    text = json.dumps(make_baseline(run), allow_nan=False)
    return write_text("--baseline", path, text + "\n")


def _open_page(path: Path) -> str:
    """Open a page in the user's browser.

    Returns:
        The line that says so, or where the page is if this machine cannot show it.
    """
    why = _explain_no_browser()
    if not why:
        import webbrowser

        if webbrowser.open(path.resolve().as_uri()):
            return f"opened in the browser: {path}"
        why = "no browser was found"
    return f"not opened, {why}; the page is {path.resolve()}"


def _explain_no_browser() -> str:
    """Explain why this machine shows the user no browser; '' where it can."""
    if os.environ.get("BROWSER"):
        # editors set it on a machine that is reached by ssh, and forward what it opens
        return ""
    if os.environ.get("SSH_CONNECTION"):
        return "over ssh"
    has_display = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if sys.platform in ("darwin", "win32") or has_display:
        return ""
    return "without a display"


def compare_runs(argv: list[str]) -> int:
    """Print what changed from A to B. ConfigError where they are not comparable and --force is not given.

    Returns:
        0, or what became of the limits.
    """
    options = _parse_comparison(argv)
    from megatron_lite.analysis.compare.limits import judge, read_limit

    limits = [read_limit(text) for text in options.fail_if]
    a, b = _analyze([options.a], [options.b])
    from megatron_lite.analysis.compare.compare import compare
    from megatron_lite.report.comparison import comparison_lines, comparison_page, markdown_lines
    from megatron_lite.report.json_file import plain
    from megatron_lite.report.text import get_style

    found = compare(a.facts, b.facts, options.force, (a.title, b.title))
    judged = judge(found, limits)
    content = {"schema": COMPARISON_SCHEMA, **plain(found), "limits": plain(judged)}
    written = write_json(options.json, content)
    page = options.html or (COMPARISON_FILE if options.open else None)
    if page:
        written += [
            "",
            write_text("--html", page, comparison_page(found, judged, a.facts, b.facts)),
        ]
        if options.open:
            written.append(_open_page(Path(page)))
    if options.markdown:
        text = "\n".join(markdown_lines(found, judged)) + "\n"
        written += ["", write_text("--markdown", options.markdown, text)]
    lines = comparison_lines(found, get_style(sys.stdout), options.all, judged)
    print_lines([*lines, *written])
    return _choose_exit_code(judged)


def _choose_exit_code(judged: "Sequence[Judged]") -> int:
    """Choose the exit code for limits with their outcome: an exceeded one counts before one that noise hides."""
    from megatron_lite.analysis.compare.limits import Outcome

    outcomes = {one.outcome for one in judged}
    if Outcome.EXCEEDED in outcomes:
        return CHECK_FAILED
    if Outcome.UNCLEAR in outcomes:
        return UNCLEAR
    return 0


def _parse_comparison(argv: list[str]) -> argparse.Namespace:
    parser = Parser(
        "compare",
        "Shows what changed from run A to run B, and what did not: flags, steps, phases, kernels, memory, "
        "each compared with the noise of its steps. Reads what `report` reads.",
    )
    add = parser.add_argument
    add(
        "a",
        metavar="A",
        help="a run folder, a trace, a folder of several ranks, a snapshot, or a baseline",
    )
    add("b", metavar="B", help="the run, trace, snapshot or baseline to compare with it")
    add("--force", action="store_true", help="compare although model or batch differ")
    limits = (
        "exit with 1 if B exceeds this limit, with 3 if noise hides the answer: "
        '"step_ms > +5%%", "tokens_per_second < -3%%", "peak_bytes > +2%%", "backward_ms > +10%%"; '
        "may be given several times"
    )
    add("--fail-if", action="append", default=[], metavar="LIMIT", help=limits)
    add("--html", metavar="FILE", help="the page, with charts")
    add(
        "--open",
        action="store_true",
        help=f"open the page in the browser [--html {COMPARISON_FILE}]",
    )
    add("--markdown", metavar="FILE", help="a table for a pull request's comment")
    add("--json", metavar="FILE", help="the numbers, for programs")
    add("--all", action="store_true", help="all rows of all tables")
    return parser.parse_args(argv)


def audit(argv: list[str]) -> int:
    """Print a report's section of checks with all questions. Returns 0, or with --strict 1 where a check failed."""
    parser = Parser(
        "audit",
        "Checks a run against 19 performance questions. "
        "Each is passed or failed, with evidence, or not visible, with what to record. "
        "Most needs a run folder with a trace (shapes on) and a memory snapshot; it reads what `report` reads.",
    )
    add = parser.add_argument
    add("paths", nargs="+", metavar="RUN", help="a run folder, or files of one run")
    add(
        "--against",
        metavar="OTHER_RUN",
        help="a second run, for questions that need two: losses agree, 16 bits pay off",
    )
    add("--strict", action="store_true", help="exit with 1 if a question fails, for CI")
    add("--json", metavar="FILE", help="the answers, for programs")
    add("--all", action="store_true", help="all evidence of each check")
    options = parser.parse_args(argv)
    groups = [options.paths]
    if options.against:
        groups.append([options.against])
    report, *others = _analyze(*groups)
    from megatron_lite.analysis.findings.base import CheckResult
    from megatron_lite.analysis.findings.checks import answer_checks
    from megatron_lite.report.json_file import plain
    from megatron_lite.report.section import section_lines
    from megatron_lite.report.sections.checked import build_checked_section
    from megatron_lite.report.text import get_style, wrapped

    style = get_style(sys.stdout)
    checks = report.checks
    titles = wrapped(f"audit of {report.title}", "", "  ")
    against = None
    if others:
        checks = answer_checks(report.facts, report.findings, report.looks, others[0].facts)
        against = others[0].title
        titles += wrapped(f"held against {against}", "", "  ")
    section = build_checked_section(checks, report.facts.has_one_rank, everything=options.all)
    content = {"schema": AUDIT_SCHEMA, "title": report.title, "against": against, "points": plain(checks)}
    written = write_json(options.json, content)
    print_lines([*map(style.bold, titles), "", *section_lines(section, style), *written])
    has_failed = any(check.answer is CheckResult.FAILED for check in checks)
    return CHECK_FAILED if options.strict and has_failed else 0
