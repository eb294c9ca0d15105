"""Train a GPT with Megatron-LM's command line.

torchrun --nproc_per_node N -m megatron_lite FLAGS (--help lists them)
python -m megatron_lite COMMAND OPTIONS is megatron-lite COMMAND OPTIONS
"""

import os
import sys

from megatron_lite.cli.main import COMMANDS
from megatron_lite.cli.main import main as run_command
from megatron_lite.errors import describe_import_error, describe_memory_error, is_memory_error
from megatron_lite.terminal import describe_version, end_quietly_without_reader, print_lines


def main(flags: list[str]) -> int:
    """Run the command that the first word names, answer --help and --version, refuse mistakes, or train.

    Returns:
        The exit code.
    """
    if flags and flags[0] in COMMANDS:
        return run_command(flags)
    if "--help" in flags or "-h" in flags:
        from megatron_lite.config.help import help_text

        print_lines(help_text().split("\n"))
        return 0
    if "--version" in flags:
        print_lines([describe_version()])
        return 0
    from megatron_lite.rank_errors import refuse_mistakes

    return refuse_mistakes(flags) or train(flags)


def train(flags: list[str]) -> int:
    """Import torch, which takes seconds, and train."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # read when torch is imported; keeps the profiler's noise away
    os.environ.setdefault("TEARDOWN_CUPTI", "1")  # else the GPU stays slowed down after a profiled window
    package = "torch"
    try:
        from torch.distributed.elastic.multiprocessing.errors import record

        package = "what training needs"
        from megatron_lite.app import main as run
        from megatron_lite.run_planner import RUN_PLANNER
    except Exception as error:
        if is_memory_error(error):
            line = describe_memory_error()
        elif isinstance(error, (ImportError, OSError)):  # not installed, or more than a memory limit allows
            line = describe_import_error(package, error)
        else:
            raise
        print_lines([f"error: {line}"], sys.stderr)
        return 1
    return record(run)(flags, RUN_PLANNER) or 0


if __name__ == "__main__":
    sys.exit(end_quietly_without_reader(lambda: main(sys.argv[1:])))
