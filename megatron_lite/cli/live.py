"""`megatron-lite live` follows a run that goes on in a terminal, by what it writes into its folder."""

import contextlib
import io
import os
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_lite.cli.parser import Parser
from megatron_lite.errors import UserError
from megatron_lite.formats.file_names import RUN_FILE, STEPS_FILE
from megatron_lite.terminal import print_lines
from megatron_lite.units import counted, duration

if TYPE_CHECKING:
    from megatron_lite.report.live_screen import View

RUN_FAILED = 1
SILENT = 3  # exit codes: the run failed or is gone; it gives no sign any more, for whatever reason
SILENCE_S = 1800
MIN_SHOWN_S = 30.0
STEPS_SHOWN = 5.0  # of silence, at least, and times the longest of the newest steps
REFRESH_S = 1.0
LINE_S = 20.0  # of a terminal; of lines, where output goes elsewhere
MAX_LOAD = 0.05  # share of a core that following takes
LINE_WIDTH = 100  # where there is no terminal


class Follower:
    """Keeps the newest view of the run in a folder."""

    def __init__(self, folder: Path):
        from megatron_lite.analysis.run.step_lines import StepLines  # numpy: not for --help

        self._folder = folder
        self._lines = StepLines(folder / STEPS_FILE)
        self._seen: tuple[object, ...] = ()  # the status, and what the files looked like
        self._sign = time.monotonic()
        self.view: View | None = None

    def look(self) -> "View":
        """Read what is new, and return the newest view. UserError where nothing of a run can be read."""
        from megatron_lite.analysis.run.read import read_run
        from megatron_lite.analysis.run.read_record import read_record
        from megatron_lite.cli.live_view import build_view

        stats = []
        for name in (RUN_FILE, STEPS_FILE):
            with contextlib.suppress(OSError):
                stats.append(os.stat(self._folder / name))
        record, _ = read_record(self._folder)
        status = record.status if record is not None else None
        seen = (status, *((one.st_ino, one.st_size, one.st_mtime_ns) for one in stats))
        is_new = seen != self._seen
        if self.view is not None and not is_new:
            return self.view
        if is_new:
            # what was written before is as old as it says, unless another machine's clock is ahead
            now = time.time()
            age_s = 0.0 if self._seen else now - max((one.st_mtime for one in stats), default=now)
            self._seen = seen
            self._sign = time.monotonic() - max(age_s, 0.0)
        run = read_run(self._folder, self._lines)
        ranks = self._lines.read_ranks(recent=True)
        self.view = build_view(run, ranks, self._lines.read_hardware(recent=True))
        return self.view

    @property
    def silent_s(self) -> float:
        """Since the run's last sign."""
        return time.monotonic() - self._sign


def run(argv: list[str]) -> int:
    """Follow the run to its end. Returns 0, RUN_FAILED or SILENT."""
    parser = Parser(
        "live",
        "Follows a run in a terminal: progress and time left, loss, step time by phase, ranks, memory, warnings. Reads "
        "the run folder of the trainer or of `megatron-lite watch`, on any machine that sees it. Ends with the run: 0 "
        "if it has finished, 1 if it failed or its process is gone, 3 if it stopped writing. Without a terminal, "
        "prints a line every 20 seconds.",
    )
    add = parser.add_argument
    add("run", metavar="RUN", help="a run folder")
    add("--once", action="store_true", help="print the current state and exit")
    add(
        "--silence",
        type=float,
        default=SILENCE_S,
        metavar="SECONDS",
        help=f"exit when the run has not written for so long [{SILENCE_S}]",
    )
    options = parser.parse_args(argv)
    folder = Path(options.run)
    why_not = _explain_no_run(folder, options.once)
    if why_not:
        raise UserError(f"megatron-lite live {folder}: {why_not}.")
    if not options.silence > 0:
        raise UserError(f"--silence {options.silence:g}: must be above 0.")
    if isinstance(sys.stdout, io.TextIOWrapper):  # a notebook's stream is none
        sys.stdout.reconfigure(errors="replace")
    follower = Follower(folder)
    if options.once:
        view = follower.look()
        _print_view(view)
        return _judge(view.status) or 0
    code = _follow(follower, folder, options.silence)
    last = follower.view
    if last is not None:
        _print_view(last)
    if last is None or code == SILENT:
        end = f"the run has written nothing for {duration(follower.silent_s)}"
    else:
        end = f"the run has ended: {last.status.partition(':')[0]}"
    print_lines([f"live: {end}"])
    return code


def _explain_no_run(folder: Path, is_once: bool) -> str:
    """Explain why a folder cannot be followed, and what to do; '' where it can.

    Args:
        folder: what was named.
        is_once: whether a run must have begun there already.
    """
    if not folder.is_dir():
        return _explain_no_folder(folder)
    runs = [] if (folder / RUN_FILE).exists() else _find_runs(folder)
    if runs:
        return f"no run itself; it holds {_name_runs(runs)}"
    if _holds_run(folder):
        return ""
    recordings = _describe_recordings(folder)
    if recordings or not is_once:
        return recordings
    waits = "without --once, live waits until one begins there"
    return f"no run has begun there ({RUN_FILE} is missing); {waits}"


MAX_FOLDER_DEPTH = 2  # of folders below the one that was named
MAX_RUNS_NAMED = 3


def _find_runs(folder: Path) -> list[Path]:
    """Folders of runs that lie within it, the newest first."""
    found: list[tuple[float, Path]] = []
    for depth in range(1, MAX_FOLDER_DEPTH + 1):
        for file in folder.glob("/".join(["*"] * depth + [RUN_FILE])):
            with contextlib.suppress(OSError):
                found.append((file.stat().st_mtime, file.parent))
    return [path for _, path in sorted(found, reverse=True)]


def _name_runs(runs: list[Path]) -> str:
    named = ", ".join(map(str, runs[:MAX_RUNS_NAMED]))
    if len(runs) > MAX_RUNS_NAMED:
        named += f" and {len(runs) - MAX_RUNS_NAMED} more"
    return f"{named}, newest first: megatron-lite live {shlex.quote(str(runs[0]))} follows it"


def _holds_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in (RUN_FILE, STEPS_FILE))


def _describe_recordings(path: Path) -> str:
    """Describe how to read the traces and snapshots of `path`, a file or folder without a run; '' where there are
    none."""
    from megatron_lite.analysis.discover import discover_sources  # numpy: not for --help

    try:
        sources = discover_sources([path])
    except UserError:
        return ""
    kinds = []
    if sources.traces:
        kinds.append(counted(len(sources.traces), "trace"))
    if sources.snapshots:
        kinds.append(counted(len(sources.snapshots), "memory snapshot"))
    if not kinds:
        return ""
    command = f"megatron-lite report {shlex.quote(str(path))}"
    if not path.is_dir():
        kind = "a trace" if sources.traces else "a memory snapshot"
        return f"{kind}, and live follows a run's folder; {command} explains it"
    return f"no run to follow (no {RUN_FILE}); it holds {' and '.join(kinds)}: {command} explains them"


def _explain_no_folder(path: Path) -> str:
    if path.exists():
        return _explain_file(path)
    runs = _find_runs(path.parent) if path.parent.is_dir() else []
    if runs:
        return f"no such folder; {path.parent} holds {_name_runs(runs)}"
    return f"no such folder; name the folder that holds the run's {RUN_FILE}, which the run prints at its end"


def _explain_file(path: Path) -> str:
    recordings = _describe_recordings(path)
    if recordings:
        return recordings
    if _holds_run(path.parent):
        command = f"megatron-lite live {shlex.quote(str(path.parent))}"
        return f"a file; a run is a folder with {RUN_FILE}: {command} follows that"
    return f"a file, and none of a run; name the folder that holds the run's {RUN_FILE}"


def _follow(follower: Follower, folder: Path, silence_s: float) -> int:
    """Show the run until it has ended, or writes nothing for `silence_s` seconds. Returns the exit code."""
    from rich.console import Console
    from rich.live import Live

    from megatron_lite.report.live_screen import describe_newest, draw_view

    waiting = f"waiting for a run to begin in {folder} (no {RUN_FILE} yet); Ctrl+C ends this"
    console = Console(file=sys.stdout, highlight=False, markup=False)
    is_terminal = sys.stdout.isatty() and not console.is_dumb_terminal
    screen = Live(console=console, screen=True, auto_refresh=False) if is_terminal else None
    printed = -LINE_S
    with screen or contextlib.nullcontext():
        while True:
            began = time.process_time()
            with contextlib.suppress(UserError):  # nothing is there yet
                follower.look()
            view = follower.view
            code = SILENT if follower.silent_s > silence_s else None
            if view and _judge(view.status) is not None:
                code = _judge(view.status)
            if code is not None:
                return code
            if screen and view:
                silence = _describe_silence(view, follower.silent_s)
                screen.update(draw_view(view, silence, console, console.height), refresh=True)
            elif screen:
                screen.update(waiting, refresh=True)
            elif time.monotonic() - printed >= LINE_S:
                printed = time.monotonic()
                print_lines([describe_newest(view) if view else waiting])
            time.sleep(max(REFRESH_S, (time.process_time() - began) / MAX_LOAD))


def _judge(status: str) -> int | None:
    """The exit code of a run that has ended so; None of one that may go on."""
    if status.startswith(("running", "unknown")):
        return None
    return RUN_FAILED if status.startswith(("failed", "killed", "interrupted")) else 0


def _describe_silence(view: "View", silent_s: float) -> str:
    """Describe how long the run has written nothing; '' for as long as a step may take."""
    if silent_s < max(MIN_SHOWN_S, STEPS_SHOWN * view.slowest_ms / 1000):
        return ""
    return f"the run has written nothing for {duration(silent_s)}: it saves, evaluates, waits or hangs"


def _print_view(view: "View") -> None:
    """Print a view on standard output, with the characters that it can show."""
    from rich.console import Console

    from megatron_lite.report.live_screen import draw_view

    width = None if sys.stdout.isatty() else LINE_WIDTH
    console = Console(file=sys.stdout, highlight=False, markup=False, width=width)
    if sys.stdout.isatty():
        console.print(draw_view(view, "", console))
        return
    with console.capture() as captured:
        console.print(draw_view(view, "", console))
    print_lines([line.rstrip() for line in captured.get().split("\n")])
