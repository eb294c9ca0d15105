"""What is checked of checkpoints: before a run begins, and whether one that is loaded fits the flags."""

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch.distributed as dist
from torch import nn

from megatron_lite.checkpoint import folder
from megatron_lite.checkpoint.find import chosen
from megatron_lite.checkpoint.training_state import Record, Stored
from megatron_lite.config.flags import dashed
from megatron_lite.config.plan import Plan
from megatron_lite.errors import CheckpointError
from megatron_lite.parallel.process_group import time_limit
from megatron_lite.user_functions import describe_source

logger = logging.getLogger(__name__)
MAX_WAIT_S = 60  # for the run that has --save: a launcher leaves its ranks half a minute to end

# free where a file of Megatron-LM does not say whether it was applied
ROTARY_FACTOR = "rotary_seq_len_interpolation_factor"
# fields of a shape that may differ between a checkpoint and the run that loads it
FREE = {"hidden_dropout", "attention_dropout", "softmax_in_fp32", "query_key_layer_scaling"}
FREE |= {"init_method_std", "seq_length"}
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


def require_checkpoint(plan: Plan):
    """Say now, before ranks meet, what --load, --ckpt-step and --pretrained-checkpoint cannot do. Touches nothing. CheckpointError."""
    c = plan.args.checkpoint
    found = chosen(Path(c.load), c.ckpt_step) if c.load is not None else None
    if c.exit_on_missing_checkpoint and found is None and c.pretrained_checkpoint is None:
        raise CheckpointError(
            f"--load {c.load}: holds no checkpoint, and --exit-on-missing-checkpoint is given; check "
            "the folder, or drop that flag to start afresh."
        )
    if c.pretrained_checkpoint is None or found is not None:
        return
    if chosen(Path(c.pretrained_checkpoint), None, "--pretrained-checkpoint") is None:
        raise CheckpointError(
            f"--pretrained-checkpoint {c.pretrained_checkpoint}: holds no checkpoint; check the folder."
        )


@contextlib.contextmanager
def save_reserved(plan: Plan):
    """Inside the block no other run saves to --save: the first rank has its lock. Collective; CheckpointError on all ranks."""
    save = plan.args.checkpoint.save
    if save is None or plan.args.training.skip_train:
        yield
        return
    refusal: list = [None]
    with contextlib.ExitStack() as held:
        if plan.world.is_first:
            try:
                held.enter_context(
                    folder.reserved(Path(save), min(MAX_WAIT_S, time_limit(plan).total_seconds() / 2), logger.info)
                )
            except CheckpointError as error:
                refusal = [error]
        dist.broadcast_object_list(refusal, src=0)
        if refusal[0] is not None:
            raise refusal[0]
        yield


def require_shape(path: Path, record: Record, plan: Plan):
    """CheckpointError if it holds another model."""
    mine, model = dataclasses.asdict(plan.shape), record.kernels.get("model")
    if (model is None) != (plan.args.model.model is None):
        held = f"the model of --model {model}; give that flag" if model else "a GPT; drop --model"
        raise CheckpointError(f"--load {path}: holds {held}.")
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


# --- which kernels a run computes with, as far as its last bits depend on it: kept in checkpoints, so that a resumed run can tell

# by what Attend calls its kernel
ATTENTION_FLAGS = {"sdpa flash": "flash", "sdpa cudnn": "fused", "explicit": "unfused"}


def kernels_of(plan: Plan, model: nn.Module) -> dict[str, str]:
    """{"attention": "sdpa flash", "torch_compile": "layers"}; of a model of the user's own {"model": file and SHA-256}."""
    if plan.args.model.model is not None:
        source = describe_source(plan.args.model.model)
        return {"model": f"{source['function']} (SHA-256 {source['sha256']})"}
    layer = next(iter(model.decoder.layers))
    return {"attention": layer.self_attention.attend.name, "torch_compile": plan.compilation.target}


def other_kernels(saved: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    """A line for each that differs, with the flag that goes on as before. `saved`: {} of a checkpoint that does not say it."""
    flags = {
        "attention": f"--attention-backend {ATTENTION_FLAGS.get(saved.get('attention'), 'auto')}",
        "torch_compile": f"--torch-compile {saved.get('torch_compile')}",
    }
    names = {"attention": "attention", "torch_compile": "torch.compile"}
    if saved.get("model") != now.get("model"):
        yield f"--model was {saved.get('model')} and is {now.get('model')}: its weights are taken as those of the same parameters."
    for what, flag in flags.items():
        if what in saved and what in now and saved[what] != now[what]:
            yield (
                f"{names[what]} was {saved[what]} and is {now[what]}: losses may differ in their last digits from those of "
                f"an uninterrupted run; {flag} goes on as before."
            )
