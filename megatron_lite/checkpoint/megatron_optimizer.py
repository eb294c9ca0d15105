"""Megatron's optimizer state, which numbers its parameters by group, and our flat names.

Sources: megatron/core/optimizer of Megatron-Core 0.16.1: _get_param_groups in __init__.py; state_dict and
load_state_dict of Float16OptimizerWithFloat16Params and FP32Optimizer in optimizer.py; grad_scaler.py.
"""

from argparse import Namespace
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from megatron_lite.checkpoint import unpickle
from megatron_lite.checkpoint.megatron_args import MegatronArgs
from megatron_lite.checkpoint.training_state import CheckpointRecord
from megatron_lite.config.args import OptimizerArgs
from megatron_lite.config.parameter_groups import (
    EMBEDDING_AND_OUTPUT,
    GROUPS,
    NORMS_OF_HEADS,
    ParameterGroup,
    find_group,
)
from megatron_lite.errors import CheckpointError

Take = Callable[[str], Tensor | None]
COUNTERS = ("growth_tracker", "hysteresis_tracker")
SHARDING = "fully_reshardable"  # of the distributed optimizer: a tensor for each parameter, in its shape


class Unmapped(Exception):
    """Why the state cannot be told by names."""


def read_optimizer(optimizer: dict, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The flat tensors of the optimizer, without its loss scale. weights: by our names, in the file's order.

    Raises Unmapped.
    """
    inner = optimizer.get("optimizer", optimizer)
    groups, state = inner["param_groups"], inner["state"]
    masters = optimizer.get("fp32_from_fp16_params") or [[]] * len(groups)
    found = {}
    for names, group, group_masters in zip(_members(groups, state, weights), groups, masters, strict=True):
        halves = [name for name in names if weights[name].dtype != torch.float32]
        found |= {f"optimizer.{name}.master": master.detach() for name, master in zip(halves, group_masters)}
        for name, number in zip(names, group["params"]):
            entry = dict(state.get(number, {}))
            step = entry.pop(
                "step", group.get("step", state.get("common_step"))
            )  # Transformer Engine, Apex: the group's
            if step is not None and "exp_avg" in entry:
                entry["step"] = torch.as_tensor(step, dtype=torch.float32).reshape(())
            for key, value in entry.items():
                if isinstance(value, Tensor):
                    found[f"optimizer.{name}.{'master' if key == 'master_param' else key}"] = value
    return found


def _members(groups: list[dict], state: dict, weights: dict[str, Tensor]) -> list[list[str]]:
    """The names of each group's parameters: those that its settings select, in order, if all shapes agree."""
    # Megatron-Core 0.16 no longer says so by that name
    separate = [bool(group.get("is_decoupled_lr")) or not group.get("default_config", True) for group in groups]
    for decaying_norms in ((), NORMS_OF_HEADS):  # the second: --apply-wd-to-qk-layernorm
        kinds = {}  # (decays, has a learning rate of its own) by name
        for name, weight in weights.items():
            decays = weight.ndim > 1 or any(norm in name for norm in decaying_norms)
            kinds[name] = (decays, any(separate) and name in EMBEDDING_AND_OUTPUT)
        members = []
        for group, is_separate in zip(groups, separate):
            decay = group["wd_mult"] if "wd_mult" in group else group.get("pre_wd_mult", group.get("weight_decay"))
            selected = bool(decay), is_separate
            members.append([name for name, kind in kinds.items() if kind == selected])
        fits = all(len(names) == len(group["params"]) for names, group in zip(members, groups))
        fits = fits and all(
            value.shape == weights[name].shape
            for names, group in zip(members, groups)
            for name, number in zip(names, group["params"])
            for key, value in state.get(number, {}).items()
            if isinstance(value, Tensor) and key != "step"
        )
        if fits:
            return members
    raise Unmapped("numbers its parameters in an order that does not fit these weights")


def read_loss_scale(optimizer: dict) -> dict[str, Tensor]:
    """The flat tensors of a dynamic loss scale; a constant one has no state."""
    scaler = optimizer.get("grad_scaler", {})
    found = {f"loss_scale.{key}": torch.tensor(scaler[key], dtype=torch.int32) for key in COUNTERS if key in scaler}
    if "scale" in scaler:
        found["loss_scale.scale"] = scaler["scale"].float().reshape(())
    return found


def write_optimizer(weights: dict[str, Tensor], take: Take, settings: dict, fused: bool, o: OptimizerArgs) -> dict:
    """What Megatron's optimizer loads.

    Args:
        weights: By our names, in Megatron's order.
        take: Gives a flat name's tensor, or None.
        settings: Of a parameter group, from group_settings.
        fused: For Transformer Engine's Adam, which counts steps per group and stumbles over a count per parameter;
            torch's insists on the latter.
        o: The optimizer's flags.
    """
    groups, state, masters, first = [], {}, [], 0
    for kind in _list_groups(o):
        members = [name for name, weight in weights.items() if find_group(name, weight.ndim, o) == kind]
        group = _group(settings, kind, o) | {"params": list(range(first, first + len(members)))}
        keys = ("step", "exp_avg", "exp_avg_sq", "momentum_buffer")
        held = [{key: take(f"optimizer.{name}.{key}") for key in keys} for name in members]
        entries = [{key: value for key, value in entry.items() if value is not None} for entry in held]
        steps = {float(entry["step"]) for entry in entries if "step" in entry}
        if steps:
            group["step"] = int(max(steps))
        for entry in entries if fused else ():
            entry.pop("step", None)
        state |= {number: entry for number, entry in zip(group["params"], entries) if entry}
        masters.append([master for name in members if (master := take(f"optimizer.{name}.master")) is not None])
        groups.append(group)
        first += len(members)
    inner = {"state": state, "param_groups": groups}
    if all(weight.dtype == torch.float32 for weight in weights.values()):
        return inner
    return {"optimizer": inner, "fp32_from_fp16_params": masters} | _grad_scaler(take)


def write_settings(step: float | None, take: Take, settings: dict, fused: bool, o: OptimizerArgs) -> dict:
    """What stands of an optimizer in a torch_dist folder's common.pt: all but its tensors.

    Megatron's optimizer for fp32, that for halves and the distributed one each find their own part in it.
    """
    counted = {} if step is None else {"step": int(step)}
    inner = {"param_groups": [_group(settings, kind, o) | counted for kind in _list_groups(o)]}
    if step is not None and not fused:
        inner["state"] = {"common_step": torch.tensor(float(step))}
    return inner | {"optimizer": inner, "param_state_sharding_type": SHARDING} | _grad_scaler(take)


def read_settings(optimizer: dict, names: Iterable[str], where: str = "") -> dict[str, Tensor]:
    """The inverse: the flat tensors of the optimizer that are no tensors there. names: of its parameters. Raises
    Unmapped.

    where: it is stored, for that exception.
    """
    inner = optimizer.get("optimizer", optimizer)
    counts = [group.get("step") for group in inner["param_groups"]] + [inner.get("state", {}).get("common_step")]
    steps = {float(count) for count in counts if count is not None}
    if len(steps) > 1:
        raise Unmapped(f"{where}has made {sorted(map(int, steps))} steps, not one number of them")
    return {f"optimizer.{name}.step": torch.tensor(step) for step in steps for name in names} | read_loss_scale(
        optimizer
    )


def group_settings(args: Namespace, record: CheckpointRecord) -> dict:
    """Of a parameter group that decays.

    Megatron's scheduler sets lr and weight_decay anew when it loads its own state.
    """
    adam = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_eps, "bias_correction": True}
    sgd = {"momentum": args.sgd_momentum, "dampening": 0, "nesterov": False}
    schedule = record.schedule
    peak = schedule["peak"] if schedule else args.lr
    return (adam if record.optimizer == "adam" else sgd) | {
        "lr": peak,
        "max_lr": peak,
        "min_lr": schedule["floor"] if schedule else args.min_lr,
        "weight_decay": schedule["start_weight_decay"] if schedule else args.weight_decay,
        "wd_mult": 1.0,
        "lr_mult": 1.0,
        "is_decoupled_lr": False,
        "is_expert_parallel": False,
        "default_config": True,
    }


def read_group_flags(args: Namespace) -> OptimizerArgs:
    """The flags that decide which parameters are a group."""
    return OptimizerArgs(
        decoupled_lr=getattr(args, "decoupled_lr", None),
        decoupled_min_lr=getattr(args, "decoupled_min_lr", None),
        apply_wd_to_qk_layernorm=getattr(args, "apply_wd_to_qk_layernorm", False),
    )


def _list_groups(o: OptimizerArgs) -> list[ParameterGroup]:
    """Those that Megatron makes with these flags."""
    return [kind for kind in GROUPS if o.decoupled_lr is not None or not kind.decoupled]


def _group(settings: dict, kind: ParameterGroup, o: OptimizerArgs) -> dict:
    if not kind.decays:
        return settings | {"weight_decay": 0.0, "wd_mult": 0.0}
    if not kind.decoupled:
        return settings
    floor = settings["min_lr"] if o.decoupled_min_lr is None else o.decoupled_min_lr
    rates = {"lr": o.decoupled_lr, "max_lr": o.decoupled_lr, "min_lr": floor}
    return settings | rates | {"default_config": False}


def _grad_scaler(take: Take) -> dict:
    scale = take("loss_scale.scale")
    if scale is None:
        return {}
    counters = {key: int(take(f"loss_scale.{key}")) for key in COUNTERS}
    return {"grad_scaler": {"scale": scale.reshape(1)} | counters}


# --- distrib_optim.pt, where Megatron's distributed optimizer keeps masters and moments in one flat buffer each

FILE = "distrib_optim.pt"
ALIGNMENT = 64  # elements, of a parameter's start
KEYS = {"param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


def read_buffers(path: Path, optimizer: dict, weights: dict[str, Tensor], args: MegatronArgs) -> dict[str, Tensor]:
    """The flat tensors of masters and moments. weights: by our names, in the file's order. Raises Unmapped.

    That the layout is understood is proved by the weights: each must be its master, rounded.
    """
    if not path.exists():
        raise Unmapped(f"lies in {FILE} (--use-distributed-optimizer), which is not there")
    try:
        state = unpickle.load(path)
    except CheckpointError:
        raise Unmapped(f"in {FILE} cannot be read; it is damaged, or names classes that are not known") from None
    buffers = [value for key, value in state.items() if isinstance(value, dict)]
    if len(buffers) != 1 or len(buffers[0]) != 1 or not state.get("buckets_coalesced"):
        raise Unmapped(f"in {FILE} is of several kinds of parameters, or from before February 2024")
    (flat,) = buffers[0].values()
    for bucket_size in bucket_sizes(args):
        starts, total = layout({name: weight.numel() for name, weight in weights.items()}, bucket_size)
        if total != flat["param"].numel():
            continue
        found = {}
        for name, weight in weights.items():
            for theirs, ours in KEYS.items():
                part = flat[theirs][starts[name] : starts[name] + weight.numel()].view(weight.shape)
                found[f"optimizer.{name}.{ours}"] = part
        masters = {name: found[f"optimizer.{name}.master"] for name in weights}
        if all(torch.equal(masters[name].to(weight.dtype), weight) for name, weight in weights.items()):
            for name, weight in weights.items():
                if weight.dtype == torch.float32:
                    del found[f"optimizer.{name}.master"]  # the weight itself
            return found | read_settings(optimizer, weights, f"in {FILE} ")
    raise Unmapped(f"in {FILE} is laid out in a way that does not fit these weights")


def layout(sizes: dict[str, int], bucket_size: int | None) -> tuple[dict[str, int], int]:
    """({name: its first element}, elements in all): from the last parameter to the first, bucket after bucket."""
    starts, bucket, end = {}, 0, 0
    for name in reversed(sizes):
        start = -(-end // ALIGNMENT) * ALIGNMENT
        starts[name] = bucket + start
        end = start + sizes[name]
        if bucket_size is not None and end >= bucket_size:
            bucket, end = bucket + end, 0
    return starts, bucket + end


def bucket_sizes(args: MegatronArgs) -> list[int | None]:
    """One bucket, or those of --overlap-grad-reduce."""
    ranks = args.given("data_parallel_size", 1) * args.given("context_parallel_size", 1)
    return [None, args.given("ddp_bucket_size", max(40_000_000, 1_000_000 * ranks))]
