"""Train a GPT with Megatron-LM's command line: torchrun --nproc_per_node N pretrain_gpt.py FLAGS (--help lists them)."""

import os
import sys
from pathlib import Path


def main() -> int:
    if "--help" in sys.argv or "-h" in sys.argv:
        from megatron_lite.config.help import help_text

        print(help_text())
        return 0
    if "--use-pytorch-profiler" in sys.argv and not any(Path("/dev").glob("nvidia[0-9]*")):
        start_again_for_profiling()
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # read when torch is imported; keeps the profiler's noise away
    os.environ.setdefault("TEARDOWN_CUPTI", "1")  # else the GPU stays slowed down after a profiled window
    from torch.distributed.elastic.multiprocessing.errors import record

    from megatron_lite.app import main as train

    return record(train)(sys.argv[1:])


def start_again_for_profiling():
    """In this process, if the C library must be told otherwise from its start; before torch is imported, so it is quick."""
    from megatron_lite.parallel.host_memory import libc_version, without_thread_cache

    environ = without_thread_cache(dict(os.environ), libc_version())
    if environ and sys.executable and sys.gettrace() is None:  # a debugger would be lost
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environ)


if __name__ == "__main__":
    sys.exit(main())
