"""Tells a recorder of this package's trainer what no module shows: parts of parameters, and gradients as its optimizer
gets them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron_lite.config.layout import Part, whole_part
from megatron_lite.instruments.replacing import get_function, put_in_place
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.parallel.replica import Replica
from megatron_lite.script_record.model_calls import SeenModel
from megatron_lite.script_record.script_recorder import ScriptRecorder
from megatron_lite.script_record.tensor_places import HeldBlock
from megatron_lite.train.step import TrainingStep

DECIDE = "_decide_to_skip"  # the method of the optimizer that is given the norm first


@dataclass(frozen=True)
class ReplicaParameter:
    """A parameter of a replica. Its fields are HeldParameter's."""

    name: str
    parameter: Tensor
    gradient: Tensor | None
    part: Part  # of the whole that this rank holds
    is_whole: bool = False  # gradients are seen where the optimizer gets them

    def find_blocks(self, tensor: Tensor) -> Iterator[HeldBlock]:
        """Find where a tensor lies. The argument is that of HeldParameter."""
        start = 0
        for block in self.part.blocks:
            rows = block.sizes[0]
            local = tensor.narrow(0, start, rows)
            start += rows
            yield HeldBlock(local, self.part.whole, block.offsets, is_placed=True)


class ReplicaParameters:
    """The parameters of this rank's replica.

    Args:
        replica: The trainer's.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        # what the optimizer is given; their loss scale is taken out
        self.gradients: Sequence[Tensor | None] = [None] * len(replica.names)

    def list(self, model: SeenModel) -> Iterator[ReplicaParameter]:
        """List the parameters of all of the replica's chunks with the first one.

        Args:
            model: A chunk.
        """
        replica = self._replica
        if model.module is not replica.chunks[0]:
            return
        for name, parameter, gradient in zip(replica.names, replica.parameters, self.gradients, strict=True):
            part = replica.parts.get(name) or whole_part(tuple(parameter.shape))
            yield ReplicaParameter(name, parameter, gradient, part)


def follow_trainer(recorder: ScriptRecorder) -> None:
    """Follow the trainer of this process, for the rest of it.

    Args:
        recorder: Records it as it does any script.
    """
    prepare = get_function(TrainingStep, "__init__")
    update = get_function(Optimizer, "step")
    decide = get_function(Optimizer, DECIDE)
    sources: list[ReplicaParameters] = []

    def prepare_step(step: TrainingStep, plan: object, replica: Replica, *others: object, **named: object) -> None:
        prepare(step, plan, replica, *others, **named)
        source = ReplicaParameters(replica)
        sources.append(source)
        recorder.take_parameters_from(source)

    def update_from(
        optimizer: Optimizer, gradients: Sequence[Tensor | None], *others: object, **named: object
    ) -> object:
        scale = optimizer.loss_scale
        sources[-1].gradients = [None if gradient is None else gradient / scale for gradient in gradients]
        recorder.note_gradients(set())
        return update(optimizer, gradients, *others, **named)

    def decide_to_skip(optimizer: Optimizer, norm: Tensor) -> object:
        # the first that is told the norm
        recorder.note_norm(float(norm), optimizer.plan.args.optimizer.clip_grad)
        return decide(optimizer, norm)

    put_in_place(TrainingStep, "__init__", prepare_step)
    put_in_place(Optimizer, "step", update_from)
    put_in_place(Optimizer, DECIDE, decide_to_skip)
