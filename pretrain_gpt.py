"""Train a GPT with Megatron-LM's command line.

torchrun --nproc_per_node N pretrain_gpt.py FLAGS (--help lists them)
"""

import runpy

if __name__ == "__main__":
    runpy.run_module("megatron_lite", run_name="__main__")
