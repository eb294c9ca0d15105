"""The report of `megatron_lite.analyze` as an object, which a notebook shows as the page."""

import html
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_lite.analysis.analyze import analyze as analyze_files
from megatron_lite.analysis.report import Report
from megatron_lite.report.html import html_page
from megatron_lite.report.terminal import terminal_lines
from megatron_lite.report.text import get_style
from megatron_lite.terminal import escape

HEIGHT_PX = 720


@dataclass(frozen=True, repr=False)
class ShownReport(Report):
    """A report. Printed, it is the text of `megatron-lite report`; a notebook shows its page, charts included."""

    def __repr__(self) -> str:
        return "\n".join(map(escape, terminal_lines(self, get_style(sys.stdout))))

    def _repr_html_(self) -> str:
        # the page is foreign to the notebook: its scripts run, and reach nothing outside of the frame
        style = f"width: 100%; height: {HEIGHT_PX}px; border: 1px solid #8888; resize: vertical"
        return f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{html.escape(html_page(self))}"></iframe>'


def analyze(paths: str | Path | Sequence[str | Path]) -> ShownReport:
    """Explain a run as `megatron-lite report` does, as frozen dataclasses, whose fields docs/report.schema.json
    describes.

        found = megatron_lite.analyze("runs/mine")
        print(found.verdict.sentence)
        for finding in found.findings:
            print(finding.code, finding.cost_ms, finding.advice)

    Args:
        paths: a run folder, or the files of one run: traces of PyTorch, exports of Nsight Systems, memory snapshots.

    Raises:
        UserError: where nothing can be read. What cannot be read beside readable files is named among `facts.gaps`.
    """
    report = analyze_files([paths] if isinstance(paths, (str, Path)) else paths)
    return ShownReport(**vars(report))
