"""Reads a pickle that may be hostile: plain values only, and nothing is executed."""

import pickle
from pathlib import Path

from megatron_lite.errors import UserError
from megatron_lite.process_state import limit_memory

MAX_MEMORY_PER_BYTE = 60  # a snapshot takes 10 to 30 times its file's size
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
        with open(path, "rb") as file, limit_memory(path.stat().st_size, MAX_MEMORY_PER_BYTE):
            return _PlainValues(file).load()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check the file.") from None
    except _Refused as why:
        raise UserError(
            f"{path}: {_printable(str(why))}, but a memory snapshot holds plain values only; reading it could run "
            f"its code and is refused; {FROM_TORCH}."
        ) from None
    except MemoryError:
        raise UserError(
            f"{path}: asks for far more memory than its size explains; it is damaged: {FROM_TORCH}."
        ) from None
    except Exception as error:  # noqa: BLE001 - damaged pickles make the reader raise errors of many kinds
        raise UserError(
            f"{path}: is no readable pickle ({type(error).__name__}: {_printable(str(error))}), cut short or "
            f"damaged; {FROM_TORCH}."
        ) from None


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text[:200])
