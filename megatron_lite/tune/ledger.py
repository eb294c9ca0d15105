"""The file in which everything is written down that was tried, and from which tuning goes on."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from megatron_lite.errors import UserError, describe_io_error
from megatron_lite.formats.tune_ledger import (
    LedgerLine,
    MeasuredRun,
    Settings,
    TuneOutcome,
    TuneRequest,
    TuneTrial,
    decode_line,
    encode_line,
)
from megatron_lite.shared_files import read_foreign

Line = TypeVar("Line", TuneTrial, TuneOutcome)
MAX_LEDGER_BYTES = 2**28


class Ledger:
    """The lines of a ledger; what stands in it already is not measured again.

    Attributes:
        path: The file.
    """

    def __init__(self, path: Path, request: TuneRequest, anew: bool = False):
        """Open the ledger of a request, or begin it.

        Args:
            path: the file.
            request: what is asked for.
            anew: begin anew where it is a ledger; what it held is kept beside it.

        Raises:
            UserError: it is the ledger of another request, or cannot be read or written.
        """
        self.path = path
        self._runs: list[MeasuredRun] = []
        self._others: list[LedgerLine] = []
        content = _read_content(path)
        lines = list(_decode_lines(path, content))
        first = lines[0] if lines else None
        if isinstance(first, TuneRequest) and (anew or _is_unused(lines, request)):
            if len(lines) > 1:
                _put_aside(path)
            content = b""
            lines = []
            first = None
        if first is None and not encode_line(request).startswith(content):
            raise UserError(f"--ledger {path}: is no ledger; name another file.")
        if first not in (None, request):
            raise UserError(f"--ledger {path}: {_describe_other(first, request)}.")
        # not before it is known to be a ledger: another file is left as it is
        _drop_cut_line(path, content)
        if first is None:
            self._append(request, mode="wb")
        for line in lines[1:]:
            if isinstance(line, MeasuredRun):
                self._runs.append(line)
            else:
                self._others.append(line)

    def take_run(self, wanted: MeasuredRun) -> MeasuredRun | None:
        """Take a run that was measured before; None where it was not.

        Args:
            wanted: purpose, number, round and settings of the run.
        """
        for run in self._runs:
            if _identify(run) == _identify(wanted):
                return run
        return None

    def add_run(self, run: MeasuredRun) -> None:
        """Write down a run."""
        self._runs.append(run)
        self._append(run)

    def add(self, line: Line) -> None:
        """Write down a trial or an outcome, unless it stands there already."""
        if line not in self._others:
            self._others.append(line)
            self._append(line)

    def _append(self, line: LedgerLine, mode: Literal["ab", "wb"] = "ab") -> None:
        """Append a line, whole also where the process is killed the next moment.

        Args:
            line: of the ledger.
            mode: of the file; "wb": the line is the first one.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open(mode) as file:
                file.write(encode_line(line))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise _refuse(self.path, "cannot be written", error) from None


def _is_unused(lines: Sequence[LedgerLine], request: TuneRequest) -> bool:
    """Whether a ledger holds nothing but a request that differs by its files at most: a script may have been mended."""
    [first, *others] = lines
    if others or not isinstance(first, TuneRequest):
        return False
    return msgspec.structs.replace(first, files=request.files) == request


def _put_aside(path: Path) -> None:
    """Rename a ledger, so that another one may begin in its place; the one that was put aside before is gone."""
    try:
        path.replace(path.with_name(f"{path.name}.old"))
    except OSError as error:
        raise _refuse(path, "cannot be written", error) from None


def _describe_other(first: LedgerLine | None, request: TuneRequest) -> str:
    """Say of which other request a ledger is, and what to do.

    Args:
        first: the line with which it begins.
        request: what is asked for.
    """
    other = _find_other(first, request)
    if other or not isinstance(first, TuneRequest):
        return f"is the ledger of {other}; name another file"
    # the same command
    changed = sorted(dict(first.files.items() ^ request.files.items()))
    if changed and first.files:
        return f"{changed[0]} has changed since it was begun; begin it anew with --restart, or name another file"
    return "is the ledger of another version; name another file"


def _refuse(path: Path, what: str, error: OSError) -> UserError:
    """Make the error of a ledger that the system does not let be read or written."""
    return UserError(f"--ledger {path}: {what} ({describe_io_error(error)}); name another file.")


def _identify(run: MeasuredRun) -> tuple[str, int, int, Settings]:
    """Build the key of a run."""
    return run.purpose, run.number, run.round, run.settings


def _read_content(path: Path) -> bytes:
    """Read a file; b"" where there is none."""
    try:
        return read_foreign(path, MAX_LEDGER_BYTES)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise _refuse(path, "cannot be read", error) from None


def _decode_lines(path: Path, content: bytes) -> Iterator[LedgerLine]:
    """Decode a ledger's whole lines."""
    whole, _, _ = content.rpartition(b"\n")
    for number, text in enumerate(whole.splitlines(), 1):
        try:
            yield decode_line(text)
        except (msgspec.ValidationError, msgspec.DecodeError):
            raise UserError(f"--ledger {path}: line {number} is none of a ledger; name another file.") from None


def _drop_cut_line(path: Path, content: bytes) -> None:
    """Take the line out of a ledger that a kill cut off at its end."""
    _, _, cut = content.rpartition(b"\n")
    if not cut:
        return
    try:
        os.truncate(path, len(content) - len(cut))
    except OSError as error:
        raise _refuse(path, "cannot be written", error) from None


def _find_other(first: LedgerLine | None, request: TuneRequest) -> str:
    """Name what differs from the request; "" where the words do not."""
    if not isinstance(first, TuneRequest):
        return "no command"
    if first.command != request.command:
        return "another command"
    if first.knobs != request.knobs:
        return "another --knobs"
    if first.variables != request.variables:
        names = sorted(dict(first.variables.items() ^ request.variables.items()))
        return f"the command with another {', '.join(names)}"
    for name in ("steps", "rounds", "tolerance"):
        if getattr(first, name) != getattr(request, name):
            return f"--{name} {getattr(first, name)}"
    return ""
