"""Train a GPT with Megatron-LM's command line: torchrun --nproc_per_node N pretrain_gpt.py FLAGS (--help lists them)."""

import os
import sys


def main() -> int:
    if "--help" in sys.argv or "-h" in sys.argv:
        from megatron_lite.config.help import help_text

        print(help_text())
        return 0
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # read when torch is imported; keeps the profiler's noise away
    os.environ.setdefault("TEARDOWN_CUPTI", "1")  # else the GPU stays slowed down after a profiled window
    from torch.distributed.elastic.multiprocessing.errors import record

    from megatron_lite.app import main as train

    return record(train)(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
