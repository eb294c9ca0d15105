"""Records what a script computes in its first steps, without changing it: inputs, outputs, gradients and weights.

Where it is fed, it starts from the weights and takes the samples of another run.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import utils as nn_utils
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from megatron_lite.formats.prove_record import (
    Clipping,
    ModuleOutput,
    ProvedStep,
    ProveRecord,
    ProveRequest,
    SeenMicroBatch,
    TensorPart,
)
from megatron_lite.instruments.replacing import get_function, put_in_place
from megatron_lite.script_record.fed_tensors import GivenTensors
from megatron_lite.script_record.held_parameters import HeldParameter, ModuleParameters, ParameterSource
from megatron_lite.script_record.kept_tensors import KeptTensors
from megatron_lite.script_record.loaders import Loaders
from megatron_lite.script_record.megatron_core import see_clipping
from megatron_lite.script_record.model_calls import ModelCalls, SeenModel, hash_random_state, hash_rows, list_tensors
from megatron_lite.script_record.optimizers import SeenOptimizers
from megatron_lite.script_record.tensor_places import find_blocks
from megatron_lite.script_record.without_dropout import WithoutDropout

CLIP = "clip_grad_norm_"
CLOSURE_ARGUMENT = "closure"  # the argument of an optimizer's step that computes loss and gradients
SEED = 1  # of the random changes by which rounding is seen


@dataclass
class OpenStep:
    """A step while it is recorded."""

    micro_batches: list[SeenMicroBatch] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    gradients: dict[str, list[TensorPart]] = field(default_factory=dict)
    local_gradients: list[TensorPart] = field(default_factory=list)
    weights: list[TensorPart] = field(default_factory=list)
    clipping: Clipping | None = None
    kept_squares: dict[int, float] = field(default_factory=dict)
    kept_norm: float = 0.0
    updated_norm: float = 0.0

    def close(self) -> ProvedStep:
        """Return what was recorded."""
        micro_batches = []
        for number, micro_batch in enumerate(self.micro_batches):
            loss = self.losses[number] if number < len(self.losses) else None
            given = micro_batch
            micro_batches.append(
                SeenMicroBatch(rows=given.rows, indices=given.indices, random_state=given.random_state, loss=loss)
            )
        return ProvedStep(
            micro_batches=tuple(micro_batches),
            gradients=tuple(part for parts in self.gradients.values() for part in parts),
            local_gradients=tuple(self.local_gradients),
            clipping=self.clipping,
            kept_norm=self.kept_norm,
            updated_norm=self.updated_norm,
            weights=tuple(self.weights),
        )


class ScriptRecorder:
    """Records the script of this process.

    Args:
        request: What is asked for.
        finish: Called where enough was seen.
    """

    def __init__(self, request: ProveRequest, finish: Callable[[], object]) -> None:
        self._request = request
        self._finish = finish
        self._kept = KeptTensors()
        self._loaders = Loaders(request.feed.indices)
        self._given = GivenTensors(self._kept, request.feed.tensors)
        self._dropout = WithoutDropout()
        self._calls = ModelCalls(self._begin_micro_batch, self._note_outputs)
        self._steps: list[OpenStep] = [OpenStep()]
        self._outputs: list[ModuleOutput] = []
        self._weights: list[TensorPart] = []
        self._updates: dict[int, int] = {}
        self._optimizers = SeenOptimizers()  # keeps their ids theirs
        self._outside: dict[int, HeldParameter] = {}  # what optimizers update and no model holds, by its id
        self._left_out = 0  # steps whose update was left out
        self._started: set[int] = set()  # models whose weights were recorded
        self._local_sums: dict[str, Tensor] = {}
        self._aliases: dict[str, str] = {}
        self._is_compiled = False
        self._sees_megatron_core = False
        self._source: ParameterSource = ModuleParameters()

    def take_parameters_from(self, source: ParameterSource) -> None:
        """Take parameters from a library that knows more of them than modules do.

        Args:
            source: Lists them.
        """
        self._source = source

    def attach(self) -> None:
        """Start, for the rest of the process."""
        self._loaders.attach()
        self._given.attach()
        self._dropout.attach()
        self._calls.attach()
        self._leave_uncompiled()
        self._see_backward()
        self._see_clipping()
        self._optimizers.attach(self._note_clearing)
        register_optimizer_step_pre_hook(self._begin_update)
        register_optimizer_step_post_hook(self._end_update)

    def _leave_uncompiled(self) -> None:
        """Let torch.compile return what it is given: modules of compiled code cannot be seen."""

        def leave(model: object = None, **options: object) -> object:
            self._is_compiled = True
            return model if model is not None else lambda function: function

        put_in_place(torch, "compile", leave)
        put_in_place(nn.Module, "compile", lambda module, *arguments, **options: leave())

    # forward

    def _begin_micro_batch(
        self, model: SeenModel, arguments: tuple[object, ...], named: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        if self._updates and min(self._updates.values()) + self._left_out >= len(self._steps):
            self._end_step()
        # chunks of a stage and modules beside a model have no prefix either
        if not self._sees_megatron_core:
            self._sees_megatron_core = see_clipping(self._note_clipping)
        if id(model.module) not in self._started:
            self._started.add(id(model.module))
            self._start(model)
        arguments, named = self._given.take_inputs(arguments, named)
        data = [tensor for tensor in list_tensors((arguments, named)) if not tensor.requires_grad]
        plain = [tensor for tensor in data if not isinstance(tensor, DTensor)]
        self._steps[-1].micro_batches.append(
            SeenMicroBatch(rows=hash_rows(plain), indices=self._loaders.get_current(), random_state=hash_random_state())
        )
        return arguments, named

    def _start(self, model: SeenModel) -> None:
        """Record a model's weights before its first call, then give it those to start from."""
        names: dict[int, str] = {}
        for held in self._source.list(model):
            if id(held.parameter) in names:
                self._aliases[held.name] = names[id(held.parameter)]
                continue
            names[id(held.parameter)] = held.name
            self._weights += self._keep("weights", held, held.parameter)
            if held.is_whole and held.parameter.requires_grad:
                self._see_local_gradient(held.name, held.parameter)
        if self._request.feed.weights:
            with np.load(self._request.feed.weights) as whole:
                self._load(self._source.list(model), whole)
                self._load(self._optimizers.list_all(), whole)
        if self._request.perturbation:
            self._perturb(model)

    def _keep(self, kind: str, held: HeldParameter, tensor: Tensor | None) -> list[TensorPart]:
        """Keep a tensor that lies as a parameter does. None: this rank lacks it."""
        if tensor is None:
            return [TensorPart(name=held.name, key="")]
        return self._kept.keep(kind, held.name, held.find_blocks(tensor), tensor.dtype)

    def _load(self, parameters: Iterable[HeldParameter], whole: np.lib.npyio.NpzFile) -> None:
        """Put the weights in place by name; others stay the script's own."""
        with torch.no_grad():
            for held in parameters:
                if held.name not in whole.files:
                    continue
                array = torch.from_numpy(whole[held.name])
                for block in held.find_blocks(held.parameter):
                    if array.numel() != math.prod(block.whole):
                        continue
                    ranges = zip(block.starts, block.local.shape, strict=True)
                    cut = array.reshape(block.whole)[tuple(slice(start, start + size) for start, size in ranges)]
                    block.local.copy_(cut)

    def _perturb(self, model: SeenModel) -> None:
        """Change the last bits of the weights, by the same random numbers wherever a weight lies."""
        originals = [held for held in self._source.list(model) if held.name not in self._aliases]
        with torch.no_grad():
            for number, held in enumerate(originals):
                for block in held.find_blocks(held.parameter):
                    generator = torch.Generator().manual_seed(SEED + number)
                    noise = torch.rand(block.local.shape, generator=generator) * 2 - 1
                    ulp = torch.finfo(block.local.dtype).eps
                    block.local.mul_((1 + noise * ulp * self._request.perturbation).to(block.local))

    def _see_local_gradient(self, name: str, parameter: Tensor) -> None:
        """Add up what autograd alone gives a parameter."""

        def add(gradient: Tensor) -> None:
            if isinstance(gradient, DTensor) or gradient.is_sparse:
                return
            held = self._local_sums.get(name)
            wide = gradient.detach().to(torch.promote_types(gradient.dtype, torch.float32))
            self._local_sums[name] = wide.clone() if held is None else held + wide

        parameter.register_hook(add)

    def _note_outputs(self, name: str, module: nn.Module, output: object) -> None:
        if len(self._steps) > 1:
            return
        parts: list[TensorPart] = []
        for number, tensor in enumerate(list_tensors(output)):
            if tensor.is_floating_point():
                parts += self._kept.keep("outputs", f"{name}#{number}", find_blocks(tensor), tensor.dtype)
        local = isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm)
        self._outputs.append(
            ModuleOutput(
                module=name,
                class_name=type(module).__name__,
                call=len(self._outputs),
                micro_batch=len(self._steps[-1].micro_batches) - 1,
                parts=tuple(parts),
                has_local_statistics=local and module.training,
            )
        )

    # backward

    def _see_backward(self) -> None:
        compute = get_function(torch.autograd, "backward")

        def backward(tensors: object, *arguments: object, **named: object) -> None:
            is_outer = not self._calls.ignored
            if is_outer:
                self._note_loss(tensors)
            self._calls.ignored += 1
            try:
                compute(tensors, *arguments, **named)
            finally:
                self._calls.ignored -= 1

        put_in_place(torch.autograd, "backward", backward)

    def _note_loss(self, tensors: object) -> None:
        roots = list(list_tensors(tensors))
        if len(roots) != 1 or roots[0].numel() != 1:
            return
        loss = roots[0].detach()
        if isinstance(loss, DTensor):
            loss = loss.full_tensor()
        value = float(loss)
        # stages of a pipeline that have no loss go backward from 0
        if value:
            self._steps[-1].losses.append(value)

    # update

    def note_gradients(self, chosen: set[int]) -> None:
        """Keep gradients as they are now, once a step.

        Args:
            chosen: Ids of the parameters; where none of them is a model's, all are kept: what an optimizer updates are
                copies.
        """
        step = self._steps[-1]
        listed = [held for held in self._list_parameters() if held.parameter.requires_grad]
        known = [held for held in listed if id(held.parameter) in chosen] or listed
        for held in known:
            if held.name in step.gradients:
                continue
            gradient = held.gradient
            step.gradients[held.name] = self._keep("gradients", held, gradient)
            step.kept_squares[id(held.parameter)] = _sum_squares(gradient)
            if held.name in self._local_sums:
                step.local_gradients += self._keep("local", held, self._local_sums.pop(held.name))

    def _list_parameters(self) -> Iterator[HeldParameter]:
        for model in self._calls.models:
            for held in self._source.list(model):
                if held.name not in self._aliases:
                    yield held
        yield from self._outside.values()

    def _see_clipping(self) -> None:
        clip = get_function(clip_grad, CLIP)

        def clip_and_note(parameters: object, max_norm: float, *arguments: object, **named: object) -> Tensor:
            listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)  # type: ignore[call-overload]
            self.note_gradients({id(parameter) for parameter in listed})
            norm: Tensor = clip(listed, max_norm, *arguments, **named)
            whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
            self.note_norm(float(whole), float(max_norm))
            return norm

        put_in_place(clip_grad, CLIP, clip_and_note)
        put_in_place(nn_utils, CLIP, clip_and_note)

    def _note_clipping(self, norm: float, max_norm: float) -> None:
        """Note what Megatron-Core's optimizers clip."""
        self.note_gradients(set())
        self.note_norm(norm, max_norm)

    def note_norm(self, norm: float, max_norm: float) -> None:
        """Note the norm of the whole gradient as the script has computed it.

        Args:
            norm: L2 norm, before clipping.
            max_norm: That it clips to; 0: it does not.
        """
        self._steps[-1].clipping = Clipping(norm=norm, max_norm=max_norm)

    def _begin_update(
        self, optimizer: Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Note the gradients of an update: now, or when the closure that it is given has computed them."""
        # the first argument is the optimizer
        given = dict(zip(("optimizer", CLOSURE_ARGUMENT), arguments, strict=False)) | named
        closure = given.get(CLOSURE_ARGUMENT)
        if closure is None:
            self._note_update(optimizer)
            return arguments, named

        def compute() -> object:
            loss: object = closure()
            self._note_update(optimizer)
            return loss

        return arguments[:1], named | {CLOSURE_ARGUMENT: compute}

    def _note_update(self, optimizer: Optimizer) -> None:
        self._note_outside(optimizer)
        self.note_gradients(_list_ids(optimizer))
        step = self._steps[-1]
        kept_squares = 0.0
        squares = 0.0
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in step.kept_squares:
                    kept_squares += step.kept_squares[id(parameter)]
                    squares += _sum_squares(parameter.grad)
        # a step may have several optimizers
        step.kept_norm = math.hypot(step.kept_norm, math.sqrt(kept_squares))
        step.updated_norm = math.hypot(step.updated_norm, math.sqrt(squares))

    def _note_outside(self, optimizer: Optimizer) -> None:
        """Record the parameters that no model holds, before their first update."""
        if self._request.is_own_trainer:
            # its optimizers update copies of parameters that the replica tells
            return
        known = set(self._outside)
        for model in self._calls.models:
            known |= {id(held.parameter) for held in self._source.list(model)}
        for held in self._optimizers.list_outside(optimizer, known):
            self._outside[id(held.parameter)] = held
            self._weights += self._keep("weights", held, held.parameter)

    def _note_clearing(self, optimizer: Optimizer) -> None:
        """End a step whose update is left out: where no optimizer has ever stepped, one clears all gradients."""
        step = self._steps[-1]
        if self._updates or not step.losses:
            return
        updated = _list_ids(optimizer)
        squares = 0.0
        for held in self._list_parameters():
            if held.gradient is None:
                continue
            if id(held.parameter) not in updated:
                return
            squares += _sum_squares(held.gradient)
        if not squares or not math.isfinite(squares):
            return
        self.note_gradients(updated)
        # the next step's forward may come before its gradients are cleared
        ended = len(step.losses)
        begun = step.micro_batches[ended:]
        step.micro_batches = step.micro_batches[:ended]
        self._outputs = [output for output in self._outputs if output.micro_batch < ended]
        self._left_out += 1
        self._end_step()
        self._steps[-1].micro_batches += begun
        if self._left_out >= self._request.steps:
            self._finish()

    def _end_update(self, optimizer: Optimizer, *arguments: object) -> None:
        self._updates[id(optimizer)] = self._updates.get(id(optimizer), 0) + 1
        if min(self._updates.values()) >= self._request.steps:
            self._finish()

    def _end_step(self) -> None:
        """Record the updated weights, where the next step begins."""
        step = self._steps[-1]
        for held in self._list_parameters():
            step.weights += self._keep("updated", held, held.parameter)
        self._steps.append(OpenStep())

    # the answer

    @property
    def has_gradients(self) -> bool:
        """Whether a step was recorded as far as its gradients."""
        return bool(self._steps[0].gradients)

    def write(self, rank: int, ranks: int, engines: tuple[str, ...], failure: str = "", lost: str = "") -> ProveRecord:
        """Write the tensors, and return the record that names them.

        Args:
            rank: Of this process.
            ranks: Of the job.
            engines: What brings gradients together.
            failure: Why the script ended early; "": it did not.
            lost: Why it could not go on when others had finished; "": it has finished as well.
        """
        self._kept.write(Path(self._request.folder), rank)
        notes = []
        if self._is_compiled:
            notes.append("torch.compile was left out: modules of compiled code cannot be seen")
        if self._kept.left_out:
            notes.append(f"{self._kept.left_out} tensors had no room and were not compared")
        if lost:
            steps = self._request.steps
            notes.append(f"rank {rank} had not stepped {steps} times when others had: {lost}")
        if self._left_out:
            notes.append(f"rank {rank}: {self._left_out} times gradients were cleared without an update")
        kept = self._steps
        if lost:
            kept = [step for step in kept if step.gradients]
        return ProveRecord(
            rank=rank,
            ranks=ranks,
            weights=tuple(self._weights),
            aliases=self._aliases,
            steps=tuple(step.close() for step in kept),
            outputs=tuple(self._outputs),
            loaders=tuple(self._loaders.describe()),
            dropouts=self._dropout.found,
            engines=engines,
            notes=tuple(notes),
            failure=failure,
        )


def _list_ids(optimizer: Optimizer) -> set[int]:
    """List the ids of what an optimizer updates."""
    ids = set()
    for group in optimizer.param_groups:
        ids |= {id(parameter) for parameter in group["params"]}
    return ids


def _sum_squares(gradient: Tensor | None) -> float:
    """Add up the squares of what this rank has of a gradient."""
    if gradient is None:
        return 0.0
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return float(local.detach().double().square().sum())
