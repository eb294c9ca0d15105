"""The real Nsight Systems in tests: how a run is started under it by hand, and what its reports hold."""

import importlib.util
import os
import shutil
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

from support.paths import REPO

NSYS = os.environ.get("NSYS") or shutil.which("nsys")
# docs/profiling.md tells users to start runs without a GPU so
ANY_STRING = "NSYS_NVTX_PROFILER_REGISTER_ONLY=0"
OPTIONS = (
    "-t nvtx -s none --cpuctxsw=none --capture-range=nvtx --nvtx-capture=profile --capture-range-end=stop --kill=none"
)
# nsys 2022 to 2024 does not find its importer as Debian packs it, and then leaves a .qdstrm; the start script finds it
IMPORT = f'source "{REPO}/examples/nsight.sh"; nsys=$1 nsys_report=$2; import_report'


def why_not() -> str | None:
    """What is missing for runs under nsys; None: nothing."""
    if not NSYS:
        return "no nsys here; NSYS=/path/to/nsys names one"
    return "the package nvtx is missing" if importlib.util.find_spec("nvtx") is None else None


def under_nsys(report: Path) -> list[str]:
    """What to put before a command; `report` is without its ending."""
    return ["env", ANY_STRING, NSYS, "profile", *OPTIONS.split(), "-o", str(report)]


def import_report(report: Path) -> Path | None:
    """The report that nsys left, imported if it was not; None if there is none."""
    subprocess.run(["bash", "-c", IMPORT, "bash", NSYS, report], check=True, capture_output=True)
    path = report.with_name(f"{report.name}.nsys-rep")
    return path if path.exists() else None


class Report:
    """What nsys itself exports of a report."""

    def __init__(self, path: Path):
        self.path, empty = path, path.with_name(f"{path.stem}.empty")
        empty.mkdir()
        database = empty / "report.sqlite"
        subprocess.run(
            [NSYS, "export", "--type", "sqlite", "--output", database, path], check=True, cwd=empty, capture_output=True
        )
        with closing(sqlite3.connect(database)) as rows:
            ranges = rows.execute("""SELECT coalesce(e.text, s.value), e.start, e.end, e.globalTid >> 24 & 0xffffff
                FROM NVTX_EVENTS e LEFT JOIN StringIds s ON s.id = e.textId WHERE e.eventType IN (34, 59) ORDER BY e.start""")
            self.events = [event for event in ranges if event[0]]
            self.strings = {value for (value,) in rows.execute("SELECT value FROM StringIds")}

    @property
    def steps(self) -> list[list[str]]:
        """The steps of each process."""
        named = [(process, text) for text, _, _, process in self.events if text.startswith("step ")]
        return [[text for p, text in named if p == process] for process in dict.fromkeys(p for p, _ in named)]

    @property
    def marks(self) -> list[str]:
        return sorted(text for text, *_ in self.events if text.startswith("rank "))

    def phases(self, step: str) -> set[str]:
        [(start, end)] = [(start, end) for text, start, end, _ in self.events if text == step]
        return {text for text, begun, ended, _ in self.events if start <= begun and ended and ended <= end} - {step}
