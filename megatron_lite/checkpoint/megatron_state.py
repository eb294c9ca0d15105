"""Types of what stands in Megatron-LM's files besides weights.

Every key may be missing: Megatron-LM has left out or renamed most of them in one version or another. A value that is
not what it should be raises an ordinary error of Python where it is used, which readers turn into a CheckpointError.
"""

import argparse
from typing import TypedDict, TypeGuard

from torch import Tensor

PythonState = tuple[int, tuple[int, ...], float | None]  # random.getstate(): version, numbers, a kept Gaussian
Plain = bool | int | float | str | None
Parameter = dict[str, Tensor | float]  # the optimizer's state of one parameter, by kind, such as exp_avg
Scheduler = dict[str, Plain]  # OptimizerParamScheduler's state


class GradScaler(TypedDict, total=False):
    """The state of a dynamic loss scale."""

    scale: Tensor  # one number
    growth_tracker: int
    hysteresis_tracker: int


class ParameterSettings(TypedDict, total=False):
    """A parameter group of the optimizer, and its settings."""

    params: list[int]  # numbers of its parameters, by which the optimizer's state names them
    step: float  # steps so far, where the group counts them
    lr: float
    max_lr: float
    min_lr: float
    lr_mult: float
    weight_decay: float
    wd_mult: float  # factor of weight_decay: 0 for biases and norms
    pre_wd_mult: float  # Megatron-Core's other name for it
    is_decoupled_lr: bool  # whether --decoupled-lr sets its rates
    is_expert_parallel: bool
    default_config: bool  # whether its settings are those of most parameters
    betas: tuple[float, float]  # Adam's
    eps: float
    bias_correction: bool
    momentum: float  # SGD's
    dampening: float
    nesterov: bool


class OptimizerState(TypedDict, total=False):
    """A torch optimizer's state, or that of an optimizer of Megatron's around one."""

    optimizer: "OptimizerState"  # the torch optimizer's
    param_groups: list[ParameterSettings]
    state: dict[int | str, Parameter | Tensor]  # by a parameter's number; "common_step": the steps of all parameters
    fp32_from_fp16_params: list[list[Tensor]]  # masters, for each group
    grad_scaler: GradScaler
    param_state_sharding_type: str  # the distributed optimizer's


class RandomState(TypedDict, total=False):
    """The generators of one rank."""

    random_rng_state: PythonState
    # numpy.random.get_state(): name, keys (an array, which may not have been made), position, a kept Gaussian
    np_rng_state: tuple[str, object, int, int, float]
    torch_rng_state: Tensor
    cuda_rng_state: Tensor
    rng_tracker_states: dict[str, Tensor]


class OwnState(TypedDict):
    """The part of a file by this trainer that only this trainer reads."""

    record: str  # training_state.CheckpointRecord, as JSON
    random: list[str]  # kinds of random states that a rank has


class Content(TypedDict):
    """Arguments of Megatron's sharded_state_dict, by which it asks for what is in a folder."""

    distrib_optim_sharding_type: str
    distrib_optim_fully_reshardable_mem_efficient: bool
    singleton_local_shards: bool
    chained_optim_avoid_prefix: bool


class MegatronState(TypedDict, total=False):
    """Contents of model_optim_rng.pt, or of the common.pt of a torch_dist folder.

    Interleaved chunks of a model stand under "model0", "model1", ... instead of "model".
    """

    args: argparse.Namespace
    checkpoint_version: float
    iteration: int
    total_iters: int  # iteration, before Megatron had a tracker of its own
    model: dict[str, object]  # dicts within dicts, and weights
    optimizer: OptimizerState | list[OptimizerState]  # a list: chained ones
    opt_param_scheduler: Scheduler
    lr_scheduler: Scheduler  # its older name
    rng_state: list[RandomState]
    num_floating_point_operations_so_far: float
    content_metadata: Content
    megatron_lite: OwnState


def is_state(value: object) -> TypeGuard[MegatronState]:
    """Whether a file holds a dict, whose keys may still be anything."""
    return isinstance(value, dict)
