"""Writes what `megatron-lite report --bundle FILE` asks for: a report and what it was made from, to show to others."""

import math
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_lite.errors import UserError
from megatron_lite.formats.file_names import REPORT_FILE, REPORT_PAGE
from megatron_lite.units import counted, size

if TYPE_CHECKING:
    from megatron_lite.analysis.report import Report
    from megatron_lite.bundle.clean_folder import CleanFolder

MAX_DIFFERENCES = 5  # that a line names
# how long reading took, and names of files
NOT_OF_THE_RUN = ("read_s", "paths", "title", "gaps")


class Bundle:
    """A bundle that lies in a folder and is not written yet.

    Args:
        paths: Files and folders of the run, as they were given for its report.
        report: The report on them.
        folder: An empty folder, in which the bundle is made.
    """

    def __init__(self, paths: list[Path], report: "Report", folder: Path):
        from megatron_lite.bundle.archive import FOLDER, is_bundle
        from megatron_lite.bundle.clean_folder import clean_folder

        for path in paths:
            if is_bundle(path):
                raise UserError(f"--bundle: {path} is a bundle already; send it as it is.")
        self.folder = folder / FOLDER
        self.folder.mkdir()
        self.made: CleanFolder = clean_folder(paths, self.folder)
        self._report = report

    def add_report(self) -> list[str]:
        """Put the report on what is left beside it. Returns the lines that say what was taken out."""
        from megatron_lite.analysis.analyze import analyze
        from megatron_lite.bundle.archive import LIST_FILE
        from megatron_lite.bundle.taken_out import describe_taken_out

        again = _without_place(analyze([self.folder]))
        differences = list(find_differences(self._report, again))
        lines = [*describe_taken_out(self.made), _describe_differences(differences)]
        self._write_report(again)
        (self.folder / LIST_FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")
        return lines

    def _write_report(self, report: "Report") -> None:
        from megatron_lite.bundle.archive import README, REPORT_TEXT
        from megatron_lite.report.html import html_page
        from megatron_lite.report.json_file import json_text, ranks_text
        from megatron_lite.report.terminal import terminal_lines
        from megatron_lite.report.text import Style

        texts = {
            REPORT_PAGE: html_page(report),
            REPORT_FILE: json_text(report),
            "report.ranks.jsonl": ranks_text(report),
            REPORT_TEXT: "\n".join(terminal_lines(report, Style(unicode=True), True)) + "\n",
            README: README_TEXT,
        }
        for name, text in texts.items():
            if text:
                (self.folder / name).write_text(text.replace(str(self.folder), self.folder.name), encoding="utf-8")

    def write(self, path: Path) -> str:
        """Write the archive. Returns the line that names it."""
        from megatron_lite.bundle.archive import MAX_BUNDLE_BYTES, write_archive
        from megatron_lite.bundle.last_look import find_secrets_left, list_secrets

        left = list(find_secrets_left(self.folder, list_secrets(os.environ)))
        if left:
            raise UserError(f"--bundle {path}: not written, a secret is left in {left[0]}; please report this bug.")
        num_bytes = sum(file.stat().st_size for file in self.folder.iterdir())
        if num_bytes > MAX_BUNDLE_BYTES:
            raise UserError(
                f"--bundle {path}: would hold {size(num_bytes)}, and {size(MAX_BUNDLE_BYTES)} is the most; "
                "name the files of fewer ranks."
            )
        written = write_archive(self.folder, path)
        return f"written: {path} ({size(written)}; {size(num_bytes)} unpacked)"


def write_bundle(paths: list[str], report: "Report", path: Path) -> Iterator[list[str]]:
    """Make a bundle. Yields the lines of what was taken out, then, when it is written, the line that names it.

    Args:
        paths: Files and folders of the run, as they were given for its report.
        report: The report on them.
        path: The archive, a .zip or a .tar.gz.

    Raises:
        UserError: It cannot be made or written.
    """
    with tempfile.TemporaryDirectory() as folder:
        bundle = Bundle([Path(one) for one in paths], report, Path(folder))
        yield bundle.add_report()
        yield [bundle.write(path)]


def _without_place(report: "Report") -> "Report":
    """The report without the folder in which it was made."""
    from megatron_lite.bundle.archive import FOLDER

    run = report.facts.run
    if run is not None:
        report = replace(report, facts=replace(report.facts, run=replace(run, folder=FOLDER)))
    return replace(report, paths=(FOLDER,))


# --- does the bundle tell the same as the run?


def find_differences(report: "Report", again: "Report") -> Iterator[str]:
    """Name what a report on a bundle tells otherwise than the one on its run: verdict, findings, numbers.

    Args:
        report: The report on the run.
        again: The report on the bundle.
    """
    from megatron_lite.report.json_file import as_json

    before = as_json(report)
    after = as_json(again)
    for name in NOT_OF_THE_RUN:
        before.pop(name, None)
        after.pop(name, None)
    if _judge(report) != _judge(again):
        yield "verdict"
    codes = [finding.code for finding in report.findings]
    if codes != [finding.code for finding in again.findings]:
        yield "findings"
    # fewer is right: files that nobody reads are not in a bundle
    if len(again.facts.gaps) > len(report.facts.gaps):
        yield "gaps"
    yield from _compare_numbers(before, after, "")


def _judge(report: "Report") -> tuple[object, ...]:
    verdict = report.verdict
    failure = report.failure
    why_failed = (failure.kind, failure.ranks, failure.confidence) if failure else None
    return verdict.word, verdict.bound, verdict.confidence, why_failed


def _compare_numbers(before: object, after: object, where: str) -> Iterator[str]:
    """Name the numbers, or lists, that differ; names and texts do."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before.keys() & after.keys():
            yield from _compare_numbers(before[key], after[key], f"{where}.{key}")
    elif isinstance(before, list) and isinstance(after, list):
        if len(before) != len(after):
            yield f"{where.lstrip('.')}: {len(before)} and {len(after)} entries"
            return
        for number, (one, other) in enumerate(zip(before, after)):
            yield from _compare_numbers(one, other, f"{where}[{number}]")
    elif _is_of_another_kind(before, after):
        yield where.lstrip(".")


def _is_of_another_kind(before: object, after: object) -> bool:
    """Whether two parts of reports are different numbers, or one of them is missing."""
    if _is_number(before) or _is_number(after):
        return before != after
    return (before is None) != (after is None)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _describe_differences(differences: list[str]) -> str:
    if not differences:
        return "A report on the bundle has the same verdict, findings and numbers."
    named = ", ".join(differences[:MAX_DIFFERENCES])
    if len(differences) > MAX_DIFFERENCES:
        named += ", ..."
    return f"A report on the bundle differs in {counted(len(differences), 'place')}: {named}"


README_TEXT = """# A run, to look at together

`megatron-lite report RUN --bundle FILE` made this. It holds a report (report.html, report.txt, report.json) and what
the report was made from. Names of users, machines, folders and projects, texts and keys were taken out before;
`taken_out.txt` lists what, by kind and number. The same name has the same substitute in all files.

To make the report again:

    pip install megatron_lite
    megatron-lite report FILE

or, of the unpacked folder, `megatron-lite report run`. Traces (`*.pt.trace.json.gz`) open in ui.perfetto.dev, memory
snapshots (`*.pickle`) in pytorch.org/memory_viz.
"""
