"""A filter of the Linux kernel (seccomp) by which a process, and all that it starts, opens no sockets.

Landlock knows of TCP alone, and that since Linux 6.7: a script could still send datagrams, look up names of machines,
and talk to services of this machine. The numbers below are those of the kernel's interface,
https://docs.kernel.org/userspace-api/seccomp_filter.html.
"""

import ctypes
import errno
import platform
import sys

from megatron_lite.mcp_server.landlock import NO_NEW_PRIVILEGES

SET_FILTER = 22  # of prctl
MODE_FILTER = 2
# by machine: its number in the kernel's records of system calls, and the number of the system call `socket`
SYSTEM_CALLS = {"x86_64": (0xC000003E, 41), "aarch64": (0xC00000B7, 198)}
# instructions of the filter, and where in the record of a system call it looks
READ_WORD = 0x20
JUMP_IF_EQUAL = 0x15
RETURN = 0x06
AT_NUMBER = 0
AT_MACHINE = 4
ALLOW = 0x7FFF0000
REFUSE = 0x00050000 | errno.EACCES


class _Instruction(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_uint16),
        ("skip_if_true", ctypes.c_uint8),
        ("skip_if_false", ctypes.c_uint8),
        ("value", ctypes.c_uint32),
    ]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction))]


def refuse_sockets() -> bool:
    """Have the kernel refuse new sockets to this thread and all that it starts, for the rest of their lives.

    Returns:
        Whether it does; False on other systems and machines, and where the kernel has no filters.
    """
    if sys.platform != "linux" or platform.machine() not in SYSTEM_CALLS:
        return False
    machine, call = SYSTEM_CALLS[platform.machine()]
    program = (
        _Instruction(READ_WORD, 0, 0, AT_MACHINE),
        _Instruction(JUMP_IF_EQUAL, 0, 3, machine),
        _Instruction(READ_WORD, 0, 0, AT_NUMBER),
        _Instruction(JUMP_IF_EQUAL, 0, 1, call),
        _Instruction(RETURN, 0, 0, REFUSE),
        _Instruction(RETURN, 0, 0, ALLOW),
    )
    instructions = (_Instruction * len(program))(*program)
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0):
        return False
    answer: int = library.prctl(SET_FILTER, MODE_FILTER, ctypes.byref(_Program(len(program), instructions)), 0, 0)
    return answer == 0
