"""Reads a pickle that may be hostile: plain values only, and nothing is executed."""

import contextlib
import pickle
from pathlib import Path

from megatron_lite.errors import UserError

MOST_MEMORY_PER_BYTE, ROOM = 60, 2**32  # a snapshot takes 10 to 30 times its file's size; the rest is what a process needs
FROM_TORCH = "write it again with torch.cuda.memory._dump_snapshot or --record-memory-history"


class _PlainValues(pickle.Unpickler):
    """Every way to code leads through one of these two."""

    def find_class(self, module, name):
        raise _Refused(f"names {module}.{name}")

    def persistent_load(self, pid):
        raise _Refused("refers to objects outside of itself")


class _Refused(Exception):
    pass


def plain_values(path: Path):
    """What the pickle at `path` holds. Raises UserError for one that is damaged, cut, or holds more than plain values."""
    try:
        with open(path, "rb") as file, _bounded_memory(path.stat().st_size):
            return _PlainValues(file).load()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check the file.") from None
    except _Refused as why:
        raise UserError(f"{path}: {_printable(str(why))}, but a memory snapshot holds plain values only; reading it could run "
                        f"its code and is refused; {FROM_TORCH}.") from None
    except MemoryError:
        raise UserError(f"{path}: asks for far more memory than its size explains; it is damaged: {FROM_TORCH}.") from None
    except Exception as error:  # noqa: BLE001 - damaged pickles make the reader raise errors of many kinds
        raise UserError(f"{path}: is no readable pickle ({type(error).__name__}: {_printable(str(error))}), cut short or "
                        f"damaged; {FROM_TORCH}.") from None


@contextlib.contextmanager
def _bounded_memory(file_bytes: int):
    """A few bytes of a pickle can ask for a table of many gigabytes; where the system can say no, it is told to."""
    try:
        import resource  # Unix only

        with open("/proc/self/statm", "rb") as statm:
            now = int(statm.read().split()[0]) * resource.getpagesize()
    except (ImportError, OSError):
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    wanted = now + ROOM + MOST_MEMORY_PER_BYTE * file_bytes
    tighter = wanted if before[0] == resource.RLIM_INFINITY else min(wanted, before[0])
    resource.setrlimit(resource.RLIMIT_AS, (tighter, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text[:200])
