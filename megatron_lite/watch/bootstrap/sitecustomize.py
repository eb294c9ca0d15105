"""Starts watching, walking or recording in every process of a command: Python runs this file first, because its folder
is the first in PYTHONPATH.

It waits until torch is imported. Processes without torch pay nothing, and no failure of it reaches the script.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

PACKAGE_PARENT = Path(__file__).parents[3]
# variables of requests, which megatron_lite.variables has, too: the command, the module and the function that serve it
SERVED = {
    "MEGATRON_LITE_FIT": ("fit", "megatron_lite.script_walk.this_process", "walk_this_process"),
    "MEGATRON_LITE_PROVE": ("prove", "megatron_lite.script_record.this_process", "prove_this_process"),
    "MEGATRON_LITE_WATCH": ("watch", "megatron_lite.watch.this_process", "watch_this_process"),
}
HARMLESS = "MEGATRON_LITE_WATCH"  # that of the command without which a script is to run as well
CANNOT_SERVE = 1  # exit code
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
                start()

            setattr(spec.loader, EXECUTE, execute_and_watch)
        return spec


def start() -> None:
    """Watch, walk or record this process, which has imported torch."""
    command, module, function = next((SERVED[name] for name in SERVED if name in os.environ), SERVED[HARMLESS])
    try:
        if importlib.util.find_spec("megatron_lite") is None:
            sys.path.append(str(PACKAGE_PARENT))
        getattr(importlib.import_module(module), function)()
    except Exception as error:  # noqa: BLE001 - a script has to run, watched or not
        if command == SERVED[HARMLESS][0]:
            print(f"megatron-lite watch: this process is not watched: {error}", file=sys.stderr)
            return
        # what it would do by itself is not what was asked for
        why = f"{type(error).__name__}: {error}"
        print(f"megatron-lite {command}: this process is not followed: {why}", file=sys.stderr)
        os._exit(CANNOT_SERVE)


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
