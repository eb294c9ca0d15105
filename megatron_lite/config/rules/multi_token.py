"""Rules for the flags of multi-token prediction."""

import re
from collections.abc import Iterator

from megatron_lite.config.args import Args
from megatron_lite.config.layout import expand_layout
from megatron_lite.config.world import World
from megatron_lite.pipeline_schedule import ZERO_BUBBLE


def multi_token_rules(args: Args, world: World) -> Iterator[str]:
    """Mistakes among the flags of multi-token prediction."""
    yield from _check_layout(args)
    depths = args.model.mtp_num_layers
    if not depths:
        return
    name = f"--mtp-num-layers {depths}"
    m = args.model
    p = args.parallel
    excluded = {
        f"--model {m.model}": (m.model is not None, "the latter is of the built-in GPT"),
        f"--context-parallel-size {p.context_parallel_size}": (
            p.context_parallel_size > 1,
            "further tokens of a sequence that ranks divide are not built",
        ),
        "--use-torch-fsdp2": (p.shards_weights, "its layers are not sharded"),
        f"--pipeline-schedule {ZERO_BUBBLE}": (
            p.pipeline_schedule == ZERO_BUBBLE and p.pipeline_model_parallel_size > 1,
            "its backward is one piece",
        ),
        "--use-mup": (m.use_mup, "its scales of further layers are not built"),
        "--window-size": (m.window_size is not None, "windows of further layers are not built"),
        "--reset-attention-mask": (args.data.reset_attention_mask, "further tokens may be another document's"),
        "--reset-position-ids": (args.data.reset_position_ids, "further tokens may be another document's"),
        "--dataloader-inter-document-masking": (
            args.data.dataloader_inter_document_masking,
            "further tokens may be another document's",
        ),
        "--ckpt-format torch": (
            args.checkpoint.ckpt_format == "torch",
            "layers of further tokens are saved as torch_dist",
        ),
    }
    for flag, (is_given, reason) in excluded.items():
        if is_given:
            yield f"{flag} and {name} exclude each other: {reason}; drop one of them."


def _check_layout(args: Args) -> Iterator[str]:
    """Mistakes among the letters m of --pipeline-model-parallel-layout."""
    layout = args.parallel.pipeline_model_parallel_layout
    if layout is None or args.parallel.pipeline_model_parallel_size == 1:
        return
    try:
        letters = "".join(expand_layout(layout))
        last = expand_layout(layout)[-1]
    except ValueError:
        return  # another rule says it
    name = f"--pipeline-model-parallel-layout {layout}"
    depths = args.model.mtp_num_layers or 0
    if letters.count("m") != depths:
        given = f"--mtp-num-layers is {depths}" if depths else "--mtp-num-layers is missing"
        yield f"{name}: has {letters.count('m')} layers m, but {given}; change one of them."
    elif depths and not re.fullmatch("t*m+L", last):
        yield f"{name}: the layers m stand in the last piece, behind the layers t and before L; write it so."
