"""Rules for the flags of batch, length, precision, optimizer and schedule."""

import signal
from collections.abc import Iterator

from megatron_lite.config.args import Args
from megatron_lite.config.layout import count_data_ranks
from megatron_lite.config.plan import parse_batch_steps
from megatron_lite.config.world import World
from megatron_lite.units import significant

MAX_TRAINING_SAMPLES = 2**53


def training_rules(args: Args, world: World) -> Iterator[str]:
    """Mistakes among batch sizes, run length and exits."""
    t = args.training
    w = args.watch
    if t.train_iters is not None and t.train_samples is not None:
        yield f"--train-iters {t.train_iters} and --train-samples {t.train_samples} exclude each other; keep one."
    if t.train_iters is None and t.train_samples is None:
        yield "--train-iters is missing; say how long to train, or give --train-samples."
    micro_batch = max(t.micro_batch_size or 1, 1)
    data_ranks = count_data_ranks(args.parallel, world)
    per_pass = micro_batch * data_ranks
    batch = max(t.global_batch_size or per_pass, 1)
    evaluations = w.count_validations(t.train_iters or 0) + 1
    for name, value, times in (("--train-iters", t.train_iters or 0, 1), ("--eval-iters", w.eval_iters, evaluations)):
        if value * times * batch > MAX_TRAINING_SAMPLES:
            at_most = f"at most 2^53 = {MAX_TRAINING_SAMPLES} can be counted"
            yield f"{name} {value}: makes {value * times * batch} samples in all; {at_most}, lower it."
    yield from _check_batches(args, data_ranks, per_pass)
    if t.exit_signal not in set(signal.Signals.__members__) - {"SIGKILL", "SIGSTOP"}:
        usual = "SIGTERM, SIGINT and SIGUSR1 are usual"
        yield f"--exit-signal {t.exit_signal}: not a signal that a program can catch; {usual}."


def _check_batches(args: Args, data_ranks: int, per_pass: int) -> Iterator[str]:
    """Mistakes among global batches.

    Args:
        data_ranks: Data parallel ranks.
        per_pass: Samples of one micro-batch of all of them.
    """
    t = args.training
    parts = f"--micro-batch-size {t.micro_batch_size} times data parallel size {data_ranks} = {per_pass}"
    if t.global_batch_size is not None and (t.global_batch_size < 1 or t.global_batch_size % per_pass):
        divisible = f"--global-batch-size {t.global_batch_size} is not divisible by {parts}"
        yield f"{divisible}; try {max(1, t.global_batch_size // per_pass) * per_pass}."
    if t.rampup_batch_size:
        yield from _check_rampup(args, per_pass, parts)
    if t.step_batch_size_schedule is not None:
        yield from _check_batch_steps(args, per_pass, parts)
    yield from _check_evaluation_batches(args, data_ranks, per_pass)


def _check_evaluation_batches(args: Args, data_ranks: int, per_pass: int) -> Iterator[str]:
    """Mistakes among the batches of evaluations. The arguments are those of _check_batches."""
    t = args.training
    evaluated = t.eval_global_batch_size
    name = "--micro-batch-size"
    micro_batch = t.micro_batch_size or 1
    if t.eval_micro_batch_size is not None:
        name = "--eval-micro-batch-size"
        micro_batch = t.eval_micro_batch_size
        # Megatron-LM's --global-batch-size is one pass where a schedule stands in its place
        usual = per_pass if t.step_batch_size_schedule is not None else t.global_batch_size or per_pass
    else:
        usual = 0
    own_pass = max(micro_batch, 1) * data_ranks
    parts = f"{name} {micro_batch} times data parallel size {data_ranks} = {own_pass}"
    if evaluated is not None and evaluated % own_pass:
        divisible = f"--eval-global-batch-size {evaluated} is not divisible by {parts}"
        yield f"{divisible}; try {max(1, evaluated // own_pass) * own_pass}."
    elif evaluated is None and usual % own_pass:
        undivided = f"a global batch of {usual} is not divisible by {parts}"
        yield f"{name} {micro_batch}: {undivided}; give --eval-global-batch-size."


def _check_batch_steps(args: Args, per_pass: int, parts: str) -> Iterator[str]:
    t = args.training
    shown = f"--step-batch-size-schedule {t.step_batch_size_schedule}"
    try:
        steps = parse_batch_steps(t.step_batch_size_schedule or "", max(args.model.seq_length or 1, 1))
    except (ValueError, OverflowError):
        form = "needs TOKENS:BATCH, the first from 0 tokens on and the others in order"
        yield f"{shown}: {form}, such as '0:768 250B:1536'."
        return
    for flag, value in (("--global-batch-size", t.global_batch_size), ("--rampup-batch-size", t.rampup_batch_size)):
        if value:
            yield f"{shown} and {flag} exclude each other, as in Megatron-LM; drop one of them."
    if t.train_samples is None:
        yield f"{shown} needs --train-samples; give it instead of --train-iters."
    odd = next((size for _, size in steps if size % per_pass), None)
    if odd is not None:
        yield f"{shown}: its batch {odd} is not divisible by {parts}; change it."


def _check_rampup(args: Args, per_pass: int, parts: str) -> Iterator[str]:
    t = args.training
    shown = "--rampup-batch-size " + " ".join(map(str, t.rampup_batch_size))
    if len(t.rampup_batch_size) != 3 or min(t.rampup_batch_size) < 1:
        yield f"{shown}: needs three positive numbers: START INCREMENT SAMPLES."
        return
    if t.train_samples is None:
        yield f"{shown} counts samples; give --train-samples instead of --train-iters."
    start, increment, _ = t.rampup_batch_size
    final = t.global_batch_size
    if final is None:
        yield f"{shown} needs --global-batch-size, the size to grow to."
    elif start > final or (final - start) % increment:
        reach = f"steps of {increment} from {start} do not reach --global-batch-size {final}"
        yield f"{shown}: {reach}; choose ones that do."
    if start % per_pass or increment % per_pass:
        yield f"{shown}: start and increment must be divisible by {parts}."


def precision_rules(args: Args, world: World) -> Iterator[str]:
    """Mistakes among precisions and loss scales."""
    p = args.precision
    if p.fp16 and p.bf16:
        yield "--fp16 and --bf16 exclude each other; keep one."
    if p.grad_reduce_in_bf16 and p.accumulate_allreduce_grads_in_fp32:
        yield "--grad-reduce-in-bf16 and --accumulate-allreduce-grads-in-fp32 exclude each other; keep one."
    if 0 < p.initial_loss_scale < p.min_loss_scale:
        exceeds = f"exceeds --initial-loss-scale {significant(p.initial_loss_scale, 6)}"
        yield f"--min-loss-scale {significant(p.min_loss_scale, 6)} {exceeds}; lower it."
    if p.loss_scale_window != int(p.loss_scale_window):
        yield f"--loss-scale-window {p.loss_scale_window:g}: must be a whole number."


def optimizer_rules(args: Args, world: World) -> Iterator[str]:
    """Mistakes among the optimizer's and the schedule's flags."""
    o = args.optimizer
    if o.lr is None and not args.training.skip_train:
        yield "--lr is missing; give the peak learning rate, such as 6e-5."
    for name, rate in (("--min-lr", o.min_lr), ("--lr-warmup-init", o.lr_warmup_init)):
        if o.lr is not None and not 0 <= rate <= o.lr:
            yield f"{name} {rate:g}: must be at least 0 and at most --lr {o.lr:g}."
    if o.optimizer == "muon":
        yield from _check_muon(args)
    yield from _check_schedule(args)
    start = o.start_weight_decay
    end = o.end_weight_decay
    both = "--start-weight-decay and --end-weight-decay"
    if o.weight_decay_incr_style == "constant":
        if start is not None or end is not None:
            yield f"{both} need --weight-decay-incr-style linear or cosine; add it, or use --weight-decay."
    elif start is None or end is None:
        yield f"--weight-decay-incr-style {o.weight_decay_incr_style} needs {both}; add them."
    elif not 0 <= start <= end:
        yield f"--start-weight-decay {start:g}: must be at least 0 and at most --end-weight-decay {end:g}."
    if o.override_opt_param_scheduler and o.use_checkpoint_opt_param_scheduler:
        yield "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler exclude each other; keep one."


def _check_muon(args: Args) -> Iterator[str]:
    """Muon takes whole matrices, in fp32 or bf16, also where ranks share out their rows."""
    p = args.parallel
    name = "--optimizer muon"
    if args.precision.fp16:
        yield f"{name} and --fp16 exclude each other, as in Megatron-LM; give --bf16."
    splits = {"--tensor-model-parallel-size": p.tensor_model_parallel_size}
    if args.experts.num_experts is not None:
        splits["--expert-tensor-parallel-size"] = p.expert_tensor_parallel_size or 1
    for flag, size in splits.items():
        if size > 1 and args.optimizer.muon_tp_mode != "blockwise":
            split = f"{flag} {size} splits"
            yield f"{name}: {split} the matrices; give --muon-tp-mode blockwise, which takes parts for matrices, or 1."
            break
    if p.shards_state and (p.use_torch_fsdp2 or p.use_megatron_fsdp):
        flag = "--use-megatron-fsdp" if p.use_megatron_fsdp else "--use-torch-fsdp2"
        yield f"{name} and {flag} exclude each other, as in Megatron-LM; give --use-distributed-optimizer instead."
    if args.checkpoint.ckpt_format == "torch" and args.checkpoint.save is not None:
        yield f"{name}: --ckpt-format torch has no place for two optimizers; drop the format."


def _check_schedule(args: Args) -> Iterator[str]:
    """Mistakes among the lengths of the decay, the warm-up and WSD's last phase.

    They have the unit of the run's length, and lie within the decay.
    """
    o = args.optimizer
    t = args.training
    units = {"iters": t.train_iters, "samples": t.train_samples}
    for unit, other in (("iters", "samples"), ("samples", "iters")):
        for name in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
            value = getattr(o, f"{name}_{unit}")
            flag = f"--{name.replace('_', '-')}"
            if value and units[unit] is None and units[other] is not None:
                yield f"{flag}-{unit} {value} does not go with --train-{other}; use {flag}-{other}."
        warmup = getattr(o, f"lr_warmup_{unit}")
        decay = getattr(o, f"lr_decay_{unit}") or units[unit]
        if o.lr_warmup_fraction is not None and warmup:
            yield f"--lr-warmup-fraction and --lr-warmup-{unit} {warmup} exclude each other; keep one."
        if decay and warmup and warmup >= decay:
            leaves = f"leaves nothing of the {decay} {unit} of decay"
            yield f"--lr-warmup-{unit} {warmup} {leaves}; lower it, or raise --lr-decay-{unit}."
    if o.lr_decay_style == "WSD":
        unit = "iters" if t.train_samples is None else "samples"
        last = getattr(o, f"lr_wsd_decay_{unit}")
        decay = getattr(o, f"lr_decay_{unit}") or units[unit]
        if last is None:
            yield f"--lr-decay-style WSD needs --lr-wsd-decay-{unit}, the length of its last phase; add it."
        elif decay and last > decay:
            yield f"--lr-wsd-decay-{unit} {last} is longer than the {decay} {unit} of decay; lower it."
