"""Exit codes of ranks, as errors of the launchers torchrun and torch.multiprocessing tell them."""

import socket
from collections.abc import Mapping
from pathlib import Path

import msgspec

from megatron_lite.last_words import read_words, words_path, write_words
from megatron_lite.process_state import pid_space

# which tell that another process ended, or that the launcher was told to end
LAUNCHER_ERRORS = ("ChildFailedError", "SignalException", "ProcessExitedException", "ProcessRaisedException")


def is_of_launcher(error: BaseException) -> bool:
    """Whether an error only tells how another process ended."""
    return type(error).__name__ in LAUNCHER_ERRORS


def find_exit_codes(error: BaseException) -> dict[int, int]:
    """Find the exit codes of ranks that a launcher's error tells, by the number of the process.

    Negative for a signal. Empty for other errors.
    """
    if not is_of_launcher(error):
        return {}
    # of torchrun, by rank
    failures = getattr(error, "failures", {})
    codes = {failure.pid: failure.exitcode for failure in failures.values()}
    # of torch.multiprocessing
    pid = getattr(error, "error_pid", None)
    if pid is not None:
        codes[pid] = getattr(error, "exit_code", None)
    return {pid: code for pid, code in codes.items() if isinstance(code, int)}


def note_exit_codes(folder: Path, codes: Mapping[int, int]) -> None:
    """Add exit codes to the last words of ranks that are gone and whose exit code is not known.

    Args:
        folder: Folder of the recording.
        codes: Exit codes by the number of the process.
    """
    if not codes:
        return
    here = (socket.gethostname(), pid_space())
    for name, words in read_words(folder):
        is_known = words.exit_code is not None or words.pid not in codes or (words.host, words.pids) != here
        if not is_known and words.pid is not None:
            noted = msgspec.structs.replace(words, exit_code=codes[words.pid], process_state="dead")
            write_words(words_path(folder, name), noted)
