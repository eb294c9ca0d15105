"""Reads files of torch.save that name classes of programs which need not be installed, and runs none of their code.

torch's restricted unpickler builds tensors and plain containers. A class of a known training program becomes an
Inert, which keeps what the file says about the object; any other class is refused by name.
"""

import argparse
from io import BytesIO
from pathlib import Path

import torch

from megatron_lite.errors import CheckpointError, first_line
from megatron_lite.process_state import limit_memory

# None of what these hold is needed here: enums, paths and recorders among the arguments, numpy's random state
PACKAGES = {
    "megatron",
    "megatron_patch",
    "transformer_engine",
    "apex",
    "deepspeed",
    "modelopt",
    "nvidia_resiliency_ext",
    "numpy",
    "signal",
    "pathlib",
    "datetime",
}
# getattr: Python 3.11.2 pickles a member of an enum as getattr(class, name)
CLASSES = {"types.SimpleNamespace", "_io.BytesIO", "io.BytesIO", "builtins.range", "builtins.slice", "builtins.getattr"}


class Inert:
    """Stands for an object of any class: `arguments` it was made with, and its `state`. Does nothing."""

    def __new__(cls, *arguments):
        made = super().__new__(cls)
        made.arguments, made.state = arguments, None
        return made

    def __init__(self, *arguments):
        """Everything is kept by __new__, which pickles may call alone."""

    def __setstate__(self, state):
        self.state = state

    def __repr__(self) -> str:
        return f"an object of another program {self.arguments}"


def load(path: Path) -> dict:
    """The dict that torch.save wrote to `path`; its tensors stay in the file until they are used.

    Raises CheckpointError for a file that is damaged, names a class outside PACKAGES and CLASSES, or holds no dict.
    """
    state = load_object(path, path)
    if not isinstance(state, dict):
        raise CheckpointError(f"--load {path}: holds a {type(state).__name__}, not a checkpoint; check the file.")
    return state


def load_object(path: Path, source: Path | BytesIO):
    """What torch.save wrote to `source`: `path` itself, or bytes from beside it. Raises CheckpointError as `load` does."""
    try:
        with limit_memory(path.stat().st_size if source is path else len(source.getbuffer())):
            named = torch.serialization.get_unsafe_globals_in_checkpoint(source)
            harmless = [name for name in named if name in CLASSES or name.partition(".")[0] in PACKAGES]
            refused = sorted(set(named) - {*harmless, "argparse.Namespace"})
            if refused:
                raise CheckpointError(
                    f"--load {path}: names {refused[0]}, which is neither data nor a class of a known training "
                    "program, and reading it might run its code; load a file that you trust, without it."
                )
            if source is not path:
                source.seek(0)
            with torch.serialization.safe_globals([argparse.Namespace, *((Inert, name) for name in harmless)]):
                return torch.load(source, map_location="cpu", weights_only=True, mmap=source is path)
    except FileNotFoundError:
        raise CheckpointError(f"--load {path}: there is no such file; check the folder.") from None
    except CheckpointError:
        raise
    except Exception as error:  # noqa: BLE001 - damaged files make torch raise errors of many kinds
        raise CheckpointError(
            f"--load {path}: cannot be read ({type(error).__name__}: {first_line(error)}); it is damaged, or "
            "older than torch 1.6. Load an earlier one, or save it again with a newer torch."
        ) from None
