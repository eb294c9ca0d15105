"""Takes the model's flags from the arguments that a checkpoint was trained with: --use-checkpoint-args."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from megatron_lite.checkpoint.find import chosen, open_checkpoint
from megatron_lite.config import flags
from megatron_lite.config.args import Args
from megatron_lite.config.command_line import CommandLine
from megatron_lite.config.flags import dashed, list_flags
from megatron_lite.errors import ConfigError

# Source: load_args_from_checkpoint in Megatron-LM's megatron/training/checkpointing.py (0.16.1, and main of 2026-08).
# Flags of which the command line's value stays, where it gives one
UNLESS_GIVEN = (
    "num_layers", "hidden_size", "ffn_hidden_size", "seq_length", "num_attention_heads", "kv_channels",
    "max_position_embeddings", "padded_vocab_size",
)  # fmt: skip
# flags of which the checkpoint's value counts, whatever the command line says
ALWAYS = (
    "num_query_groups", "group_query_attention", "position_embedding_type", "add_position_embedding", "rotary_base",
    "rotary_percent", "rotary_interleaved", "add_bias_linear", "add_qkv_bias", "squared_relu", "swiglu",
    "untie_embeddings_and_output_weights", "apply_layernorm_1p", "normalization", "apply_query_key_layer_scaling",
    "attention_dropout", "hidden_dropout", "tiktoken_pattern",
)  # fmt: skip
TOKENIZER = ("tokenizer_model", "tokenizer_type")
PARALLEL = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage")


def take_checkpoint_args(line: CommandLine, say: Callable[[str], object]) -> CommandLine:
    """The command line with the model's flags of the checkpoint that it names.

    As in Megatron-LM, a folder without a checkpoint changes nothing, and --load's counts before that of
    --pretrained-checkpoint.

    Raises:
        ConfigError: The command line names no folder.
        CheckpointError: The checkpoint cannot be read, or its model cannot be built here.
    """
    c = line.args.checkpoint
    if not c.use_checkpoint_args:
        return line
    if c.load is None and c.pretrained_checkpoint is None:
        raise ConfigError(
            ["--use-checkpoint-args needs --load or --pretrained-checkpoint; give one of them, or drop it."]
        )
    folders = (("--pretrained-checkpoint", c.pretrained_checkpoint, None), ("--load", c.load, c.ckpt_step))
    values = dict(line.values)
    for flag, folder, step in folders:
        slot = None if folder is None else chosen(Path(folder), step, flag)
        if slot is not None:
            stored = open_checkpoint(slot.expected).arguments
            taken = _choose(stored, line)
            say(f"  {flag} {slot.expected}: gives {_describe(taken, values)} (--use-checkpoint-args)")
            values |= taken
    return replace(line, values=values, args=flags.build(Args, values))


def _choose(stored: Mapping[str, object], line: CommandLine) -> dict[str, object]:
    """Choose the flags that a checkpoint decides.

    Args:
        stored: The checkpoint's arguments.
        line: The command line.

    Returns:
        The checkpoint's values, by the names of Args' fields.
    """
    c = line.args.checkpoint
    names = [name for name in UNLESS_GIVEN if line.values.get(name) is None]
    names += ALWAYS
    if c.use_tokenizer_model_from_checkpoint_args:
        names += TOKENIZER
    if c.use_mp_args_from_checkpoint_args:
        names += PARALLEL
    known = {flag.field: flag for flag in list_flags(Args)}
    taken = {name: known[name].kind(stored[name]) for name in names if stored.get(name) is not None}
    if stored.get("use_rotary_position_embeddings"):
        taken["position_embedding_type"] = "rope"
    return taken


def _describe(taken: Mapping[str, object], values: Mapping[str, object]) -> str:
    """Name what the checkpoint says otherwise than the command line, as '--num-layers 24, --swiglu True'."""
    changed = [f"{dashed(name)} {value}" for name, value in taken.items() if values.get(name) != value]
    return ", ".join(changed) or "the same as the command line"
