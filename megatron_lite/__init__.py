"""Trains GPTs, and explains training runs.

`Profiler` records a training loop, `analyze` says where its steps went, `fit` whether it fits into a GPU.
"""

import importlib

_HOMES = {
    "Profiler": "megatron_lite.watch.profiler",
    "analyze": "megatron_lite.notebook",
    "fit": "megatron_lite.script_walk.in_code",
}
__all__ = ["Profiler", "analyze", "fit"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(importlib.import_module(_HOMES[name]), name)
