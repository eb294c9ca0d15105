"""Megatron's optimizer state, which numbers its parameters by group, and our flat names.

Sources: megatron/core/optimizer of Megatron-Core 0.16.1: _get_param_groups in __init__.py; state_dict and
load_state_dict of Float16OptimizerWithFloat16Params and FP32Optimizer in optimizer.py; grad_scaler.py.
"""

import itertools
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from megatron_lite.checkpoint import unpickle
from megatron_lite.checkpoint.megatron_args import MegatronArgs
from megatron_lite.checkpoint.megatron_state import GradScaler, OptimizerState, Parameter, ParameterSettings
from megatron_lite.checkpoint.training_state import CheckpointRecord
from megatron_lite.config.args import OptimizerArgs
from megatron_lite.config.parameter_groups import (
    EMBEDDING_AND_OUTPUT,
    EMBEDDINGS,
    NORMS_OF_HEADS,
    OF_WIDTH,
    OWN,
    USUAL,
    ParameterGroup,
    find_group,
    list_groups,
)
from megatron_lite.errors import CheckpointError

Take = Callable[[str], Tensor | None]
COUNTERS: Final = ("growth_tracker", "hysteresis_tracker")
SHARDING = "fully_reshardable"  # of the distributed optimizer: a tensor for each parameter, in its shape


class Unmapped(Exception):
    """Why the state cannot be told by names."""


def read_optimizer(optimizer: OptimizerState, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The flat tensors of the optimizer, without its loss scale.

    Args:
        optimizer: State of the optimizer, as the file has it.
        weights: Weights by our names, in the file's order.

    Raises:
        Unmapped: Its numbers of parameters do not fit these weights.
    """
    inner = optimizer.get("optimizer", optimizer)
    groups = inner["param_groups"]
    state = inner["state"]
    masters = optimizer.get("fp32_from_fp16_params") or [[]] * len(groups)
    common_step = state.get("common_step")
    found: dict[str, Tensor] = {}
    for names, group, group_masters in zip(_members(groups, state, weights), groups, masters, strict=True):
        halves = [name for name in names if weights[name].dtype != torch.float32]
        for name, master in zip(halves, group_masters):
            found[f"optimizer.{name}.master"] = master.detach()
        # Transformer Engine and Apex count a group's steps, torch those of each parameter
        group_step = group.get("step", common_step)
        for name, number in zip(names, group["params"]):
            entry = _read_parameter(state, number)
            step = entry.pop("step", group_step)
            if step is not None and "exp_avg" in entry:
                entry["step"] = torch.as_tensor(step, dtype=torch.float32).reshape(())
            for key, value in entry.items():
                if isinstance(value, Tensor):
                    kind = "master" if key == "master_param" else key
                    found[f"optimizer.{name}.{kind}"] = value
    return found


def _read_parameter(state: dict[int | str, Parameter | Tensor], number: int) -> Parameter:
    """A copy of the state of one parameter; empty where there is none. TypeError for what is no dict."""
    entry = state.get(number, {})
    if isinstance(entry, Tensor):
        raise TypeError(f"the state of parameter {number} is a tensor")
    return dict(entry)


def _is_hidden(name: str, weight: Tensor) -> bool:
    """Whether both sizes of a matrix grow with the model's width."""
    return weight.ndim > 1 and not name.startswith(EMBEDDINGS)


# which parameters may have a learning rate of their own: by --decoupled-lr, or by --use-mup with Adam or SGD
OWN_RATES: Final[tuple[Callable[[str, Tensor], bool], ...]] = (
    lambda name, weight: name in EMBEDDING_AND_OUTPUT,
    _is_hidden,
    lambda name, weight: not _is_hidden(name, weight),
)


def _members(
    groups: list[ParameterSettings], state: dict[int | str, Parameter | Tensor], weights: dict[str, Tensor]
) -> list[list[str]]:
    """The names of each group's parameters: those that its settings select, in order.

    Raises Unmapped unless the shapes of all their states agree.
    """
    # Megatron-Core 0.16 no longer says so by that name
    separate = [bool(group.get("is_decoupled_lr")) or not group.get("default_config", True) for group in groups]
    # the second norms: --apply-wd-to-qk-layernorm
    for decaying_norms, has_own_rate in itertools.product(((), NORMS_OF_HEADS), OWN_RATES):
        kinds: dict[str, tuple[bool, bool]] = {}  # (decays, has a learning rate of its own) by name
        for name, weight in weights.items():
            decays = weight.ndim > 1 or any(norm in name for norm in decaying_norms)
            kinds[name] = (decays, any(separate) and has_own_rate(name, weight))
        members: list[list[str]] = []
        for group, is_separate in zip(groups, separate):
            selected = (_decays(group), is_separate)
            members.append([name for name, kind in kinds.items() if kind == selected])
        if all(_fits(names, group, state, weights) for names, group in zip(members, groups)):
            return members
    raise Unmapped("numbers its parameters in an order that does not fit these weights")


def _decays(group: ParameterSettings) -> bool:
    """Whether the weights of a group decay, which its settings say under one name or another."""
    if "wd_mult" in group:
        return bool(group["wd_mult"])
    return bool(group.get("pre_wd_mult", group.get("weight_decay")))


def _fits(
    names: list[str],
    group: ParameterSettings,
    state: dict[int | str, Parameter | Tensor],
    weights: dict[str, Tensor],
) -> bool:
    """Whether a group has as many parameters as there are names, each with a state of its weight's shape."""
    if len(names) != len(group["params"]):
        return False
    for name, number in zip(names, group["params"]):
        for key, value in _read_parameter(state, number).items():
            if isinstance(value, Tensor) and key != "step" and value.shape != weights[name].shape:
                return False
    return True


def read_loss_scale(optimizer: OptimizerState) -> dict[str, Tensor]:
    """The flat tensors of a dynamic loss scale; a constant one has no state."""
    scaler = optimizer.get("grad_scaler", GradScaler())
    found: dict[str, Tensor] = {}
    for key in COUNTERS:
        if key in scaler:
            found[f"loss_scale.{key}"] = torch.tensor(scaler[key], dtype=torch.int32)
    if "scale" in scaler:
        found["loss_scale.scale"] = scaler["scale"].float().reshape(())
    return found


def write_optimizer(
    weights: dict[str, Tensor],
    take: Take,
    settings: ParameterSettings,
    fused: bool,
    o: OptimizerArgs,
    width: float = 1.0,
) -> OptimizerState:
    """Make the state that Megatron's optimizer loads.

    Args:
        weights: Weights by our names, in Megatron's order.
        take: Gives a flat name's tensor, or None.
        settings: Settings of a parameter group, from group_settings.
        fused: Whether Transformer Engine's Adam is to read it, which counts steps per group and stumbles over a count
            per parameter. torch's insists on the latter.
        o: The optimizer's flags.
        width: ModelShape.mup_width_mult.
    """
    groups: list[ParameterSettings] = []
    state: dict[int | str, Parameter | Tensor] = {}
    masters: list[list[Tensor]] = []
    first = 0  # number of the group's first parameter
    for kind in list_groups(o, width):
        members = [name for name, weight in weights.items() if find_group(name, weight.ndim, o, width) == kind]
        entries = [_take_parameter(name, take) for name in members]
        group = _group(settings, kind, o, width)
        group["params"] = list(range(first, first + len(members)))
        steps = {float(entry["step"]) for entry in entries if "step" in entry}
        if steps:
            group["step"] = int(max(steps))
        for number, entry in zip(group["params"], entries):
            if fused:
                entry.pop("step", None)
            if entry:
                state[number] = entry
        own_masters = [take(f"optimizer.{name}.master") for name in members]
        masters.append([master for master in own_masters if master is not None])
        groups.append(group)
        first += len(members)
    inner: OptimizerState = {"state": state, "param_groups": groups}
    if all(weight.dtype == torch.float32 for weight in weights.values()):
        return inner
    written: OptimizerState = {"optimizer": inner, "fp32_from_fp16_params": masters}
    _put_grad_scaler(written, take)
    return written


def _take_parameter(name: str, take: Take) -> Parameter:
    """The state of one parameter, by kind, without its master."""
    entry: Parameter = {}
    for key in ("step", "exp_avg", "exp_avg_sq", "momentum_buffer"):
        value = take(f"optimizer.{name}.{key}")
        if value is not None:
            entry[key] = value
    return entry


def write_settings(
    step: float | None,
    take: Take,
    settings: ParameterSettings,
    fused: bool,
    o: OptimizerArgs,
    width: float = 1.0,
) -> OptimizerState:
    """Make what stands of an optimizer in a torch_dist folder's common.pt: all but its tensors.

    Megatron's optimizer for fp32, that for halves and the distributed one each find their own part in it.

    Args:
        step: How many the optimizer has made; None if it does not count them.
        take: Gives a flat name's tensor, or None.
        settings: Settings of a parameter group, from group_settings.
        fused: Whether Transformer Engine's Adam is to read it, as for write_optimizer.
        o: The optimizer's flags.
        width: ModelShape.mup_width_mult.
    """
    groups = [_group(settings, kind, o, width) for kind in list_groups(o, width)]
    if step is not None:
        for group in groups:
            group["step"] = int(step)
    inner: OptimizerState = {"param_groups": groups}
    if step is not None and not fused:
        inner["state"] = {"common_step": torch.tensor(float(step))}
    written = inner.copy()
    written["optimizer"] = inner
    written["param_state_sharding_type"] = SHARDING
    _put_grad_scaler(written, take)
    return written


def read_settings(optimizer: OptimizerState, names: Iterable[str], where: str = "") -> dict[str, Tensor]:
    """The inverse of `write_settings`: what the optimizer holds besides tensors of the weights' shapes.

    Args:
        optimizer: State of the optimizer, as the file has it.
        names: Names of its parameters.
        where: Names the place where it is stored, at the beginning of the exception's text.

    Returns:
        Flat tensors: the steps of each parameter, and the loss scale.

    Raises:
        Unmapped: Its groups have made different numbers of steps.
    """
    inner = optimizer.get("optimizer", optimizer)
    counts: list[float | Tensor | Parameter | None] = [group.get("step") for group in inner["param_groups"]]
    counts.append(inner.get("state", {}).get("common_step"))
    steps = {_read_count(count) for count in counts if count is not None}
    if len(steps) > 1:
        raise Unmapped(f"{where}has made {sorted(map(int, steps))} steps, not one number of them")
    found = {f"optimizer.{name}.step": torch.tensor(step) for step in steps for name in names}
    return found | read_loss_scale(optimizer)


def _read_count(count: float | Tensor | Parameter) -> float:
    """A number of steps. TypeError for a dict in its place."""
    if isinstance(count, dict):
        raise TypeError("a number of steps is a dict")
    return float(count)


def group_settings(args: Namespace, record: CheckpointRecord) -> ParameterSettings:
    """The settings of a parameter group that decays.

    Megatron's scheduler sets lr and weight_decay anew when it loads its own state.
    """
    settings: ParameterSettings
    if record.optimizer != "sgd":
        settings = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_eps, "bias_correction": True}
    else:
        settings = {"momentum": args.sgd_momentum, "dampening": 0, "nesterov": False}
    schedule = record.learning_rate
    settings["lr"] = schedule.peak if schedule else args.lr
    settings["max_lr"] = schedule.peak if schedule else args.lr
    settings["min_lr"] = schedule.floor if schedule else args.min_lr
    settings["weight_decay"] = schedule.start_weight_decay if schedule else args.weight_decay
    settings["wd_mult"] = 1.0
    settings["lr_mult"] = 1.0
    settings["is_decoupled_lr"] = False
    settings["is_expert_parallel"] = False
    settings["default_config"] = True
    return settings


def read_group_flags(args: Namespace) -> OptimizerArgs:
    """The flags that decide which parameters are a group."""
    return OptimizerArgs(
        decoupled_lr=getattr(args, "decoupled_lr", None),
        decoupled_min_lr=getattr(args, "decoupled_min_lr", None),
        apply_wd_to_qk_layernorm=getattr(args, "apply_wd_to_qk_layernorm", False),
        optimizer=getattr(args, "optimizer", "adam"),
    )


def _group(settings: ParameterSettings, kind: ParameterGroup, o: OptimizerArgs, width: float) -> ParameterSettings:
    """The settings of one of the groups, made from those of a group that decays."""
    group = settings.copy()
    if not kind.decays:
        group["weight_decay"] = 0.0
        group["wd_mult"] = 0.0
    if kind.rate == OWN and o.decoupled_lr is not None:
        group["lr"] = o.decoupled_lr
        group["max_lr"] = o.decoupled_lr
        group["min_lr"] = settings["min_lr"] if o.decoupled_min_lr is None else o.decoupled_min_lr
    if kind.rate == OF_WIDTH:
        factor = width if o.optimizer == "sgd" else 1 / width
        for rate in ("lr", "max_lr", "min_lr"):
            group[rate] = settings[rate] * factor
        if "eps" in settings:
            group["eps"] = settings["eps"] * factor
    group["default_config"] = kind.rate == USUAL
    return group


def _put_grad_scaler(optimizer: OptimizerState, take: Take) -> None:
    """Add the state of a dynamic loss scale, if there is one."""
    scale = take("loss_scale.scale")
    if scale is None:
        return
    scaler: GradScaler = {"scale": scale.reshape(1)}
    for key in COUNTERS:
        count = take(f"loss_scale.{key}")
        if count is None:
            raise KeyError(f"loss_scale.{key}")
        scaler[key] = int(count)
    optimizer["grad_scaler"] = scaler


# --- distrib_optim.pt, where Megatron's distributed optimizer keeps masters and moments in one flat buffer each

FILE = "distrib_optim.pt"
PARAMETER_ALIGNMENT = 64  # elements, of a parameter's start
KEYS = {"param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


def read_buffers(
    path: Path, optimizer: OptimizerState, weights: dict[str, Tensor], args: MegatronArgs
) -> dict[str, Tensor]:
    """The flat tensors of masters and moments.

    That the layout is understood is proved by the weights: each must be its master, rounded.

    Args:
        path: Path of the file.
        optimizer: What the checkpoint's other file has of it.
        weights: Weights by our names, in the file's order.
        args: Megatron's arguments, with which the checkpoint was trained.

    Raises:
        Unmapped: The file is missing, damaged, or laid out in a way that is not known.
    """
    if not path.exists():
        raise Unmapped(f"lies in {FILE} (--use-distributed-optimizer), which is not there")
    try:
        state = unpickle.load_object(path)
    except CheckpointError:
        state = None
    if not isinstance(state, dict):
        raise Unmapped(f"in {FILE} cannot be read; it is damaged, or names classes that are not known")
    by_dtype = [value for value in state.values() if isinstance(value, dict)]
    if len(by_dtype) != 1 or len(by_dtype[0]) != 1 or not state.get("buckets_coalesced"):
        raise Unmapped(f"in {FILE} is of several kinds of parameters, or from before February 2024")
    buffers: dict[str, Tensor]
    (buffers,) = by_dtype[0].values()
    sizes = {name: weight.numel() for name, weight in weights.items()}
    for bucket_size in bucket_sizes(args):
        starts, total = layout(sizes, bucket_size)
        if total != buffers["param"].numel():
            continue
        found = _cut_buffers(buffers, starts, weights)
        if not all(_is_rounded(found[f"optimizer.{name}.master"], weight) for name, weight in weights.items()):
            continue
        for name, weight in weights.items():
            if weight.dtype == torch.float32:
                del found[f"optimizer.{name}.master"]  # the weight itself
        return found | read_settings(optimizer, weights, f"in {FILE} ")
    raise Unmapped(f"in {FILE} is laid out in a way that does not fit these weights")


def _cut_buffers(buffers: dict[str, Tensor], starts: dict[str, int], weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The flat tensors of masters and moments, views of the buffers, where each parameter starts at `starts`."""
    found: dict[str, Tensor] = {}
    for name, weight in weights.items():
        start = starts[name]
        for theirs, ours in KEYS.items():
            numbers = buffers[theirs][start : start + weight.numel()]
            found[f"optimizer.{name}.{ours}"] = numbers.view(weight.shape)
    return found


def _is_rounded(master: Tensor, weight: Tensor) -> bool:
    """Whether a weight is its master in the weight's precision."""
    return torch.equal(master.to(weight.dtype), weight)


def layout(sizes: dict[str, int], bucket_size: int | None) -> tuple[dict[str, int], int]:
    """Lay parameters out in flat buckets, from the last one to the first, bucket after bucket.

    Args:
        sizes: Elements of each parameter, in the order of the model.
        bucket_size: Elements after which a bucket is closed; None: there is one.

    Returns:
        The first element of each parameter, and the elements in all.
    """
    starts: dict[str, int] = {}
    bucket = 0  # where the current one starts
    end = 0  # in the current bucket
    for name in reversed(sizes):
        start = -(-end // PARAMETER_ALIGNMENT) * PARAMETER_ALIGNMENT
        starts[name] = bucket + start
        end = start + sizes[name]
        if bucket_size is not None and end >= bucket_size:
            bucket += end
            end = 0
    return starts, bucket + end


def bucket_sizes(args: MegatronArgs) -> Sequence[int | None]:
    """Sizes to try, in elements: one bucket, or those of --overlap-grad-reduce."""
    ranks = args.given("data_parallel_size", 1) * args.given("context_parallel_size", 1)
    return [None, args.given("ddp_bucket_size", max(40_000_000, 1_000_000 * ranks))]
