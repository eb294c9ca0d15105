"""One optimizer step without the host waiting for the device.

The loss scale, the clipping coefficient and whether to skip are tensors; the fused kernels divide by `grad_scale`
and leave early at `found_inf`, so that unscaling, clipping and updating are one pass over the weights.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lite.config.args import OptimizerArgs, PrecisionArgs
from megatron_lite.config.layout import is_of_experts
from megatron_lite.config.parameter_groups import (
    GROUPS,
    OF_WIDTH,
    ORTHOGONAL,
    OWN,
    USUAL,
    ParameterGroup,
    find_group,
)
from megatron_lite.config.plan import LearningRatePlan, Plan
from megatron_lite.marks import MASTER_WEIGHTS, mark_memory
from megatron_lite.optim.muon import Composition, Muon, RowShare, Together
from megatron_lite.phases import BeginPhase, Phase


def make_engine(
    o: OptimizerArgs,
    members: dict[ParameterGroup, list[nn.Parameter]],
    rates: dict[str, Tensor],
    width: float,
    compositions: Mapping[nn.Parameter, Composition] = MappingProxyType({}),
) -> torch.optim.Optimizer:
    """A fused torch optimizer.

    Args:
        o: Its flags.
        members: The weights of each group. Those that decay do so as Optimizer.follow sets it.
        rates: The device tensors from which learning rates are read, by ParameterGroup.rate.
        width: ModelShape.mup_width_mult.
        compositions: For Muon: of the parameters that it takes apart, or of which this rank has some rows.
    """
    if o.optimizer == "muon":
        others = {kind: own for kind, own in members.items() if not kind.is_orthogonal}
        engines: list[torch.optim.Optimizer] = []
        if ORTHOGONAL in members:
            matrices: list[dict[str, Any]] = [{"params": members[ORTHOGONAL], "lr": rates[USUAL], "decays": True}]
            engines.append(Muon(matrices, o, rates[USUAL], compositions))
        if others:
            engines.append(make_engine(replace(o, optimizer="adam"), others, rates, width))
        return Together(engines)
    groups = [
        {"params": own, "weight_decay": 0.0, "lr": rates[kind.rate], "decays": kind.decays}
        for kind, own in members.items()
    ]
    if o.optimizer == "adam":
        for group, kind in zip(groups, members):
            group["eps"] = o.adam_eps / width if kind.rate == OF_WIDTH else o.adam_eps
    lr = rates[USUAL]
    weights = [weight for own in members.values() for weight in own]
    engine: torch.optim.Optimizer
    if o.optimizer == "adam":
        engine = torch.optim.AdamW(groups, lr=lr, betas=(o.adam_beta1, o.adam_beta2), eps=o.adam_eps, fused=True)
    else:
        engine = torch.optim.SGD(groups, lr=lr, momentum=o.sgd_momentum, fused=True)
    # What torch would make in the first step. Made before it, a checkpoint finds tensors to be read into; and torch
    # would leave a momentum buffer that it makes in a skipped first step uninitialized, where zeros give the same first
    # step.
    for weight in weights:
        state = engine.state[weight]
        if o.optimizer == "adam":
            state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
            state["exp_avg"] = torch.zeros_like(weight)
            state["exp_avg_sq"] = torch.zeros_like(weight)
        elif o.sgd_momentum:
            state["momentum_buffer"] = torch.zeros_like(weight)
    return engine


class MasterWeights:
    """fp32 copies of 16-bit parameters; an fp32 model's parameters stand for themselves."""

    @mark_memory(MASTER_WEIGHTS)
    def __init__(self, parameters: list[nn.Parameter]):
        self.model = parameters
        self.masters = [p if p.dtype == torch.float32 else nn.Parameter(p.detach().float()) for p in parameters]
        self._pairs = [(p, m) for p, m in zip(parameters, self.masters) if p is not m]

    @torch.no_grad()
    def attach(self, gradients: Sequence[Tensor | None]) -> None:
        """Make `gradients`, in the order of the parameters, the masters' gradients, in fp32.

        Args:
            gradients: All in one dtype; None for a parameter that the losses do not use.
        """
        pairs = zip(self.masters, gradients, strict=True)
        used = [(master, gradient) for master, gradient in pairs if gradient is not None]
        wide = [gradient for _, gradient in used]
        if wide and wide[0].dtype != torch.float32:
            # all at once: a launch takes longer than a GPU needs for a bias
            short = wide
            wide = [torch.empty_like(gradient, dtype=torch.float32) for gradient in short]
            torch._foreach_copy_(wide, short)
        for (master, _), gradient in zip(used, wide):
            master.grad = gradient

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the masters into the model."""
        if self._pairs:
            model, masters = map(list, zip(*self._pairs))
            torch._foreach_copy_(model, masters)

    @torch.no_grad()
    def reload(self, dtype: torch.dtype) -> None:
        """Take the masters from the model, after weights were loaded without an optimizer.

        Args:
            dtype: The run's precision. Sharded parameters are fp32 and stand for themselves; they are rounded to it, so
                that a run begins with the same weights whether or not its optimizer is sharded.
        """
        for parameter, master in zip(self.model, self.masters, strict=True):
            master.copy_(parameter.to(dtype))


@dataclass(frozen=True)
class Update:
    """What one step did; every field is a scalar tensor on the device."""

    grad_norm: Tensor  # before clipping, after unscaling
    skipped: Tensor  # bool
    loss_scale: Tensor  # the one that this step ran with
    next_loss_scale: Tensor
    next_lr: Tensor  # the learning rate that the next step is applied with, float64


class Optimizer:
    """Loss scale, clipping, AdamW or SGD, schedule. Takes gradients, updates the model's parameters."""

    def __init__(
        self,
        plan: Plan,
        parameters: list[nn.Parameter],
        device: torch.device,
        sum_over_ranks: Callable[[Tensor], Tensor] | None = None,
        counted: list[bool] | None = None,
        names: list[str] | None = None,
        shares: Mapping[str, RowShare] = MappingProxyType({}),
    ):
        """
        Args:
            sum_over_ranks: Sums a number over ranks that hold other parts of the parameters; None if this rank has all.
            counted: Which parameters this rank counts in that sum, as others hold them too; all if None.
            names: Of the parameters, by which some have a learning rate or weight decay of their own.
            shares: By name: this rank's rows of parameters that ranks share out.
        """
        self.plan = plan
        self._sum_over_ranks = sum_over_ranks
        self._counted = counted or [True] * len(parameters)
        self.weights = MasterWeights(parameters)
        self.scaler = make_loss_scale(plan.precision, plan.args.precision, device)
        self.lr = torch.tensor(0.0, dtype=torch.float32, device=device)
        self._width = plan.shape.mup_width_mult
        self._members = self._group(names or [""] * len(parameters))
        others = {kind.rate for kind in self._members} - {USUAL}
        # learning rates other than the usual one, which decoupled parameters and those under muP have
        self._other_lrs = {rate: torch.tensor(0.0, dtype=torch.float32, device=device) for rate in sorted(others)}
        rates = {USUAL: self.lr, **self._other_lrs}
        compositions = self._compose(names or [], shares)
        self.engine = make_engine(plan.args.optimizer, self._members, rates, self._width, compositions)
        self.good_samples = torch.zeros((), dtype=torch.int64, device=device)
        self.stopped = torch.zeros((), dtype=torch.bool, device=device)
        self._one = torch.ones((), dtype=torch.float32, device=device)
        self.follow(plan.learning_rate)

    def _group(self, names: list[str]) -> dict[ParameterGroup, list[nn.Parameter]]:
        """The weights of each group that has any."""
        members: dict[ParameterGroup, list[nn.Parameter]] = {kind: [] for kind in GROUPS}
        for name, master in zip(names, self.weights.masters, strict=True):
            members[find_group(name, master.ndim, self.plan.args.optimizer, self._width)].append(master)
        return {kind: own for kind, own in members.items() if own}

    def _compose(self, names: list[str], shares: Mapping[str, RowShare]) -> dict[nn.Parameter, Composition]:
        """Of which matrices parameters are made, as Muon takes them apart; those of one whole matrix are left out."""
        shape = self.plan.shape
        experts = self.plan.rank_shape.experts
        queries = shape.num_attention_heads // shape.num_query_groups * shape.kv_channels
        found = {}
        for name, master in zip(names, self.weights.masters):
            is_fused = name.endswith("linear_qkv.weight") and self.plan.args.optimizer.muon_split_qkv
            composition = Composition(
                experts=experts.local_number if experts is not None and is_of_experts(name) else 1,
                fused=(queries, shape.kv_channels, shape.kv_channels) if is_fused else None,
                share=shares.get(name),
            )
            if composition != Composition():
                found[master] = composition
        return found

    def follow(self, schedule: LearningRatePlan) -> None:
        """Take learning rate and weight decay from `schedule`."""
        self.schedule = schedule
        o = self.plan.args.optimizer
        schedules = {OWN: schedule.decouple(o), OF_WIDTH: schedule.scale_to_width(o, self._width)}
        self._other_schedules = {rate: schedules[rate] or schedule for rate in self._other_lrs}
        self._decay_changes = schedule.weight_decay_style != "constant"
        # torch applies a constant decay; one that changes it would want as a number on the host, so that step does it
        for group in self.engine.param_groups:
            is_constant = group["decays"] and not self._decay_changes
            group["weight_decay"] = schedule.start_weight_decay if is_constant else 0.0
        self._set_rates()

    def resume(self) -> None:
        """Continue after state was copied into `tensors`: round the model's weights from it,
        set the rates of its samples."""
        self.weights.write_back()
        self._set_rates()

    @property
    def loss_scale(self) -> Tensor:
        """The factor by which the loss is multiplied before backward."""
        return self._one if self.scaler is None else self.scaler.scale

    @torch.no_grad()
    def step(
        self, gradients: Sequence[Tensor | None], samples: int, phase: BeginPhase, divisor: Tensor | None = None
    ) -> Update:
        """Update the model from scaled `gradients`, in the order of the parameters, averaged over ranks.

        Args:
            gradients: Scaled, averaged over ranks; None for a parameter that the losses do not use.
            samples: Of the global batch.
            phase: Opened around each part of the step.
            divisor: A further scalar to divide gradients by.

        An overflow skips the step (with a loss scale). A NaN or Inf without one stops all further steps, so that the
        weights stay good until the host has noticed.
        """
        with phase(Phase.UNSCALE):
            scale = self.loss_scale.clone()
            divide_by = scale if divisor is None else scale * divisor
            self.weights.attach(gradients)
        with phase(Phase.CLIP_GRAD):
            norm = self.measure_norm(gradients) / divide_by
            if self.scaler is not None:
                skipped = ~torch.isfinite(norm)
            else:
                if self.plan.args.precision.check_for_nan_in_loss_and_grad:
                    self.stopped |= ~torch.isfinite(norm)
                skipped = self.stopped.clone()
            if self.plan.args.optimizer.clip_grad:
                coefficient = (self.plan.args.optimizer.clip_grad / (norm + 1e-6)).clamp(max=1.0)
                divide_by = divide_by / coefficient
        with phase(Phase.OPTIMIZER_STEP):
            if self._decay_changes:
                self._decay(skipped, divide_by)
            # the attributes that torch's GradScaler sets on fused optimizers
            factors = {"grad_scale": torch.where(skipped, self._one, divide_by), "found_inf": skipped.float()}
            for name, factor in factors.items():
                setattr(self.engine, name, factor)
            self.engine.step()
            for name in factors:
                delattr(self.engine, name)
            self.weights.write_back()
            for master in self.weights.masters:  # fp32 copies of gradients must not live through the next forward
                master.grad = None
            if self.scaler is not None:
                self.scaler.update(skipped)
            self.good_samples += (~skipped).long() * samples
            return Update(norm, skipped, scale, self.loss_scale.clone(), self._set_rates())

    @torch.no_grad()
    def measure_norm(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """L2 norm of gradients or parameters, over all ranks that have parts of them; an fp32 scalar on the device."""
        counted = self._select(tensors)
        norm = torch.zeros_like(self._one)  # of a rank that counts none
        if counted:
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(counted, 2, torch.float32)))
        return norm if self._sum_over_ranks is None else self._sum_over_ranks(norm.square()).sqrt()

    @torch.no_grad()
    def count_zeros(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Elements that are 0, over all ranks; an fp32 scalar on the device."""
        zeros = torch.zeros_like(self._one)  # of a rank that counts none
        counts = [(gradient == 0).sum() for gradient in self._select(gradients)]
        if counts:
            # whole numbers, which fp32 would round beyond 2^24 with each addition
            zeros = torch.stack(counts).sum().float()
        return zeros if self._sum_over_ranks is None else self._sum_over_ranks(zeros)

    def _select(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        """The tensors, of one per parameter, that this rank counts.

        A parameter that the losses do not use has no gradient.
        """
        return [t for t, counts in zip(tensors, self._counted, strict=True) if counts and t is not None]

    def _set_rates(self) -> Tensor:
        """Set the rates of the step that starts after the good samples so far. Returns the learning rate."""
        rate = compute_learning_rates(self.schedule, self.good_samples)
        self.lr.copy_(rate)
        for name, schedule in self._other_schedules.items():
            self._other_lrs[name].copy_(compute_learning_rates(schedule, self.good_samples))
        return rate

    def _decay(self, skipped: Tensor, divide_by: Tensor) -> None:
        decay = compute_weight_decays(self.schedule, self.good_samples).float()
        for group in self.engine.param_groups:
            # as torch does with a constant decay: a weight without a gradient stays as it is
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if not group["decays"] or not weights:
                continue
            if self.plan.args.optimizer.optimizer != "sgd":
                keep = torch.where(skipped, self._one, 1 - group["lr"] * decay)
                torch._foreach_mul_(weights, keep)
            else:  # SGD's decay is part of the gradient, and goes through the momentum
                scaled = torch._foreach_mul([w.detach() for w in weights], decay * divide_by)
                torch._foreach_add_([w.grad for w in weights], scaled)

    def tensors(self, names: list[str]) -> dict[str, Tensor]:
        """Everything that the next step depends on besides the model, under checkpoint.record's flat names.

        names: of the parameters, in their order. The tensors are the live ones: what is copied into them counts after
        `resume`.
        """
        found = {"optimizer.good_samples": self.good_samples}
        for name, parameter, master in zip(names, self.weights.model, self.weights.masters, strict=True):
            if self.plan.precision != "fp32":
                found[f"optimizer.{name}.master"] = master.detach()
            found |= {f"optimizer.{name}.{key}": value for key, value in self.engine.state[master].items()}
        if self.scaler is not None:
            found |= {f"loss_scale.{key}": value for key, value in self.scaler.tensors().items()}
        return found


# --- the factor that keeps small fp16 gradients from vanishing: reading it on the host would make the host wait for the
# device in every step, so that every rule is arithmetic on tensors


class LossScale:
    """A fixed loss scale."""

    def __init__(self, scale: float, device: torch.device):
        self.scale = torch.tensor(scale, dtype=torch.float32, device=device)

    def update(self, overflow: Tensor) -> None:
        """Adapt the scale after a step. overflow: a bool tensor."""

    def tensors(self) -> dict[str, Tensor]:
        """State that a checkpoint holds: none, as the command line gives a fixed factor."""
        return {}


class DynamicLossScale(LossScale):
    """Megatron's rules: halve when `hysteresis` overflows have been used up, double after `window` clean steps.

    Hysteresis comes back only when the scale grows, not by a clean step.
    """

    def __init__(self, initial: float, minimum: float, window: int, hysteresis: int, device: torch.device):
        super().__init__(initial, device)
        self.minimum = minimum
        self.window = window
        self.hysteresis = hysteresis
        self.growth_tracker = torch.zeros((), dtype=torch.int32, device=device)
        self.hysteresis_tracker = torch.full((), hysteresis, dtype=torch.int32, device=device)

    def update(self, overflow: Tensor) -> None:
        clean_steps = torch.where(overflow, 0, self.growth_tracker + 1)
        left = torch.where(overflow, self.hysteresis_tracker - 1, self.hysteresis_tracker)
        shrink = overflow & (left <= 0)
        grow = clean_steps == self.window
        halved = (self.scale / 2).clamp(min=self.minimum)
        grown = torch.where(grow, self.scale * 2, self.scale)
        self.scale.copy_(torch.where(shrink, halved, grown))
        self.growth_tracker.copy_(torch.where(grow, 0, clean_steps))
        self.hysteresis_tracker.copy_(torch.where(grow, self.hysteresis, left))

    def tensors(self) -> dict[str, Tensor]:
        return {
            "scale": self.scale,
            "growth_tracker": self.growth_tracker,
            "hysteresis_tracker": self.hysteresis_tracker,
        }


def make_loss_scale(precision: str, p: PrecisionArgs, device: torch.device) -> LossScale | None:
    """The loss scale of a precision; None where gradients need none: fp32, and bf16 without --loss-scale."""
    if precision == "fp32" or precision == "bf16" and not p.loss_scale:
        return None
    if p.loss_scale:  # 0 is Megatron's word for a dynamic one
        return LossScale(p.loss_scale, device)
    return DynamicLossScale(p.initial_loss_scale, p.min_loss_scale, int(p.loss_scale_window), p.hysteresis, device)


# --- the schedule of Megatron-LM 0.16, by samples of successful steps, on the device where their number is


def compute_learning_rates(plan: LearningRatePlan, samples: Tensor) -> Tensor:
    """Learning rate of the step that starts after `samples` successfully consumed samples; float64, same shape."""
    samples = torch.as_tensor(samples, dtype=torch.float64)
    warming = (samples <= plan.warmup_samples) & (plan.warmup_samples > 0)
    warm = plan.init + (plan.peak - plan.init) * samples / (plan.warmup_samples or 1)
    if plan.style == "constant":
        return torch.where(warming, warm, plan.peak)
    if plan.style == "inverse-square-root":
        warmup = max(plan.warmup_samples, 1)
        rate = (plan.peak * math.sqrt(warmup) / samples.clamp(min=1).sqrt()).clamp(min=plan.floor)
    else:
        rate = plan.floor + (plan.peak - plan.floor) * _compute_remaining(plan, samples)
    return torch.where(warming, warm, torch.where(samples > plan.decay_samples, plan.floor, rate))


def _compute_remaining(plan: LearningRatePlan, samples: Tensor) -> Tensor:
    """Share of (peak - floor) that is left: 1 after the warm-up, 0 at the end of the decay."""
    if plan.style != "WSD":
        span = (plan.decay_samples - plan.warmup_samples) or 1
        done = ((samples - plan.warmup_samples) / span).clamp(0, 1)
        return 1 - done if plan.style == "linear" else _cosine(done)
    # warm-up, stable, decay: everything stays until the last wsd_samples
    start = plan.decay_samples - plan.wsd_samples
    done = ((samples - start) / max(plan.wsd_samples, 1)).clamp(0, 1)
    shape = {
        "linear": lambda: 1 - done,
        "cosine": lambda: _cosine(done),
        "exponential": lambda: 2 * 0.5**done - 1,
        "minus_sqrt": lambda: 1 - done.sqrt(),
    }
    return torch.where(samples <= start, 1.0, shape[plan.wsd_style]())


def compute_weight_decays(plan: LearningRatePlan, samples: Tensor) -> Tensor:
    """Weight decay of the step that starts after `samples` samples: constant, or growing over the whole training;
    float64."""
    samples = torch.as_tensor(samples, dtype=torch.float64)
    if plan.weight_decay_style == "constant":
        return torch.full_like(samples, plan.end_weight_decay)
    share = (samples / max(plan.weight_decay_samples, 1)).clamp(max=1)
    grown = share if plan.weight_decay_style == "linear" else _cosine(1 - share)
    return plan.start_weight_decay + (plan.end_weight_decay - plan.start_weight_decay) * grown


def _cosine(done: Tensor) -> Tensor:
    """Half a cosine wave, from 1 to 0 while `done` goes from 0 to 1."""
    return 0.5 * (torch.cos(math.pi * done) + 1)
