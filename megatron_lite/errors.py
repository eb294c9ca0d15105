"""Mistakes that a user can make and mend.

Every message is one line with three parts: the flag or file, the value, the remedy.
"""

import errno
import re
import resource

from megatron_lite.terminal import PYPROJECT

NO_ROOM = ("can't start new thread", "Resource temporarily unavailable", "bad_alloc")  # of a thread's stack, of C++
CUT_SHORT = re.compile(
    r"enforce fail.*(unexpected pos|file write failed)"
)  # torch's words for a disk that took no more


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type's name where it says nothing."""
    return (str(error).splitlines() or [""])[0] or type(error).__name__


def is_panic(error: BaseException) -> bool:
    """Whether a library in Rust gave up: its error is no Exception,
    so that nobody takes it for one that can be mended."""
    return type(error).__name__ == "PanicException"


def is_memory_error(error: BaseException) -> bool:
    """Whether memory ran out, also where C code turned that into another error,
    or a thread found no room for its stack."""
    limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, MemoryError) or isinstance(seen, OSError) and seen.errno == errno.ENOMEM:
            return True
        if limited and isinstance(seen, SystemError):  # C code that forgot to say why it failed
            return True
        if limited and isinstance(seen, RuntimeError) and any(words in str(seen) for words in NO_ROOM):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


EXPLANATION = "explained"  # the attribute of an error that holds its explanation


def attach_explanation(error: BaseException, lines: list[str]) -> None:
    """Let an error carry the lines that have explained it, in the place of a traceback."""
    setattr(error, EXPLANATION, lines)


def get_explanation(error: BaseException) -> list[str] | None:
    """Return the lines that have explained an error; None where nobody has."""
    lines: list[str] | None = getattr(error, EXPLANATION, None)
    return lines


def describe_import_error(package: str, error: Exception) -> str:
    """Describe a package that is not installed, or that a memory limit does not allow, with the remedy."""
    remedy = "install megatron_lite again, with what it requires"
    if PYPROJECT.is_file():  # a checkout
        remedy = f"pip install -e . in {PYPROJECT.parent} installs it"
    return f"{package} cannot be imported ({first_line(error)}); {remedy}."


def describe_memory_error() -> str:
    """Describe that memory ran out, with the limit of this process, if it has one."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return "memory ran out; free some, or give it less to do."
    return f"memory ran out: this process may take {limit // 2**20} MiB (ulimit -v {limit // 2**10}); raise that limit."


class UserError(Exception):
    """A mistake the user can mend. Printed as one line, without a traceback; exit code 2."""

    exit_code = 2

    @property
    def lines(self) -> list[str]:
        return [str(self)]


class ConfigError(UserError):
    """All mistakes of one command line, one line each."""

    def __init__(self, mistakes: list[str]):
        self.mistakes = list(mistakes)
        super().__init__("\n".join(self.mistakes))

    @property
    def lines(self) -> list[str]:
        return self.mistakes


class DataError(UserError):
    """A data file that is missing, damaged, or does not fit the flags."""


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged, or does not fit the flags."""


class DivergedError(UserError):
    """The loss or a gradient became NaN or Inf and the run was stopped. Megatron's exit code for it is 16.

    Args:
        line: The message.
        iteration: The first iteration whose figures are not finite.
    """

    exit_code = 16

    def __init__(self, line: str, iteration: int):
        self.iteration = iteration
        super().__init__(line)


class InjectedError(UserError):
    """A result that --error-injection-rate counts as wrong. exit_code: Megatron's for the type of the error."""

    def __init__(self, line: str, exit_code: int):
        self.exit_code = exit_code
        super().__init__(line)


class RanksError(UserError):
    """An error for another rank that died, hangs or left, so that this one cannot go on.

    Its exit code is 1: it is no mistake of the user.

    Args:
        line: The message.
        told: Whether another rank says so already.
        ended: Whether the rank to blame has ended, and its launcher is about to notice.
    """

    exit_code = 1

    def __init__(self, line: str, *, told: bool = False, ended: bool = False):
        self.told = told
        self.ended = ended
        super().__init__(line)


def describe_io_error(error: BaseException) -> str:
    """The gist of an error in one line."""
    if failures := getattr(error, "failures", None):  # of ranks, in torch's CheckpointException
        return describe_io_error(failures[min(failures)][0])
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if CUT_SHORT.search(str(error)):
        return "a file could not be written to its end"
    return first_line(error)
