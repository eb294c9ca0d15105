"""What batch, length and precision flags must satisfy."""

import signal
from collections.abc import Iterator

from megatron_lite.config.args import Args
from megatron_lite.config.world import World

MAX_SIZE = 2**31 - 1
MAX_SAMPLES = 2**53


def training_rules(args: Args, world: World) -> Iterator[str]:
    """Mistakes among batch sizes, run length and precision."""
    yield from _length(args)
    yield from _samples(args, world)
    yield from _batch(args, world)
    yield from _rampup(args, world)
    yield from _exits(args)


def _length(args: Args) -> Iterator[str]:
    t = args.training
    if t.train_iters is not None and t.train_samples is not None:
        yield f"--train-iters {t.train_iters} and --train-samples {t.train_samples} exclude each other; keep one."
    if t.train_iters is None and t.train_samples is None:
        yield "--train-iters is missing; say how long to train, or give --train-samples."
    for name in ("train_iters", "train_samples"):
        value = getattr(t, name)
        if value is not None and value < 1:
            yield f"--{name.replace('_', '-')} {value}: must be at least 1; to only evaluate use --skip-train."


def _samples(args: Args, world: World) -> Iterator[str]:
    """Whole trainings whose samples cannot be counted."""
    t, w = args.training, args.watch
    batch = max(t.global_batch_size or (t.micro_batch_size or 1) * world.size, 1)
    evaluations = (t.train_iters or 0) // max(w.eval_interval, 1) + 1
    for name, value, times in (("--train-iters", t.train_iters or 0, 1), ("--eval-iters", w.eval_iters, evaluations)):
        if value * times * batch > MAX_SAMPLES:
            yield f"{name} {value}: makes {value * times * batch} samples in all; at most 2^53 = {MAX_SAMPLES} can be counted, lower it."


def _batch(args: Args, world: World) -> Iterator[str]:
    t = args.training
    if t.micro_batch_size is None:
        yield "--micro-batch-size is missing; every run needs it."
        return
    if t.micro_batch_size < 1:
        yield f"--micro-batch-size {t.micro_batch_size}: must be at least 1."
        return
    for name in ("micro_batch_size", "global_batch_size"):
        if (getattr(t, name) or 0) > MAX_SIZE:
            yield f"--{name.replace('_', '-')} {getattr(t, name)}: must be at most {MAX_SIZE}."
            return
    per_pass = t.micro_batch_size * world.size
    if t.global_batch_size is None:
        return
    if t.global_batch_size < 1 or t.global_batch_size % per_pass:
        yield (
            f"--global-batch-size {t.global_batch_size} is not divisible by --micro-batch-size "
            f"{t.micro_batch_size} times data parallel size {world.size} = {per_pass}; "
            f"try {max(1, t.global_batch_size // per_pass) * per_pass}."
        )


def _rampup(args: Args, world: World) -> Iterator[str]:
    t = args.training
    if not t.rampup_batch_size:
        return
    shown = "--rampup-batch-size " + " ".join(map(str, t.rampup_batch_size))
    if len(t.rampup_batch_size) != 3 or min(t.rampup_batch_size) < 1:
        yield f"{shown}: needs three positive numbers: START INCREMENT SAMPLES."
        return
    if t.train_samples is None:
        yield f"{shown} counts samples; give --train-samples instead of --train-iters."
    start, increment, _ = t.rampup_batch_size
    final, per_pass = t.global_batch_size, max(t.micro_batch_size or 1, 1) * world.size
    if final is None:
        yield f"{shown} needs --global-batch-size, the size to grow to."
    elif start > final or (final - start) % increment:
        yield (
            f"{shown}: steps of {increment} from {start} do not reach --global-batch-size {final}; choose ones that do."
        )
    if (t.micro_batch_size or 0) > 0 and (start % per_pass or increment % per_pass):
        yield (
            f"{shown}: start and increment must be divisible by --micro-batch-size {t.micro_batch_size} times "
            f"data parallel size {world.size} = {per_pass}."
        )


def _exits(args: Args) -> Iterator[str]:
    t = args.training
    if not 0 <= t.seed < 2**32:
        yield f"--seed {t.seed}: must be at least 0 and below 2^32 = {2**32}."
    for name in ("exit_interval", "exit_duration_in_mins"):
        value = getattr(t, name)
        if value is not None and value < 1:
            yield f"--{name.replace('_', '-')} {value}: must be at least 1, or leave it out."
    if t.exit_signal not in set(signal.Signals.__members__) - {"SIGKILL", "SIGSTOP"}:
        yield (
            f"--exit-signal {t.exit_signal}: not a signal that a program can catch; SIGTERM, SIGINT and SIGUSR1 are "
            "usual."
        )
    if t.manual_gc_interval < 0:
        yield f"--manual-gc-interval {t.manual_gc_interval}: must be at least 0."


def precision_rules(args: Args, world: World) -> Iterator[str]:
    """Mistakes among precisions and loss scales."""
    p = args.precision
    if p.fp16 and p.bf16:
        yield "--fp16 and --bf16 exclude each other; keep one."
    if p.grad_reduce_in_bf16 and not p.bf16:
        yield "--grad-reduce-in-bf16 needs --bf16; add it, or drop this."
    if p.grad_reduce_in_bf16 and p.accumulate_allreduce_grads_in_fp32:
        yield "--grad-reduce-in-bf16 and --accumulate-allreduce-grads-in-fp32 exclude each other; keep one."
    for name in ("loss_scale", "initial_loss_scale", "min_loss_scale"):
        value = getattr(p, name)
        if value is not None and (value < 0 or not value and name != "loss_scale"):
            yield f"--{name.replace('_', '-')} {value:g}: must be above 0."
    if 0 < p.initial_loss_scale < p.min_loss_scale:
        yield (
            f"--min-loss-scale {p.min_loss_scale:g} exceeds --initial-loss-scale {p.initial_loss_scale:g}; lower it."
        )
    if not 1 <= p.loss_scale_window <= MAX_SIZE or p.loss_scale_window != int(p.loss_scale_window):
        yield f"--loss-scale-window {p.loss_scale_window:g}: must be a whole number of at least 1 and at most {MAX_SIZE}."
    if not 1 <= p.hysteresis <= MAX_SIZE:
        yield f"--hysteresis {p.hysteresis}: must be at least 1 and at most {MAX_SIZE}."
