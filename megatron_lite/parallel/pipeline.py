"""A pipeline of ranks with some of the layers each, put on from outside a model that does not know.

A stage's model takes the same batch as a whole one, and each of several chunks of its layers does. Where there is no
embedding, hidden states come from the stage before; where there is no loss, they go to the next one, and a zero takes
the losses' place. Its backward asks for the gradient of what was sent: both directions are autograd functions, so that
a stage trains as a whole model does, in the order of `order_actions`.

What an action takes from another rank is asked for while the action before computes. Letters: B sequences, T positions
of this rank, H hidden.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron_lite.config.plan import Plan
from megatron_lite.config.shape import ModelShape
from megatron_lite.mesh_axes import ENDS
from megatron_lite.model.gpt import DTYPES, GPT
from megatron_lite.parallel.layers import replace_method
from megatron_lite.parallel.mesh import arrange_ranks, make_group
from megatron_lite.parallel.weight_gradients import WeightGradients
from megatron_lite.phases import BeginPhase, Phase
from megatron_lite.pipeline_schedule import (
    Action,
    Stage,
    find_source,
    list_forwards,
    order_actions,
)

Copied = TypeVar("Copied", bound=nn.Module)


class TellWaiting(Protocol):
    """A listener that is told for which stage of the pipeline this rank waits."""

    def __call__(self, rank: int, what: str, /) -> None:
        """Called when this rank begins to wait for another one, and again when it goes on.

        Args:
            rank: The rank that it waits for.
            what: Words such as "the forward of micro-batch 3 from"; "" when it goes on.
        """


class Peer(NamedTuple):
    """A rank to exchange with, and the group to do so in."""

    rank: int
    group: dist.ProcessGroup


class StageLink:
    """A direction between stages: tensors of one form, in the order in which both sides compute."""

    def __init__(self, source: Peer | None, target: Peer | None, make: Callable[[], Tensor], ahead: int = 1):
        """
        Args:
            source: Rank to receive from; None at an end of the pipeline.
            target: Rank to send to; None at the other end.
            make: Makes room for a tensor.
            ahead: Tensors that may be on their way at once.
        """
        self.source = source
        self.target = target
        self._make = make
        self._ahead = ahead
        self._coming: list[tuple[Tensor, dist.Work]] = []
        self._leaving: list[tuple[Tensor, dist.Work]] = []

    def ask(self) -> None:
        """Begin to receive the next tensor; returns at once."""
        if self.source is None:
            return
        tensor = self._make()
        work = dist.irecv(tensor, *self.source)
        assert work is not None, "both ranks are in the group"
        self._coming.append((tensor, work))

    def take(self) -> Tensor:
        """Wait for the tensor that was asked for first, and return it."""
        tensor, work = self._coming.pop(0)
        work.wait()
        return tensor

    def send(self, tensor: Tensor) -> None:
        """Begin to send a tensor. Returns at once, or when an earlier one has been received, so that no more than
        `ahead` are on their way."""
        assert self.target is not None, "the last stage has nobody to send to"
        while len(self._leaving) >= self._ahead:
            _, earlier = self._leaving.pop(0)
            earlier.wait()
        tensor = tensor.contiguous()
        work = dist.isend(tensor, *self.target)
        assert work is not None, "both ranks are in the group"
        # the tensor's memory is needed until it has been sent
        self._leaving.append((tensor, work))


class Room:
    """Makes room for the hidden states of one micro-batch, uninitialized."""

    def __init__(self, plan: Plan, device: torch.device):
        layout = plan.layout
        sharing = layout.tensor if layout.sequence_parallel else 1
        self.sequences = plan.args.training.micro_batch_size
        self._positions = plan.rank_shape.seq_length // sharing
        self._hidden_size = plan.rank_shape.hidden_size
        self._dtype = DTYPES[plan.precision]
        self._device = device

    def __call__(self) -> Tensor:
        """Make a tensor (B, T, H) in the plan's precision, on this rank's device."""
        size = (self.sequences, self._positions, self._hidden_size)
        return torch.empty(size, dtype=self._dtype, device=self._device)


class Pipeline:
    """The stage of this rank, and what it exchanges with those before and after it."""

    def __init__(
        self,
        stage: Stage,
        onward: StageLink | None = None,
        back: StageLink | None = None,
        ends: dist.ProcessGroup | None = None,
        room: Room | None = None,
        shared: tuple[str, ...] = (),
    ):
        """
        Args:
            stage: This rank's.
            onward: Takes hidden states to the next stage; None for a single stage.
            back: Takes their gradients to the stage before; None for a single stage.
            ends: The group of the first and the last stage, where both have a copy of the embedding.
            room: What the links make room with.
            shared: Names of the parameters of which both ends have a copy.
        """
        self.stage = stage
        self.onward = onward
        self.back = back
        self.ends = ends
        self.shared = shared
        self._room = room
        # number of the running action's chunk
        self.chunk = 0
        self.weights = WeightGradients() if stage.splits_backward else None
        # what the running action takes from another rank
        self._arrived: list[Tensor] = []
        # what it gives to another rank
        self._leaving: tuple[StageLink, Tensor] | None = None
        self.tell: TellWaiting = _tell_nobody

    @contextmanager
    def take_sequences(self, number: int) -> Iterator[None]:
        """Exchange micro-batches of `number` sequences inside the block."""
        usual = 0 if self._room is None else self._room.sequences
        if self._room is not None:
            self._room.sequences = number
        yield
        if self._room is not None:
            self._room.sequences = usual

    def take_actions(self, micro_batches: int, phase: BeginPhase) -> Iterator[Action]:
        """Iterate over the actions of a training step, each when what it takes from another rank is there.

        Args:
            micro_batches: Micro-batches of the step.
            phase: Marks the times in which this rank waits for another stage.
        """
        return self._attend_to(order_actions(self.stage, micro_batches), phase)

    def take_forwards(self, micro_batches: int) -> Iterator[Action]:
        """Iterate over the actions of an evaluation, each when what it takes from another rank is there."""
        return self._attend_to(list_forwards(self.stage, micro_batches), lambda phase: nullcontext())

    def _attend_to(self, actions: list[Action], phase: BeginPhase) -> Iterator[Action]:
        for action, after in zip(actions, [*actions[1:], None]):
            if action is actions[0]:
                self._ask(action)
            if find_source(self.stage, action):
                link = self.onward if action.is_forward else self.back
                what = "forward" if action.is_forward else "backward"
                assert link is not None and link.source is not None
                with phase(Phase.PIPELINE_WAIT):
                    self.tell(link.source.rank, f"the {what} of micro-batch {action.micro_batch + 1} from")
                    self._arrived.append(link.take())
                    self.tell(link.source.rank, "")
            if after is not None:
                self._ask(after)
            self.chunk = action.chunk
            if self.weights is not None and not action.is_forward and not action.of_weights:
                self.weights.begin()
            yield action
            if self._leaving is not None:
                link, tensor = self._leaving
                self._leaving = None
                assert link.target is not None
                with phase(Phase.PIPELINE_WAIT):
                    self.tell(link.target.rank, "an earlier tensor to arrive at")
                    link.send(tensor)
                    self.tell(link.target.rank, "")

    def _ask(self, action: Action) -> None:
        if find_source(self.stage, action):
            link = self.onward if action.is_forward else self.back
            assert link is not None
            link.ask()

    def receive(self, *_: Tensor) -> Tensor:
        """Take hidden_BTH of the running action from the stage before. Stands in for GPT.embed."""
        hidden_BTH = self._arrived.pop()
        if not torch.is_grad_enabled():
            return hidden_BTH
        return _receive(hidden_BTH.requires_grad_(), self)

    def send(self, hidden_BTH: Tensor, _labels_BT: Tensor | None) -> Tensor:
        """Hand hidden states on; returns a zero, whose backward is theirs. Stands in for GPT.finish."""
        return _send(hidden_BTH, self)

    def hand_on(self, link: StageLink | None, tensor: Tensor) -> None:
        """Have a tensor sent when the action has ended, and what was sent before is received."""
        assert link is not None, "a single stage hands nothing on"
        self._leaving = (link, tensor)


def _tell_nobody(_rank: int, _what: str, /) -> None:
    """Tell nobody for which stage this rank waits."""


class _PipelineContext(Protocol):
    """Values that the forward of _Receive and of _Send leaves for its backward."""

    pipeline: Pipeline


class _Receive(torch.autograd.Function):
    """Hidden states from the stage before. Backward sends their gradient there."""

    @staticmethod
    def forward(ctx: _PipelineContext, hidden_BTH: Tensor, pipeline: Pipeline) -> Tensor:
        ctx.pipeline = pipeline
        return hidden_BTH.view_as(hidden_BTH)

    @staticmethod
    @once_differentiable
    def backward(ctx: _PipelineContext, gradient_BTH: Tensor) -> tuple[None, None]:
        ctx.pipeline.hand_on(ctx.pipeline.back, gradient_BTH)
        return None, None


# torch gives `apply` no types; so below
_receive: Callable[[Tensor, Pipeline], Tensor] = _Receive.apply


class _Send(torch.autograd.Function):
    """Hidden states to the stage after. Backward takes the gradient that came back. Hidden states are not kept: no
    gradient needs them."""

    @staticmethod
    def forward(ctx: _PipelineContext, hidden_BTH: Tensor, pipeline: Pipeline) -> Tensor:
        ctx.pipeline = pipeline
        pipeline.hand_on(pipeline.onward, hidden_BTH.detach())
        return torch.zeros((), dtype=torch.float32, device=hidden_BTH.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: _PipelineContext, _zero: Tensor) -> tuple[Tensor, None]:
        return ctx.pipeline._arrived.pop(), None


_send: Callable[[Tensor, Pipeline], Tensor] = _Send.apply


def make_pipeline(plan: Plan, device: torch.device) -> Pipeline:
    """Make this rank's part of the pipeline. Collective where there are several stages."""
    layout = plan.layout
    stage = plan.stage
    if stage.stages == 1:
        return Pipeline(stage)
    lines = arrange_ranks(layout).movedim(0, -1)
    mine: list[int] = lines[layout.data_rank, layout.context_rank, layout.tensor_rank].tolist()
    make = Room(plan, device)

    def make_link(step: int, name: str) -> StageLink:
        """Make the link to the stage `step` further on. Chunks go round: from the one end to the other."""
        group = make_group(plan, lines, name)
        around = None
        if len(stage.chunks) > 1:
            around = make_group(plan, lines, f"{name}, from end to end")

        def find_peer(number: int) -> Peer | None:
            is_inside = 0 <= number < layout.pipeline
            shared = group if is_inside else around
            if shared is None:
                return None
            return Peer(mine[number % layout.pipeline], shared)

        source = find_peer(stage.number - step)
        target = find_peer(stage.number + step)
        return StageLink(source, target, make, stage.sends_ahead)

    # a group each: what two ranks send each other in one group has to be sent and received in one order
    onward = make_link(1, "pipeline")
    back = make_link(-1, "pipeline gradients")
    shared = list_shared(plan.shape)
    ends = make_group(plan, lines[..., [0, -1]], ENDS) if shared else None
    # the first use of a connection may wait for the other side: here in an order that all come to
    for link in (onward, back):
        link.ask()
        if stage.is_first and link.target is not None:
            link.send(make())
        if link.source is not None:
            link.take()
        if not stage.is_first and link.target is not None:
            link.send(make())
    return Pipeline(stage, onward, back, ends, make, shared)


def list_shared(shape: ModelShape) -> tuple[str, ...]:
    """List the names of the parameters that the first and the last stage both need: embeddings, for a tied loss or for
    further tokens."""
    shared = []
    if shape.tied_embeddings or shape.mtp_num_layers:
        shared.append("embedding.word_embeddings.weight")
    if shape.mtp_num_layers and shape.position_embedding == "learned_absolute":
        shared.append("embedding.position_embeddings.weight")
    return tuple(shared)


def cut_model(model: GPT, pipeline: Pipeline) -> None:
    """Leave a stage's parts of a whole model, which has no memory yet. Layers keep their numbers in the names of
    parameters.

    The first stage has a tied embedding, and so has the last one for the loss; for further tokens it has the embedding,
    tied or not.
    """
    stage = pipeline.stage
    if stage.stages > 1:
        _cut(model, pipeline, stage.layers, stage.is_first, stage.is_last)


def cut_chunks(model: nn.Module, pipeline: Pipeline) -> list[nn.Module]:
    """Make a model for each chunk of a stage's layers, which shares parameters with the stage's."""
    stage = pipeline.stage
    if len(stage.chunks) == 1:
        return [model]
    assert isinstance(model, GPT)
    chunks: list[nn.Module] = []
    for number, layers in enumerate(stage.chunks):
        chunk = _copy(model)
        chunk.decoder = _copy(model.decoder)
        _cut(chunk, pipeline, layers, stage.starts(number), stage.ends(number))
        chunks.append(chunk)
    return chunks


def _copy(module: Copied) -> Copied:
    """Copy a module but for its parameters and parts; what is taken from the copy stays in the module."""
    copied = copy.copy(module)
    registers = {name: value.copy() for name, value in vars(module).items() if isinstance(value, dict)}
    vars(copied).update(registers)
    return copied


def _cut(model: GPT, pipeline: Pipeline, layers: Iterable[int], is_first: bool, is_last: bool) -> None:
    """Leave some layers of a model, and what only the first and the last ones need.

    Args:
        model: A GPT with all layers of the stage.
        pipeline: Receives what the model's first layer takes and sends what its last layer gives.
        layers: Numbers of the layers that stay, counted from 0 in the whole model.
        is_first: Whether the first of them is the whole model's first.
        is_last: Whether the last of them is the whole model's last.
    """
    kept = nn.ModuleList()
    numbered = dict(model.decoder.layers.named_children())
    for number in layers:
        kept.add_module(str(number), numbered[str(number)])
    model.decoder.layers = kept
    if not is_first:
        replace_method(model, "embed", pipeline.receive)
        embeds_further = is_last and model.mtp is not None
        if is_last and model.output_layer is None and not embeds_further:
            model.embedding.position_embeddings = None
        elif not embeds_further:
            # as torch takes a part away whose type says that a whole model has it
            model.register_module("embedding", None)
    if not is_last:
        replace_method(model, "finish", pipeline.send)
        model.decoder.register_module("final_layernorm", nn.Identity())
        model.output_layer = None
        model.mtp = None


def is_copy(stage: Stage, name: str) -> bool:
    """Whether the last stage's parameter of this name is the first's, too."""
    return stage.is_last and not stage.is_first and name.startswith("embedding.")


def add_ends(pipeline: Pipeline, names: list[str], gradients: Sequence[Tensor | None]) -> None:
    """Have the copies of an embedding on both ends get the sum of their gradients. Collective among the two.

    Args:
        pipeline: This rank's.
        names: The parameters' names.
        gradients: Theirs, in the same order.
    """
    if pipeline.ends is None:
        return
    if not (pipeline.stage.is_first or pipeline.stage.is_last):
        return
    for name in pipeline.shared:
        gradient = gradients[names.index(name)]
        assert gradient is not None, "both ends use the embedding"
        dist.all_reduce(gradient, group=pipeline.ends)
