"""Starts watching in every process of a watched command: Python runs this file first, because its folder is the first
in PYTHONPATH.

It waits until torch is imported. Processes without torch pay nothing, and no failure of it reaches the script.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

PACKAGE_PARENT = Path(__file__).parents[3]
EXECUTE = "exec_module"  # the method of a module's loader that runs its code


class AfterTorch:
    """Begins to watch when torch has been imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Let torch be found as before, and be followed by the watching. Called for each module that is imported.

        The arguments are those of importlib.abc.MetaPathFinder.
        """
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.loader is not None:
            execute: Callable[[ModuleType], None] = spec.loader.exec_module

            def execute_and_watch(module: ModuleType) -> None:
                execute(module)
                start_watching()

            setattr(spec.loader, EXECUTE, execute_and_watch)
        return spec


def start_watching() -> None:
    """Watch this process, which has imported torch."""
    try:
        if importlib.util.find_spec("megatron_lite") is None:
            sys.path.append(str(PACKAGE_PARENT))
        importlib.import_module("megatron_lite.watch.this_process").watch_this_process()
    except Exception as error:  # noqa: BLE001 - the script has to run, watched or not
        print(f"megatron-lite watch: this process is not watched: {error}", file=sys.stderr)


def run_the_next() -> None:
    """Run a sitecustomize of the environment's own, which this one hides."""
    here = str(Path(__file__).parent)
    sys.path[:] = [folder for folder in sys.path if folder != here]
    own = sys.modules.pop("sitecustomize", None)
    try:
        importlib.import_module("sitecustomize")
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        if own is not None:
            sys.modules["sitecustomize"] = own


sys.meta_path.insert(0, AfterTorch())
run_the_next()
