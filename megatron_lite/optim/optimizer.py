"""The optimizer: a step for which the host never waits for the device.

The loss scale, the clipping coefficient and whether to skip are tensors; the fused kernels divide by `grad_scale`
and leave early at `found_inf`, so that unscaling, clipping and updating are one pass over the weights.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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

NORM_EPSILON = 1e-6  # Megatron-LM's, and torch's: keeps a norm of zero from dividing


def make_engine(
    o: OptimizerArgs,
    members: dict[ParameterGroup, list[nn.Parameter]],
    rates: dict[str, Tensor],
    width: float,
    compositions: Mapping[nn.Parameter, Composition] = MappingProxyType({}),
) -> torch.optim.Optimizer:
    """Make the torch optimizer that --optimizer names, with its state.

    Args:
        o: The optimizer's flags.
        members: fp32 weights of each group. Those that decay do so as Optimizer.follow sets it.
        rates: Learning rates, fp32 scalars on the device, by ParameterGroup.rate.
        width: ModelShape.mup_width_mult.
        compositions: Parameters that Muon takes apart, or of which this rank has some rows.
    """
    if o.optimizer == "muon":
        return _make_muon(o, members, rates, width, compositions)
    if o.optimizer == "adam":
        return _make_adam(o, members, rates, width)
    return _make_sgd(o, members, rates)


def _make_muon(
    o: OptimizerArgs,
    members: dict[ParameterGroup, list[nn.Parameter]],
    rates: dict[str, Tensor],
    width: float,
    compositions: Mapping[nn.Parameter, Composition],
) -> torch.optim.Optimizer:
    """Make Muon for matrices and AdamW for all other weights. The arguments are those of make_engine."""
    engines: list[torch.optim.Optimizer] = []
    if ORTHOGONAL in members:
        group = {"params": members[ORTHOGONAL], "lr": rates[USUAL], "decays": True}
        engines.append(Muon([group], o, rates[USUAL], compositions))
    others = {kind: own for kind, own in members.items() if not kind.is_orthogonal}
    if others:
        engines.append(_make_adam(o, others, rates, width))
    return Together(engines)


def _make_adam(
    o: OptimizerArgs,
    members: dict[ParameterGroup, list[nn.Parameter]],
    rates: dict[str, Tensor],
    width: float,
) -> torch.optim.Optimizer:
    """Make a fused AdamW. The arguments are those of make_engine."""
    groups = []
    for kind, own in members.items():
        group = _describe_group(kind, own, rates)
        group["eps"] = o.adam_eps
        if kind.rate == OF_WIDTH:
            group["eps"] /= width
        groups.append(group)
    engine = torch.optim.AdamW(
        groups,
        lr=rates[USUAL],
        betas=(o.adam_beta1, o.adam_beta2),
        eps=o.adam_eps,
        fused=True,
    )
    # torch would make these in the first step. A checkpoint needs tensors to be read into before it.
    for weight in _list_weights(members):
        state = engine.state[weight]
        state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
        state["exp_avg"] = torch.zeros_like(weight)
        state["exp_avg_sq"] = torch.zeros_like(weight)
    return engine


def _make_sgd(
    o: OptimizerArgs,
    members: dict[ParameterGroup, list[nn.Parameter]],
    rates: dict[str, Tensor],
) -> torch.optim.Optimizer:
    """Make a fused SGD. The arguments are those of make_engine."""
    groups = [_describe_group(kind, own, rates) for kind, own in members.items()]
    engine = torch.optim.SGD(groups, lr=rates[USUAL], momentum=o.sgd_momentum, fused=True)
    if o.sgd_momentum:
        # torch would make these in the first step, and leave them uninitialized where it is skipped; with zeros the
        # first step is the same
        for weight in _list_weights(members):
            engine.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
    return engine


def _describe_group(
    kind: ParameterGroup,
    own: list[nn.Parameter],
    rates: dict[str, Tensor],
) -> dict[str, Any]:
    """Describe a group as torch's optimizers take it; torch keeps "decays" for Optimizer.follow."""
    return {
        "params": own,
        "weight_decay": 0.0,
        "lr": rates[kind.rate],
        "decays": kind.decays,
    }


def _list_weights(members: dict[ParameterGroup, list[nn.Parameter]]) -> list[nn.Parameter]:
    """List the weights of all groups."""
    return [weight for own in members.values() for weight in own]


class MasterWeights:
    """Copies of 16-bit parameters in fp32; an fp32 model's parameters stand for themselves."""

    @mark_memory(MASTER_WEIGHTS)
    def __init__(self, parameters: list[nn.Parameter]):
        self.model = parameters
        self.masters: list[nn.Parameter] = []
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []  # (of the model, its copy)
        for parameter in parameters:
            if parameter.dtype == torch.float32:
                self.masters.append(parameter)
                continue
            master = nn.Parameter(parameter.detach().float())
            self.masters.append(master)
            self._pairs.append((parameter, master))

    @torch.no_grad()
    def attach(self, gradients: Sequence[Tensor | None]) -> None:
        """Make `gradients`, in the order of the parameters, the masters' gradients, in fp32.

        Args:
            gradients: All in one dtype; None for a parameter that the losses do not use.
        """
        masters = []
        used = []
        for master, gradient in zip(self.masters, gradients, strict=True):
            if gradient is not None:
                masters.append(master)
                used.append(gradient)
        wide = used
        if used and used[0].dtype != torch.float32:
            # all at once: a launch takes longer than a GPU needs for a bias
            wide = [torch.empty_like(gradient, dtype=torch.float32) for gradient in used]
            torch._foreach_copy_(wide, used)
        for master, gradient in zip(masters, wide):
            master.grad = gradient

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the masters into the model."""
        if self._pairs:
            model: list[Tensor] = [parameter for parameter, _ in self._pairs]
            masters: list[Tensor] = [master for _, master in self._pairs]
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
class GradientNorms:
    """The L2 norm of each gradient that this rank counts, on the device, where it stays unless a step fails."""

    norms: Tensor  # fp32, one per gradient, which is multiplied by the loss scale
    places: list[int]  # the parameter of each gradient, by its place among this rank's


@dataclass(frozen=True)
class Update:
    """Figures of one step, each a scalar tensor on the device but for `norms`."""

    grad_norm: Tensor  # before clipping, after unscaling
    skipped: Tensor  # bool
    loss_scale: Tensor  # the one that this step ran with
    next_loss_scale: Tensor
    next_lr: Tensor  # the learning rate that the next step is applied with, float64
    norms: GradientNorms  # of which grad_norm is made


class Optimizer:
    """Loss scale, clipping, the update (AdamW, SGD or Muon) and its schedule.

    A step takes gradients and updates the model's parameters.
    """

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
            plan: This rank's plan.
            parameters: The parameters to update, in the run's precision or fp32.
            device: Device of the parameters.
            sum_over_ranks: Sums a scalar over ranks that hold other parts of the parameters; None if this rank has all.
            counted: Whether this rank counts each parameter in that sum, as others hold some of them too; all if None.
            names: Names of the parameters, by which some have a learning rate or weight decay of their own.
            shares: Parameters, by name, of which this rank has some rows.
        """
        self.plan = plan
        self.names = names or [""] * len(parameters)
        self._sum_over_ranks = sum_over_ranks
        self._counted = counted or [True] * len(parameters)
        self.weights = MasterWeights(parameters)
        self.scaler = make_loss_scale(plan.precision, plan.args.precision, device)
        # not torch.zeros: torch's optimizers compare it with 0, and only torch.tensor has a value as a fake tensor, too
        self.lr = torch.tensor(0.0, dtype=torch.float32, device=device)
        self._width = plan.shape.mup_width_mult
        self._members = self._group(self.names)
        # learning rates other than the usual one, which decoupled parameters and those under muP have
        others = {kind.rate for kind in self._members} - {USUAL}
        self._other_lrs: dict[str, Tensor] = {}
        for rate in sorted(others):
            self._other_lrs[rate] = torch.tensor(0.0, dtype=torch.float32, device=device)
        self.engine = make_engine(
            plan.args.optimizer,
            self._members,
            {USUAL: self.lr, **self._other_lrs},
            self._width,
            self._compose(names or [], shares),
        )
        self.good_samples = torch.zeros((), dtype=torch.int64, device=device)
        self.stopped = torch.zeros((), dtype=torch.bool, device=device)
        self._one = torch.ones((), dtype=torch.float32, device=device)
        self.follow(plan.learning_rate)

    def _group(self, names: list[str]) -> dict[ParameterGroup, list[nn.Parameter]]:
        """The weights of each group that has any."""
        optimizer = self.plan.args.optimizer
        members: dict[ParameterGroup, list[nn.Parameter]] = {kind: [] for kind in GROUPS}
        for name, master in zip(names, self.weights.masters, strict=True):
            kind = find_group(name, master.ndim, optimizer, self._width)
            members[kind].append(master)
        return {kind: own for kind, own in members.items() if own}

    def _compose(self, names: list[str], shares: Mapping[str, RowShare]) -> dict[nn.Parameter, Composition]:
        """The matrices of which parameters are made, as Muon takes them apart; those of one whole matrix are left out.

        Args:
            names: Names of the parameters, or of none.
            shares: Parameters, by name, of which this rank has some rows.
        """
        shape = self.plan.shape
        experts = self.plan.rank_shape.experts
        heads_per_group = shape.num_attention_heads // shape.num_query_groups
        queries = heads_per_group * shape.kv_channels
        rows_of_group = (queries, shape.kv_channels, shape.kv_channels)
        splits = self.plan.args.optimizer.muon_split_qkv
        found = {}
        for name, master in zip(names, self.weights.masters):
            is_fused = splits and name.endswith("linear_qkv.weight")
            is_expert = experts is not None and is_of_experts(name)
            composition = Composition(
                experts=experts.local_number if experts is not None and is_expert else 1,
                fused=rows_of_group if is_fused else None,
                share=shares.get(name),
            )
            if composition != Composition():
                found[master] = composition
        return found

    def follow(self, schedule: LearningRatePlan) -> None:
        """Take learning rate and weight decay from `schedule`."""
        self.schedule = schedule
        o = self.plan.args.optimizer
        schedules = {
            OWN: schedule.decouple(o),
            OF_WIDTH: schedule.scale_to_width(o, self._width),
        }
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
        self,
        gradients: Sequence[Tensor | None],
        samples: int,
        phase: BeginPhase,
        divisor: Tensor | None = None,
    ) -> Update:
        """Update the model from scaled `gradients`.

        An overflow skips the step (with a loss scale). A NaN or Inf without one stops all further steps, so that the
        weights stay good until the host has noticed.

        Args:
            gradients: Gradients in the order and shapes of the parameters, averaged over ranks and multiplied by the
                loss scale; None for a parameter that the losses do not use.
            samples: Samples in the global batch.
            phase: Opened around each part of the step.
            divisor: A further scalar to divide gradients by.
        """
        with phase(Phase.UNSCALE):
            scale = self.loss_scale.clone()
            divide_by = scale if divisor is None else scale * divisor
            self.weights.attach(gradients)
        with phase(Phase.CLIP_GRAD):
            norms = self._measure_norms(gradients)
            norm = self._combine_norms(norms.norms) / divide_by
            skipped = self._decide_to_skip(norm)
            max_norm = self.plan.args.optimizer.clip_grad
            if max_norm:
                coefficient = (max_norm / (norm + NORM_EPSILON)).clamp(max=1.0)
                divide_by = divide_by / coefficient
        with phase(Phase.OPTIMIZER_STEP):
            if self._decay_changes:
                self._decay(skipped, divide_by)
            self._update_masters(skipped, divide_by)
            self.weights.write_back()
            for master in self.weights.masters:  # fp32 copies of gradients must not live through the next forward
                master.grad = None
            if self.scaler is not None:
                self.scaler.update(skipped)
            self.good_samples += (~skipped).long() * samples
            return Update(
                grad_norm=norm,
                skipped=skipped,
                loss_scale=scale,
                next_loss_scale=self.loss_scale.clone(),
                next_lr=self._set_rates(),
                norms=norms,
            )

    def _decide_to_skip(self, norm: Tensor) -> Tensor:
        """Whether the step changes nothing: a bool on the device. norm: of the gradients, an fp32 scalar."""
        if self.scaler is not None:
            return ~torch.isfinite(norm)
        if self.plan.args.precision.check_for_nan_in_loss_and_grad:
            self.stopped |= ~torch.isfinite(norm)
        return self.stopped.clone()

    def _update_masters(self, skipped: Tensor, divide_by: Tensor) -> None:
        """Have torch update the masters, or nothing after an overflow.

        Args:
            skipped: Whether the step changes nothing, a bool on the device.
            divide_by: The fp32 scalar that gradients are divided by.
        """
        # the attributes that torch's GradScaler sets on fused optimizers
        factors = {
            "grad_scale": torch.where(skipped, self._one, divide_by),
            "found_inf": skipped.float(),
        }
        for name, factor in factors.items():
            setattr(self.engine, name, factor)
        self.engine.step()
        for name in factors:
            delattr(self.engine, name)

    @torch.no_grad()
    def measure_norm(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """L2 norm of gradients or parameters, over all ranks that have parts of them; an fp32 scalar on the device."""
        return self._combine_norms(self._measure_norms(tensors).norms)

    def _measure_norms(self, tensors: Sequence[Tensor | None]) -> GradientNorms:
        """Measure the norm of each tensor that this rank counts. tensors: one per parameter, or None."""
        counted = self._select(tensors)
        places = list(counted)
        if not counted:
            return GradientNorms(self._one.new_zeros(0), places)
        norms = torch._foreach_norm(list(counted.values()), 2, torch.float32)
        return GradientNorms(torch.stack(norms), places)

    def _combine_norms(self, norms: Tensor) -> Tensor:
        """Combine the norms of single tensors to that of all of them, over all ranks that have parts; fp32 scalar."""
        norm: Tensor = torch.linalg.vector_norm(norms)
        if self._sum_over_ranks is None:
            return norm
        return self._sum_over_ranks(norm.square()).sqrt()

    @torch.no_grad()
    def count_zeros(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Elements that are 0, over all ranks; an fp32 scalar on the device."""
        zeros = torch.zeros_like(self._one)  # of a rank that counts none
        counts = [(gradient == 0).sum() for gradient in self._select(gradients).values()]
        if counts:
            # whole numbers, which fp32 would round beyond 2^24 with each addition
            zeros = torch.stack(counts).sum().float()
        if self._sum_over_ranks is None:
            return zeros
        return self._sum_over_ranks(zeros)

    def _select(self, tensors: Sequence[Tensor | None]) -> dict[int, Tensor]:
        """The tensors, of one per parameter, that this rank counts, by the parameter's place.

        A parameter that the losses do not use has no gradient.
        """
        selected = {}
        for place, (tensor, counts) in enumerate(zip(tensors, self._counted, strict=True)):
            if counts and tensor is not None:
                selected[place] = tensor
        return selected

    def _set_rates(self) -> Tensor:
        """Set the rates of the step that starts after the good samples so far. Returns the learning rate."""
        rate = compute_learning_rates(self.schedule, self.good_samples)
        self.lr.copy_(rate)
        for name, schedule in self._other_schedules.items():
            other = compute_learning_rates(schedule, self.good_samples)
            self._other_lrs[name].copy_(other)
        return rate

    def _decay(self, skipped: Tensor, divide_by: Tensor) -> None:
        """Apply a weight decay that changes, before the update. The arguments are those of _update_masters."""
        is_sgd = self.plan.args.optimizer.optimizer == "sgd"
        decay = compute_weight_decays(self.schedule, self.good_samples).float()
        for group in self.engine.param_groups:
            # as torch does with a constant decay: a weight without a gradient stays as it is
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if not group["decays"] or not weights:
                continue
            if is_sgd:  # the decay is part of the gradient, and goes through the momentum
                values = [weight.detach() for weight in weights]
                gradients = [weight.grad for weight in weights]
                scaled = torch._foreach_mul(values, decay * divide_by)
                torch._foreach_add_(gradients, scaled)
            else:
                keep = 1 - group["lr"] * decay
                torch._foreach_mul_(weights, torch.where(skipped, self._one, keep))

    def tensors(self, names: list[str]) -> dict[str, Tensor]:
        """All that the next step depends on besides the model, under checkpoint.record's flat names.

        The tensors are the live ones: what is copied into them counts after `resume`.

        Args:
            names: Names of the parameters, in their order.
        """
        found = {"optimizer.good_samples": self.good_samples}
        for name, parameter, master in zip(names, self.weights.model, self.weights.masters, strict=True):
            if self.plan.precision != "fp32":
                found[f"optimizer.{name}.master"] = master.detach()
            for key, value in self.engine.state[master].items():
                found[f"optimizer.{name}.{key}"] = value
        if self.scaler is not None:
            for key, value in self.scaler.tensors().items():
                found[f"loss_scale.{key}"] = value
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

    def __init__(
        self,
        initial: float,
        minimum: float,
        window: int,
        hysteresis: int,
        device: torch.device,
    ):
        """
        Args:
            initial: The scale of the first step.
            minimum: Halving stops at it.
            window: Steps without overflow after which the scale doubles.
            hysteresis: Overflows that are let pass before the scale is halved, one per step.
            device: Device of the parameters.
        """
        super().__init__(initial, device)
        self.minimum = minimum
        self.window = window
        self.hysteresis = hysteresis
        self.growth_tracker = torch.zeros((), dtype=torch.int32, device=device)
        self.hysteresis_tracker = torch.full((), hysteresis, dtype=torch.int32, device=device)

    def update(self, overflow: Tensor) -> None:
        one_more = self.growth_tracker + 1
        clean_steps = torch.where(overflow, 0, one_more)
        one_less = self.hysteresis_tracker - 1
        left = torch.where(overflow, one_less, self.hysteresis_tracker)
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
    """Make the loss scale of a run.

    Args:
        precision: fp32, fp16 or bf16.
        p: The flags of precision.
        device: Where the scale is computed.

    Returns:
        None where gradients need no scale: in fp32, and in bf16 without --loss-scale.
    """
    if precision == "fp32":
        return None
    if p.loss_scale:  # 0 is Megatron's word for a dynamic one
        return LossScale(p.loss_scale, device)
    if precision == "bf16":
        return None
    return DynamicLossScale(
        initial=p.initial_loss_scale,
        minimum=p.min_loss_scale,
        window=int(p.loss_scale_window),
        hysteresis=p.hysteresis,
        device=device,
    )


# --- the schedule of Megatron-LM 0.16, by samples of successful steps, on the device where their number is


def compute_learning_rates(plan: LearningRatePlan, samples: Tensor) -> Tensor:
    """Learning rate of the step that starts after `samples` successfully consumed samples; float64, same shape."""
    samples = torch.as_tensor(samples, dtype=torch.float64)
    warming = (samples <= plan.warmup_samples) & (plan.warmup_samples > 0)
    rise = plan.peak - plan.init
    warm = plan.init + rise * samples / (plan.warmup_samples or 1)
    if plan.style == "constant":
        return torch.where(warming, warm, plan.peak)
    if plan.style == "inverse-square-root":
        warmup = max(plan.warmup_samples, 1)
        done = samples.clamp(min=1)
        rate = plan.peak * math.sqrt(warmup) / done.sqrt()
        rate = rate.clamp(min=plan.floor)
    else:
        fall = plan.peak - plan.floor
        rate = plan.floor + fall * _compute_remaining(plan, samples)
    is_over = samples > plan.decay_samples
    later = torch.where(is_over, plan.floor, rate)
    return torch.where(warming, warm, later)


def _compute_remaining(plan: LearningRatePlan, samples: Tensor) -> Tensor:
    """Share of (peak - floor) that is left: 1 after the warm-up, 0 at the end of the decay."""
    if plan.style == "WSD":
        return _compute_remaining_of_wsd(plan, samples)
    span = plan.decay_samples - plan.warmup_samples
    done = (samples - plan.warmup_samples) / (span or 1)
    done = done.clamp(0, 1)
    if plan.style == "linear":
        return 1 - done
    return _cosine(done)


def _compute_remaining_of_wsd(plan: LearningRatePlan, samples: Tensor) -> Tensor:
    """Share of (peak - floor) that is left by warm-up, stable, decay: all of it until the last wsd_samples."""
    start = plan.decay_samples - plan.wsd_samples
    done = (samples - start) / max(plan.wsd_samples, 1)
    done = done.clamp(0, 1)
    if plan.wsd_style == "linear":
        left = 1 - done
    elif plan.wsd_style == "cosine":
        left = _cosine(done)
    elif plan.wsd_style == "exponential":
        left = 2 * 0.5**done - 1
    else:  # minus_sqrt
        left = 1 - done.sqrt()
    return torch.where(samples <= start, 1.0, left)


def compute_weight_decays(plan: LearningRatePlan, samples: Tensor) -> Tensor:
    """Weight decay of the step that starts after `samples` samples; float64, same shape.

    It is constant, or grows over the whole training.
    """
    samples = torch.as_tensor(samples, dtype=torch.float64)
    if plan.weight_decay_style == "constant":
        return torch.full_like(samples, plan.end_weight_decay)
    done = samples / max(plan.weight_decay_samples, 1)
    done = done.clamp(max=1)
    grown = done if plan.weight_decay_style == "linear" else _cosine(1 - done)
    growth = plan.end_weight_decay - plan.start_weight_decay
    return plan.start_weight_decay + growth * grown


def _cosine(done: Tensor) -> Tensor:
    """Half a cosine wave, from 1 to 0 while `done` goes from 0 to 1."""
    wave = torch.cos(math.pi * done)  # from 1 to -1
    return 0.5 * (wave + 1)
