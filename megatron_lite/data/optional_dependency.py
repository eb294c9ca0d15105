"""Packages that only some tokenizers need."""

import importlib
from types import ModuleType

from megatron_lite.errors import UserError


def optional_package(name: str, extra: str, kind: str) -> ModuleType:
    """The package. UserError, which names the --tokenizer-type `kind` and the extra that brings it, if it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UserError(
            f"--tokenizer-type {kind}: needs the package {name}; pip install 'megatron_lite[{extra}]'"
        ) from None
