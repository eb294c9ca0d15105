"""Whether a checkpoint fits the flags."""

import dataclasses
from pathlib import Path

from megatron_lite.checkpoint.training_state import Record, Stored
from megatron_lite.config.flags import dashed
from megatron_lite.config.plan import Plan
from megatron_lite.errors import CheckpointError

# free where a file of Megatron-LM does not say whether it was applied
ROTARY_FACTOR = "rotary_seq_len_interpolation_factor"
# fields of a shape that may differ between a checkpoint and the run that loads it
FREE = {
    "hidden_dropout",
    "attention_dropout",
    "softmax_in_fp32",
    "query_key_layer_scaling",
    "init_method_std",
    "seq_length",
}
# the flags behind fields that are named otherwise
SHAPE_FLAGS = {
    "padded_vocab_size": "the padded --vocab-size",
    "position_embedding": "--position-embedding-type",
    "layernorm_1p": "--apply-layernorm-1p",
    "activation": "the activation (--swiglu, --squared-relu, ...)",
    "linear_bias": "having biases (--disable-bias-linear)",
    "qkv_bias": "having a QKV bias (--add-qkv-bias)",
    "tied_embeddings": "tied output (--untie-embeddings-and-output-weights)",
}
SCHEDULE_FLAGS = {
    "style": "--lr-decay-style",
    "init": "--lr-warmup-init",
    "peak": "--lr",
    "floor": "--min-lr",
    "warmup_samples": "the warm-up in samples (--lr-warmup-...)",
    "decay_samples": "the decay in samples (--lr-decay-..., --train-...)",
    "wsd_style": "--lr-wsd-decay-style",
    "wsd_samples": "the last phase in samples (--lr-wsd-decay-...)",
    "weight_decay_style": "--weight-decay-incr-style",
    "weight_decay_samples": "the training in samples (--train-...)",
}


def require_shape(path: Path, record: Record, plan: Plan):
    """CheckpointError if it holds another model."""
    mine = dataclasses.asdict(plan.shape)
    free = FREE if record.trainer == Record.trainer else FREE | {ROTARY_FACTOR}
    wrong = _differences(mine, record.shape, SHAPE_FLAGS, free)
    if wrong:
        raise CheckpointError(f"--load {path}: holds another model ({wrong}); give its flags.")


def rotary_note(path: Path, record: Record, plan: Plan) -> str | None:
    """Of Megatron-LM's checkpoints, on a flag that some of its versions ignore; None where it is not given."""
    factor = plan.shape.rotary_seq_len_interpolation_factor
    if record.trainer == Record.trainer or factor is None:
        return None
    return (
        f"  note: --load {path}: Megatron-LM 0.16.1 takes --rotary-seq-len-interpolation-factor without passing it to its model, "
        f"here positions are divided by {factor:g}; leave the flag out if that version trained these weights"
    )


def require_optimizer(path: Path, stored: Stored, plan: Plan):
    """CheckpointError if its optimizer is missing or another one."""
    mine, saved = plan.args.optimizer.optimizer, stored.record.optimizer
    if saved is None:
        raise CheckpointError(
            f"--load {path}: its optimizer {stored.without_optimizer}; add --no-load-optim to go on with "
            "fresh moments, or --finetune to start at iteration 0."
        )
    if mine != saved:
        raise CheckpointError(
            f"--load {path}: --optimizer is {mine}, the checkpoint's {saved}; give the same, or "
            "--no-load-optim to go on with fresh moments."
        )


def require_schedule(path: Path, record: Record, plan: Plan) -> dict | None:
    """The checkpoint's schedule if it is to be followed, None for the command line's. CheckpointError if it is unclear."""
    o, mine = plan.args.optimizer, dataclasses.asdict(plan.learning_rate)
    if record.schedule is None or o.override_opt_param_scheduler:
        return None
    if o.use_checkpoint_opt_param_scheduler:
        return record.schedule
    wrong = _differences(mine, record.schedule, SCHEDULE_FLAGS, set())
    if wrong:
        raise CheckpointError(
            f"--load {path}: another schedule ({wrong}); add --override-opt-param-scheduler to take the command line's, or "
            "--use-checkpoint-opt-param-scheduler to take the checkpoint's."
        )
    return None


def _differences(mine: dict, saved: dict, flags: dict, free: set) -> str:
    return "; ".join(
        f"{flags.get(name, dashed(name))} is {mine[name]}, the checkpoint's {saved.get(name)}"
        for name in mine
        if name not in free and mine[name] != saved.get(name)
    )
