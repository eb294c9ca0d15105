"""Checks of checkpoints: whether they can be loaded and saved, and whether a loaded one fits the flags."""

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch.distributed as dist
from torch import nn

from megatron_lite.checkpoint import folder
from megatron_lite.checkpoint.find import chosen
from megatron_lite.checkpoint.megatron_args import EXPERT_ARGUMENTS
from megatron_lite.checkpoint.shared_storage import (
    StorageView,
    compare_views,
    describe_place,
    describe_views,
    list_lacking,
    refresh,
)
from megatron_lite.checkpoint.training_state import CheckpointRecord, Stored
from megatron_lite.config.args import CheckpointArgs, OptimizerArgs
from megatron_lite.config.flags import dashed
from megatron_lite.config.plan import Compilation, LearningRatePlan, Plan
from megatron_lite.config.shape import ExpertShape, LatentShape, ModelShape, parse_nested
from megatron_lite.cpu_kernels.products import describe_products
from megatron_lite.errors import CheckpointError
from megatron_lite.model.custom_model import CustomModel
from megatron_lite.model.gpt import GPT, TransformerLayer
from megatron_lite.parallel.process_group import get_time_limit
from megatron_lite.shared_files import read_bounded
from megatron_lite.user_functions import describe_source

logger = logging.getLogger(__name__)
MAX_SAVE_WAIT_S = 60  # for another run to release --save: a launcher leaves its ranks half a minute to end

# may differ in files of Megatron-LM, which do not say whether it was applied
ROTARY_FACTOR = "rotary_seq_len_interpolation_factor"
# fields of a shape that may differ between a checkpoint and the run that loads it
FREE = {"hidden_dropout", "attention_dropout", "softmax_in_fp32", "query_key_layer_scaling"}
FREE |= {"init_method_std", "seq_length"}
# flags of the fields that have another name
SHAPE_FLAGS = {
    "padded_vocab_size": "the padded --vocab-size",
    "position_embedding": "--position-embedding-type",
    "layernorm_1p": "--apply-layernorm-1p",
    "activation": "the activation (--swiglu, --squared-relu, ...)",
    "linear_bias": "having biases (--disable-bias-linear)",
    "qkv_bias": "having a QKV bias (--add-qkv-bias)",
    "tied_embeddings": "tied output (--untie-embeddings-and-output-weights)",
}
LATENT_FLAGS = {"scaling_factor": "--rotary-scaling-factor"}
EXPERT_FLAGS = {field: dashed(argument) for field, argument in EXPERT_ARGUMENTS.items()}
EXPERT_FLAGS["layers"] = "--moe-layer-freq"
# what of experts may differ between a checkpoint and the run that loads it: how they are balanced, and precision
FREE_OF_EXPERTS = {
    "balancing", "sinkhorn", "z_loss_coeff", "input_jitter", "forced_balance", "capacity_factor", "drop_policy",
    "router_dtype", "ranks",
}  # fmt: skip
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


def require_checkpoint(c: CheckpointArgs) -> None:
    """Raise CheckpointError if --load, --ckpt-step or --pretrained-checkpoint name what is not there.

    Reads only; called before ranks meet.
    """
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
def reserve_save(plan: Plan) -> Iterator[None]:
    """Keep other runs from saving to --save inside the block: the first rank holds its lock, which all ranks see.
    Collective.

    Raises:
        CheckpointError: Another run holds it, or it cannot be written; on all ranks.
    """
    save = plan.args.checkpoint.save
    if save is None or plan.args.training.skip_train:
        yield
        return
    # why it is refused, and what the first rank's lock file says
    refusal: CheckpointError | None = None
    holder = ""
    limit = get_time_limit(plan.args.parallel)
    with contextlib.ExitStack() as held:
        if plan.world.is_first:
            try:
                held.enter_context(
                    folder.reserved(Path(save), min(MAX_SAVE_WAIT_S, limit.total_seconds() / 2), logger.info)
                )
                holder = _read_lock(Path(save))
            except CheckpointError as error:
                refusal = error
        answers = [(refusal, holder)]
        dist.broadcast_object_list(answers, src=0)
        refusal, holder = answers[0]
        if refusal is not None:
            raise refusal
        if holder and plan.world.size > 1:
            _require_shared_save(plan, Path(save), holder)
        yield


def _read_lock(save: Path) -> str:
    """Read the lock file of --save; empty where there is none, or on a full disk."""
    try:
        return read_bounded(save / folder.LOCK_FILE, folder.MAX_HOLDER_BYTES)
    except OSError:
        return ""


def _require_shared_save(plan: Plan, save: Path, holder: str) -> None:
    """Tell that ranks have different folders under --save, before they train for hours. Collective.

    A file that the first rank writes alone is whole.

    Args:
        plan: This rank's.
        save: The folder of --save.
        holder: What the first rank's lock says.

    Raises:
        CheckpointError: Saving would fail, and training is not to go on then.
    """
    c = plan.args.checkpoint

    def look() -> list[StorageView]:
        refresh(save)
        lacking = () if _read_lock(save) == holder else (folder.LOCK_FILE,)
        return _gather_views(StorageView(plan.world.rank, describe_place(save), lacking))

    views = compare_views(look)
    if not views:
        return
    text = f"--save {save}: is not one folder for all ranks: {describe_views(views)}, which rank 0 made"
    remedy = "give a folder on storage that all nodes share"
    if c.ckpt_format == "torch":
        logger.info(f"  warning: {text}. Only rank 0's node keeps checkpoints, and --load needs them on all; {remedy}.")
    elif c.exit_on_save_failure:
        raise CheckpointError(f"{text}; {remedy}.")
    else:
        logger.info(f"  warning: {text}; no checkpoint will be complete. {remedy.capitalize()}. Training goes on.")


def _gather_views(mine: StorageView, group: dist.ProcessGroup | None = None) -> list[StorageView]:
    """Gather the views of all ranks, by rank. Collective over the group; None: all ranks."""
    views = [mine] * dist.get_world_size(group)
    dist.all_gather_object(views, mine, group=group)
    return views


def require_shared_load(path: Path, rank: int, names: list[str], group: dist.ProcessGroup | None) -> None:
    """Check that all ranks see the files of a checkpoint that one of them sees. Collective.

    Args:
        path: The checkpoint's folder.
        rank: This rank.
        names: The files of the checkpoint, as the first rank knows them.
        group: All ranks.

    Raises:
        CheckpointError: A rank lacks files.
    """

    def look() -> list[StorageView]:
        refresh(path, ours=False)
        return _gather_views(StorageView(rank, describe_place(path), list_lacking(path, names)), group)

    views = compare_views(look)
    if views:
        raise CheckpointError(
            f"--load {path}: is not one folder for all ranks: {describe_views(views)}; "
            "copy the files of all nodes into a folder on storage that all nodes share."
        )


def require_shape(path: Path, record: CheckpointRecord, shape: ModelShape, vocab_size: int, custom: str | None) -> None:
    """Require that a checkpoint holds the run's model.

    Another padding of the same vocabulary is the same model, and is logged.

    Args:
        path: The checkpoint, for messages.
        record: The checkpoint's record.
        shape: The run's model.
        vocab_size: Entries of the run's tokenizer, before padding.
        custom: The value of --model.

    Raises:
        CheckpointError: It holds another model.
    """
    model = record.kernels.get("model")
    if (model is None) != (custom is None):
        held = f"the model of --model {model}; give that flag" if model else "a GPT; drop --model"
        raise CheckpointError(f"--load {path}: holds {held}.")
    free = set(FREE)
    if record.trainer != CheckpointRecord.trainer:
        free.add(ROTARY_FACTOR)
    stored_rows = record.vocabulary_rows
    same_vocabulary = record.vocab_size in (None, vocab_size) and stored_rows >= vocab_size
    if same_vocabulary:
        free.add("padded_vocab_size")
    # an older checkpoint lacks fields that came later, and had what is their default
    defaults = {f.name: f.default for f in dataclasses.fields(shape) if f.default is not dataclasses.MISSING}
    saved = defaults | record.shape
    wrong = _compare_latent(shape.latent, parse_nested(LatentShape, record.shape, "latent"))
    nested = {"experts", "latent"}
    wrong = wrong or _describe_differences(dataclasses.asdict(shape), saved, SHAPE_FLAGS, free | nested)
    wrong = wrong or _compare_experts(shape.experts, parse_nested(ExpertShape, record.shape, "experts"))
    if wrong:
        raise CheckpointError(f"--load {path}: holds another model ({wrong}); give its flags.")
    if stored_rows != shape.padded_vocab_size and custom is None:
        logger.info(
            f"  note: --load {path}: its vocabulary of {vocab_size:,} is padded to {stored_rows:,} rows, this run's to "
            f"{shape.padded_vocab_size:,}; rows that it lacks begin as zeros"
        )


def _compare_latent(mine: LatentShape | None, saved: LatentShape | None) -> str:
    """Describe how the latent attention of a run differs from that of a checkpoint; "" where it does not."""
    if mine is None or saved is None:
        if mine is saved:
            return ""
        has = "lacks" if mine is None else "has"
        return f"this run {has} latent attention (--multi-latent-attention), the checkpoint does not"
    return _describe_differences(dataclasses.asdict(mine), dataclasses.asdict(saved), LATENT_FLAGS, set())


def _compare_experts(mine: ExpertShape | None, saved: ExpertShape | None) -> str:
    """Describe what differs between the experts of a run and those of a checkpoint, but for what may."""
    if mine is None or saved is None:
        if mine is saved:
            return ""
        has = "has no" if mine is None else f"has {mine.number}"
        of_checkpoint = "no" if saved is None else str(saved.number)
        return f"this run {has} experts (--num-experts), the checkpoint {of_checkpoint}"
    return _describe_differences(dataclasses.asdict(mine), dataclasses.asdict(saved), EXPERT_FLAGS, FREE_OF_EXPERTS)


def warn_of_rotary(path: Path, record: CheckpointRecord, factor: float | None) -> None:
    """Log that some versions of Megatron-LM ignore --rotary-seq-len-interpolation-factor, if the checkpoint is
    theirs.

    Args:
        path: The checkpoint's folder.
        record: Plain values of the checkpoint.
        factor: What the flag says in this run.
    """
    if record.trainer == CheckpointRecord.trainer or factor is None:
        return
    logger.info(
        f"  note: --load {path}: Megatron-LM 0.16.1 takes --rotary-seq-len-interpolation-factor "
        f"without passing it to its model, here positions are divided by {factor:g}; "
        "leave the flag out if that version trained these weights"
    )


def require_optimizer(path: Path, stored: Stored, mine: str) -> None:
    """Require that a checkpoint has the state of the run's optimizer.

    Args:
        path: The checkpoint, for messages.
        stored: What it holds.
        mine: The value of --optimizer.

    Raises:
        CheckpointError: It has none, or another optimizer's.
    """
    saved = stored.record.optimizer
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


def require_schedule(
    path: Path, record: CheckpointRecord, o: OptimizerArgs, schedule: LearningRatePlan
) -> LearningRatePlan | None:
    """Choose between the checkpoint's schedule and the command line's.

    Args:
        path: The checkpoint's folder.
        record: Plain values of the checkpoint.
        o: The flags, one of which may say which schedule counts.
        schedule: The command line's.

    Returns:
        The checkpoint's schedule if it is to be followed; None to follow the command line's.

    Raises:
        CheckpointError: They differ and no flag says which counts.
    """
    mine = dataclasses.asdict(schedule)
    if record.schedule is None or o.override_opt_param_scheduler:
        return None
    if o.use_checkpoint_opt_param_scheduler:
        return record.learning_rate
    wrong = _describe_differences(mine, record.schedule, SCHEDULE_FLAGS, set())
    if wrong:
        raise CheckpointError(
            f"--load {path}: another schedule ({wrong}); "
            "add --override-opt-param-scheduler to take the command line's, or "
            "--use-checkpoint-opt-param-scheduler to take the checkpoint's."
        )
    return None


def _describe_differences(
    mine: Mapping[str, object], saved: Mapping[str, object], flags: Mapping[str, str], free: set[str]
) -> str:
    """Describe the fields that differ; empty where none does.

    Args:
        mine: This run's fields.
        saved: The checkpoint's.
        flags: What fields are called whose flag has another name.
        free: Fields that may differ.
    """
    differences = []
    for name, value in mine.items():
        if name not in free and value != saved.get(name):
            flag = flags.get(name, dashed(name))
            differences.append(f"{flag} is {value}, the checkpoint's {saved.get(name)}")
    return "; ".join(differences)


# --- kernels that the last digits of losses depend on: checkpoints keep their names, so that a resumed run can compare

# {name of an attention kernel: value of --attention-backend}
ATTENTION_FLAGS = {"sdpa flash": "flash", "sdpa cudnn": "fused", "explicit": "unfused"}


def describe_kernels(model: nn.Module, compilation: Compilation) -> dict[str, str]:
    """Describe the kernels that the last digits of losses depend on.

    Returns:
        Such as {"attention": "sdpa flash", "torch_compile": "layers", "products": ...}; of a model that --model names
        {"model": file and SHA-256}.
    """
    if isinstance(model, CustomModel):
        source = describe_source(model.spelled)
        return {"model": f"{source['function']} (SHA-256 {source['sha256']})"}
    assert isinstance(model, GPT)
    layer = next(iter(model.decoder.layers))
    assert isinstance(layer, TransformerLayer)
    weight = next(model.parameters())
    products = describe_products(weight.dtype, weight.device.type) or "torch's own products"
    return {"attention": layer.self_attention.attend.name, "torch_compile": compilation.target, "products": products}


def compare_kernels(saved: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each kernel that differs, with the flag that restores it.

    Args:
        saved: The kernels of the run that was saved; empty if the checkpoint does not say it.
        now: This run's.
    """
    attention = ATTENTION_FLAGS.get(saved.get("attention", ""), "auto")
    flags = {
        "attention": f"--attention-backend {attention}",
        "torch_compile": f"--torch-compile {saved.get('torch_compile')}",
        "products": "the kind of processor that it began on",
    }
    names = {"attention": "attention", "torch_compile": "torch.compile", "products": "the product of linear layers"}
    if saved.get("model") != now.get("model"):
        yield (
            f"--model was {saved.get('model')} and is {now.get('model')}: "
            "its weights are taken as those of the same parameters."
        )
    for what, flag in flags.items():
        if what in saved and what in now and saved[what] != now[what]:
            yield (
                f"{names[what]} was {saved[what]} and is {now[what]}: "
                f"losses may differ in their last digits from those of an uninterrupted run; {flag} goes on as before."
            )
