"""What the collectors share. They run in the environments of the tools that they ask, without this package: no imports but Python's."""

import contextlib
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path


def find_traces(folder: Path) -> list[Path]:
    """Find a run's traces of torch.profiler, sorted."""
    return sorted([*folder.rglob("*.pt.trace.json"), *folder.rglob("*.pt.trace.json.gz")])


def keep_error(ask: Callable[..., object], *asked: object) -> object:
    """Ask a tool. Whatever it dies of is its answer: `{"error": ...}`."""
    try:
        return ask(*asked)
    except Exception as error:  # noqa: BLE001
        return {"error": f"{type(error).__name__}: {error}"}


def ask_of_runs(ask: Callable[[Path], dict]) -> None:
    """Write OUT/RUN.json for each RUN_FOLDER of the command line `OUT RUN_FOLDER ...`, where it is not there yet."""
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    for folder in map(Path, sys.argv[2:]):
        target = out / f"{folder.name}.json"
        if target.exists():
            continue
        with contextlib.redirect_stdout(io.StringIO()):
            found = keep_error(ask, folder)
        target.write_text(json.dumps(found, default=str))
        print(folder.name, flush=True)
