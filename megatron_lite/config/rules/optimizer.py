"""What optimizer and schedule flags must satisfy."""

from collections.abc import Iterator

from megatron_lite.config.args import Args
from megatron_lite.config.world import World


def optimizer_rules(args: Args, world: World) -> Iterator[str]:
    """Mistakes among the optimizer's and the schedule's flags."""
    yield from _learning_rate(args)
    yield from _schedule_units(args)
    yield from _warmup(args)
    yield from _wsd(args)
    yield from _weight_decay(args)
    yield from _moments(args)


def _learning_rate(args: Args) -> Iterator[str]:
    o = args.optimizer
    if o.lr is None:
        if not args.training.skip_train:
            yield "--lr is missing; give the peak learning rate, such as 6e-5."
        return
    if o.lr < 0:
        yield f"--lr {o.lr:g}: must be at least 0."
        return
    if o.min_lr < 0 or o.min_lr > o.lr:
        yield f"--min-lr {o.min_lr:g}: must be at least 0 and at most --lr {o.lr:g}."
    if o.lr_warmup_init < 0 or o.lr_warmup_init > o.lr:
        yield f"--lr-warmup-init {o.lr_warmup_init:g}: must be at least 0 and at most --lr {o.lr:g}."


def _schedule_units(args: Args) -> Iterator[str]:
    o, t = args.optimizer, args.training
    in_iters = {
        "--lr-decay-iters": o.lr_decay_iters,
        "--lr-warmup-iters": o.lr_warmup_iters,
        "--lr-wsd-decay-iters": o.lr_wsd_decay_iters,
    }
    in_samples = {
        "--lr-decay-samples": o.lr_decay_samples,
        "--lr-warmup-samples": o.lr_warmup_samples,
        "--lr-wsd-decay-samples": o.lr_wsd_decay_samples,
    }
    for name, value in {**in_iters, **in_samples}.items():
        least = 1 if name.startswith("--lr-decay") else 0
        if value is not None and value < least:
            yield f"{name} {value}: must be at least {least}."
    wrong, unit = (in_samples, "--train-iters") if t.train_iters is not None else (in_iters, "--train-samples")
    for name, value in wrong.items():
        if value and (t.train_iters is None) != (t.train_samples is None):
            other = name.replace("samples", "iters") if unit == "--train-iters" else name.replace("iters", "samples")
            yield f"{name} {value} does not go with {unit}; use {other}."


def _warmup(args: Args) -> Iterator[str]:
    o, t = args.optimizer, args.training
    if o.lr_warmup_fraction is not None:
        if not 0 <= o.lr_warmup_fraction < 1:
            yield f"--lr-warmup-fraction {o.lr_warmup_fraction:g}: must be at least 0 and below 1."
        for name, value in (("--lr-warmup-iters", o.lr_warmup_iters), ("--lr-warmup-samples", o.lr_warmup_samples)):
            if value:
                yield f"--lr-warmup-fraction and {name} {value} exclude each other; keep one."
    for unit, total in (("iters", t.train_iters), ("samples", t.train_samples)):
        decay, warmup = getattr(o, f"lr_decay_{unit}") or total, getattr(o, f"lr_warmup_{unit}")
        if decay and warmup and warmup >= decay:
            yield (
                f"--lr-warmup-{unit} {warmup} leaves nothing of the {decay} {unit} of decay; "
                f"lower it, or raise --lr-decay-{unit}."
            )


def _wsd(args: Args) -> Iterator[str]:
    o, t = args.optimizer, args.training
    if o.lr_decay_style != "WSD":
        return
    unit = "samples" if t.train_samples is not None else "iters"
    last, decay = getattr(o, f"lr_wsd_decay_{unit}"), getattr(o, f"lr_decay_{unit}") or getattr(t, f"train_{unit}")
    if last is None:
        yield f"--lr-decay-style WSD needs --lr-wsd-decay-{unit}, the length of its last phase; add it."
    elif decay and last > decay:
        yield f"--lr-wsd-decay-{unit} {last} is longer than the {decay} {unit} of decay; lower it."


def _weight_decay(args: Args) -> Iterator[str]:
    o = args.optimizer
    if o.weight_decay < 0:
        yield f"--weight-decay {o.weight_decay:g}: must be at least 0."
    start, end = o.start_weight_decay, o.end_weight_decay
    if o.weight_decay_incr_style == "constant":
        if start is not None or end is not None:
            yield (
                "--start-weight-decay and --end-weight-decay need --weight-decay-incr-style linear or cosine; "
                "add it, or use --weight-decay."
            )
    elif start is None or end is None:
        yield (
            f"--weight-decay-incr-style {o.weight_decay_incr_style} needs --start-weight-decay and "
            "--end-weight-decay; add them."
        )
    elif not 0 <= start <= end:
        yield f"--start-weight-decay {start:g}: must be at least 0 and at most --end-weight-decay {end:g}."


def _moments(args: Args) -> Iterator[str]:
    o = args.optimizer
    for name, value in (
        ("--adam-beta1", o.adam_beta1),
        ("--adam-beta2", o.adam_beta2),
        ("--sgd-momentum", o.sgd_momentum),
    ):
        if not 0 <= value < 1:
            yield f"{name} {value:g}: must be at least 0 and below 1."
    if o.adam_eps <= 0:
        yield f"--adam-eps {o.adam_eps:g}: must be above 0."
    if o.clip_grad < 0:
        yield f"--clip-grad {o.clip_grad:g}: must be above 0, or 0 for no clipping."
    if o.override_opt_param_scheduler and o.use_checkpoint_opt_param_scheduler:
        yield "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler exclude each other; keep one."
