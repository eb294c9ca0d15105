"""Makes tests/config/megatron_names.txt, all flags that Megatron-LM's parser takes: `python tests/megatron_names.py CHECKOUT ...`.

Several checkouts give the flags of all of them. The parser is Megatron's own, imported from the checkout; of what it imports, Triton
alone is needed for no flag and stands in here where it is not installed.
"""

import argparse
import importlib.abc
import importlib.machinery
import subprocess
import sys
import typing
from unittest.mock import MagicMock

import typing_extensions
from support.paths import REPO

FILE = REPO / "tests" / "config" / "megatron_names.txt"
HEAD = "# All flags that Megatron-LM's parser takes, of 0.19.0 and of main of 2026-08-22, made by tests/megatron_names.py.\n"


class StandInForTriton(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of Triton, and makes ones that can be asked for anything."""

    def find_spec(self, name, path, target=None):
        if name.split(".")[0] != "triton":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = MagicMock()
        module.__path__ = []
        module.__spec__ = spec
        module.__version__ = "3.5.0"
        return module

    def exec_module(self, module):
        pass


def list_names(checkout: str) -> list[str]:
    """The flags of one checkout's parser, of training and of what ModelOpt adds to it."""
    # what torch does with Triton is imported before the stand-in could be taken for it
    import torch._inductor.codegen.triton
    import torch._inductor.runtime.triton_heuristics
    import torch.utils.flop_counter  # noqa: F401

    sys.path.insert(0, checkout)
    sys.meta_path.insert(0, StandInForTriton())
    typing.override = typing_extensions.override  # for Python 3.11
    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    add_megatron_arguments(parser)
    add_flags_of_modelopt(parser)
    return sorted(name for action in parser._actions for name in action.option_strings if name.startswith("--"))


def add_flags_of_modelopt(parser: argparse.ArgumentParser) -> None:
    """Add what ModelOpt adds, of a checkout that has it."""
    try:
        from megatron.post_training.arguments import add_modelopt_args
    except ImportError:
        return
    add_modelopt_args(parser)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        print(*list_names(sys.argv[1]), sep="\n")
        sys.exit()
    # one process each, since a process imports one Megatron only
    listed = [subprocess.check_output([sys.executable, __file__, checkout], text=True) for checkout in sys.argv[1:]]
    names = sorted({name for text in listed for name in text.split()})
    FILE.write_text(HEAD + "".join(f"{name}\n" for name in names), encoding="utf-8")
