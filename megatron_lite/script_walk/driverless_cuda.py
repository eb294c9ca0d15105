"""Lets torch handle CUDA tensors without data on a machine that has no GPU, and no CUDA in its torch.

torch knows tensors without data (FakeTensor) on any device. Two things of its C++ half stand in the way of training
with them: operations ask a registry for the guard of the device, and autograd's engine asks which accelerator the
process has. Both are answered here, once per process and for good. A process whose torch was told so cannot use a real
GPU any more.
"""

import ctypes
import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path

import torch

CUDA_TYPE = 1  # the number of c10::DeviceType
DEVICE_TYPES = 20  # fewer than the registry has entries for in any version
GUARDS = "_ZN3c104impl26device_guard_impl_registryE"  # c10::impl::device_guard_impl_registry
GET_HOOKS = "_ZN2at6detail12getCUDAHooksEv"  # at::detail::getCUDAHooks()
HOOKS_HEADER = "include/ATen/detail/AcceleratorHooksInterface.h"
# of a table of virtual functions, in the C++ ABI of Linux and macOS: two entries stand before the first function
TABLE_HEAD = 2
MAX_FUNCTIONS = 64  # of one table, more than either class has
DESTRUCTORS = 2  # each has two entries
POINTER = ctypes.sizeof(ctypes.c_void_p)

TRIED = (2, 13)  # the version of torch with which walks were compared

ReturnsZero = ctypes.CFUNCTYPE(ctypes.c_int64)
ReturnsTruth = ctypes.CFUNCTYPE(ctypes.c_bool)


class CannotPretend(Exception):
    """Torch's C++ half is built in another way than this file knows."""


def describe_untried(version: str) -> list[str]:
    """Say that walks were not compared with a version of torch; [] for the one with which they were.

    Args:
        version: As torch.__version__ gives it.
    """
    tried = ".".join(str(part) for part in TRIED)
    if version.startswith(f"{tried}."):
        return []
    return [f"torch {version} was not compared with real runs, as torch {tried} was: its kernels may hold other memory"]


@functools.cache
def let_torch_see_a_gpu() -> None:
    """Make torch take CUDA for the accelerator of this process, with guards that do nothing.

    Raises:
        CannotPretend: This build of torch is not known.
    """
    if sys.platform not in ("linux", "darwin"):
        raise CannotPretend(f"{sys.platform}: only torch's builds for Linux and macOS are known")
    libraries = Path(torch.__file__).parent / "lib"
    suffix = ".so" if sys.platform == "linux" else ".dylib"
    try:
        _register_guard(ctypes.CDLL(str(libraries / f"libc10{suffix}")))
        _name_the_accelerator(ctypes.CDLL(str(libraries / f"libtorch_cpu{suffix}")))
    except (OSError, AttributeError, ValueError) as error:
        raise CannotPretend(f"torch {torch.__version__}: {error}") from None
    found = torch.accelerator.current_accelerator()
    if found is None or found.type != "cuda":
        raise CannotPretend(f"torch {torch.__version__}: its accelerator is {found}")


def _register_guard(library: ctypes.CDLL) -> None:
    """Give CUDA the guard that does nothing.

    torch has one, and puts it in the place of a guard that knows no device: that of a CUDA build without a GPU. A CPU
    build has none at all, and is given one whose every answer is 0.
    """
    guards = (ctypes.c_void_p * DEVICE_TYPES).in_dll(library, GUARDS)
    if not guards[CUDA_TYPE]:
        guards[CUDA_TYPE] = _make_object_of_zeros()
    torch._C._ensureCUDADeviceGuardSet()


@functools.cache
def _make_object_of_zeros() -> int:
    """Make a C++ object whose virtual functions all return 0.

    Returns:
        Its address. What stands there is never freed.
    """
    zero = ReturnsZero(lambda: 0)
    functions = (ctypes.c_void_p * MAX_FUNCTIONS)(*[_address_of(zero)] * MAX_FUNCTIONS)
    instance = (ctypes.c_void_p * 1)(ctypes.addressof(functions))
    _KEPT.extend([zero, functions, instance])
    return ctypes.addressof(instance)


def _name_the_accelerator(library: ctypes.CDLL) -> None:
    """Answer for CUDA that it is built in, available, has a device and no open context; starting it does nothing.

    The answers are virtual functions of one object. It gets a table of them of its own.
    """
    get_hooks = getattr(library, GET_HOOKS)
    get_hooks.restype = ctypes.c_void_p
    table_pointer = ctypes.cast(get_hooks(), ctypes.POINTER(ctypes.c_void_p))
    names = _list_virtual_functions()
    length = TABLE_HEAD + MAX_FUNCTIONS
    first = table_pointer[0]
    if first is None:
        raise ValueError("the hooks of CUDA have no table")
    original = ctypes.cast(first - TABLE_HEAD * POINTER, ctypes.POINTER(ctypes.c_void_p))
    table = (ctypes.c_void_p * length)(*[original[index] for index in range(length)])
    yes = ReturnsTruth(lambda: True)
    no = ReturnsTruth(lambda: False)
    answers = {"isBuilt": yes, "isAvailable": yes, "deviceCount": yes, "hasPrimaryContext": no, "init": no}
    for name, answer in answers.items():
        table[TABLE_HEAD + names.index(name)] = _address_of(answer)
    # hasCUDA is the first function that the hooks of CUDA have beyond those of any accelerator
    table[TABLE_HEAD + len(names)] = _address_of(yes)
    _KEPT.extend([yes, no, table])
    table_pointer[0] = ctypes.addressof(table) + TABLE_HEAD * POINTER


def _list_virtual_functions() -> list[str]:
    """List the virtual functions of any accelerator's hooks, in the order of the table: that of torch's own header."""
    header = (Path(torch.__file__).parent / HOOKS_HEADER).read_text()
    declared = re.findall(r"^\s*virtual\s[^(~]*?(~?\w+)\(", header, re.MULTILINE)
    destructor = [name for name in declared if name.startswith("~")]
    others = [name for name in declared if not name.startswith("~")]
    return destructor * DESTRUCTORS + others


def _address_of(function: Callable[..., object]) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]
    if address is None:
        raise ValueError("a function has no address")
    return address


_KEPT: list[object] = []  # what C++ points to must outlive the process' last use of it
