"""A pipeline of ranks with some of the layers each, put on from outside a model that does not know.

A stage's model takes the same batch as a whole one, and each of several chunks of its layers does. Where there is no
embedding, hidden states come from the stage before; where there is no loss, they go to the next one, and a zero takes
the losses' place. Its backward asks for the gradient of what was sent: both directions are autograd functions, so that
a stage trains as a whole model does, in the order of `order_turns`.

What a turn takes from another rank is asked for while the turn before computes. Letters: B sequences, T positions of
this rank, H hidden.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron_lite.config.layout import Stage, Turn, find_source, list_forwards, order_turns
from megatron_lite.config.plan import Plan
from megatron_lite.model.gpt import DTYPES
from megatron_lite.parallel.mesh import arrange_ranks, make_group
from megatron_lite.parallel.weight_gradients import WeightGradients
from megatron_lite.phases import Phase


class Peer(NamedTuple):
    """A rank to exchange with, and the group to do so in."""

    rank: int
    group: dist.ProcessGroup


class Link:
    """One direction between stages: tensors of one form, in the order in which both sides compute."""

    def __init__(self, source: Peer | None, target: Peer | None, make, ahead: int = 1):
        """
        Args:
            source: To receive from; None at an end of the pipeline.
            target: To send to; None at the other end.
            make: make() is room for a tensor.
            ahead: Tensors that may be on their way at once.
        """
        self.source, self.target, self._make, self._ahead = source, target, make, ahead
        self._coming: list[tuple[Tensor, dist.Work]] = []
        self._leaving: list[tuple[Tensor, dist.Work]] = []

    def ask(self):
        """Begin to receive the next one; returns at once."""
        if self.source is not None:
            tensor = self._make()
            self._coming.append((tensor, dist.irecv(tensor, *self.source)))

    def take(self) -> Tensor:
        """What was asked for first."""
        tensor, work = self._coming.pop(0)
        work.wait()
        return tensor

    def send(self, tensor: Tensor):
        """Returns at once, or when an earlier tensor has been received,
        so that no more than `ahead` are on their way."""
        while len(self._leaving) >= self._ahead:
            self._leaving.pop(0)[1].wait()
        tensor = tensor.contiguous()
        self._leaving.append((tensor, dist.isend(tensor, *self.target)))


class Room:
    """Makes room for the hidden states of one micro-batch, uninitialized."""

    def __init__(self, plan: Plan, device: torch.device):
        layout, shape = plan.layout, plan.rank_shape
        self.sequences = plan.args.training.micro_batch_size
        self._positions = shape.seq_length // (layout.tensor if layout.sequence_parallel else 1)
        self._hidden_size, self._dtype, self._device = shape.hidden_size, DTYPES[plan.precision], device

    def __call__(self) -> Tensor:
        size = (self.sequences, self._positions, self._hidden_size)
        return torch.empty(size, dtype=self._dtype, device=self._device)


class Pipeline:
    """This rank's stage, and what it exchanges with those before and after it."""

    def __init__(
        self,
        stage: Stage,
        onward: Link | None = None,
        back: Link | None = None,
        ends=None,
        room: Room | None = None,
    ):
        """onward, back: of hidden states and of their gradients; None for a single stage. ends: the group of the first
        and the last stage, where both have a copy of the embedding. room: what the links make room with."""
        self.stage, self.onward, self.back, self.ends, self._room = stage, onward, back, ends, room
        self.chunk = 0  # of the running turn
        self.weights = WeightGradients() if stage.splits_backward else None
        self._arrived: list[Tensor] = []  # what the running turn takes
        self._leaving: tuple[Link, Tensor] | None = None  # what it gives
        self.tell: Callable[[int, str], None] = lambda rank, what: (
            None
        )  # told whom this rank waits for, and "" when it goes on

    @contextmanager
    def take_sequences(self, number: int) -> Iterator[None]:
        """Have micro-batches of `number` sequences within."""
        usual = 0 if self._room is None else self._room.sequences
        if self._room is not None:
            self._room.sequences = number
        yield
        if self._room is not None:
            self._room.sequences = usual

    def take_turns(self, micro_batches: int, phase) -> Iterator[Turn]:
        """The turns of a training step, each when what it takes from another rank is there."""
        return self._attend_to(order_turns(self.stage, micro_batches), phase)

    def take_forwards(self, micro_batches: int) -> Iterator[Turn]:
        """The same of an evaluation."""
        return self._attend_to(list_forwards(self.stage, micro_batches), lambda phase: nullcontext())

    def _attend_to(self, turns: list[Turn], phase) -> Iterator[Turn]:
        for turn, after in zip(turns, [*turns[1:], None]):
            if turn is turns[0]:
                self._ask(turn)
            if find_source(self.stage, turn):
                link, what = (self.onward, "forward") if turn.is_forward else (self.back, "backward")
                with phase(Phase.PIPELINE_WAIT):
                    self.tell(link.source.rank, f"the {what} of micro-batch {turn.micro_batch + 1} from")
                    self._arrived.append(link.take())
                    self.tell(link.source.rank, "")
            if after is not None:
                self._ask(after)
            self.chunk = turn.chunk
            if self.weights is not None and not turn.is_forward and not turn.of_weights:
                self.weights.begin()
            yield turn
            if self._leaving is not None:
                (link, tensor), self._leaving = self._leaving, None
                with phase(Phase.PIPELINE_WAIT):
                    self.tell(link.target.rank, "an earlier tensor to arrive at")
                    link.send(tensor)
                    self.tell(link.target.rank, "")

    def _ask(self, turn: Turn):
        if find_source(self.stage, turn):
            (self.onward if turn.is_forward else self.back).ask()

    def receive(self, *_) -> Tensor:
        """hidden_BTH of the running turn, instead of an embedding's."""
        hidden_BTH = self._arrived.pop()
        return _Receive.apply(hidden_BTH.requires_grad_(), self) if torch.is_grad_enabled() else hidden_BTH

    def send(self, hidden_BTH: Tensor, _labels_BT) -> Tensor:
        """Hand hidden states on; returns a zero, whose backward is theirs."""
        return _Send.apply(hidden_BTH, self)

    def hand_on(self, link: Link, tensor: Tensor):
        """Have a tensor sent when the turn has ended, and what was sent before is received."""
        self._leaving = link, tensor


class _Receive(torch.autograd.Function):
    """Its backward sends the gradient to the stage that the hidden states came from."""

    @staticmethod
    def forward(ctx, hidden_BTH: Tensor, pipeline: Pipeline) -> Tensor:
        ctx.pipeline = pipeline
        return hidden_BTH.view_as(hidden_BTH)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient_BTH: Tensor) -> tuple[None, None]:
        ctx.pipeline.hand_on(ctx.pipeline.back, gradient_BTH)
        return None, None


class _Send(torch.autograd.Function):
    """Its backward takes the gradient that came back. Hidden states are not kept: no gradient needs them."""

    @staticmethod
    def forward(ctx, hidden_BTH: Tensor, pipeline: Pipeline) -> Tensor:
        ctx.pipeline = pipeline
        pipeline.hand_on(pipeline.onward, hidden_BTH.detach())
        return torch.zeros((), dtype=torch.float32, device=hidden_BTH.device)

    @staticmethod
    @once_differentiable
    def backward(ctx, _zero: Tensor) -> tuple[Tensor, None]:
        return ctx.pipeline._arrived.pop(), None


def make_pipeline(plan: Plan, device: torch.device) -> Pipeline:
    """This rank's. Collective where there are several stages."""
    layout, stage = plan.layout, plan.stage
    if stage.stages == 1:
        return Pipeline(stage)
    lines = arrange_ranks(layout).movedim(0, -1)
    mine = lines[layout.data_rank, layout.context_rank, layout.tensor_rank].tolist()
    make = Room(plan, device)

    def make_link(step: int, name: str) -> Link:
        """To the stage `step` further on. Chunks go round: from the one end to the other."""
        group, around = make_group(plan, lines, name), None
        if len(stage.chunks) > 1:
            around = make_group(plan, lines, f"{name}, from end to end")

        def find_peer(number: int) -> Peer | None:
            inside = 0 <= number < layout.pipeline
            return Peer(mine[number % layout.pipeline], group if inside else around) if inside or around else None

        return Link(find_peer(stage.number - step), find_peer(stage.number + step), make, stage.sends_ahead)

    # a group each: what two ranks send each other in one group has to be sent and received in one order
    onward, back = make_link(1, "pipeline"), make_link(-1, "pipeline gradients")
    ends = make_group(plan, lines[..., [0, -1]], "ends") if plan.shape.tied_embeddings else None
    # the first use of a connection may wait for the other side: here in an order that all come to
    for link in (onward, back):
        link.ask()
        if stage.is_first and link.target is not None:
            link.send(make())
        if link.source is not None:
            link.take()
        if not stage.is_first and link.target is not None:
            link.send(make())
    return Pipeline(stage, onward, back, ends, make)


def cut_model(model: nn.Module, pipeline: Pipeline):
    """Leave a stage's parts of a whole model, which has no memory yet. Layers keep their numbers in the names of
    parameters.

    A tied embedding is the first's, and the last one's for the loss.
    """
    stage = pipeline.stage
    if stage.stages > 1:
        _cut(model, pipeline, stage.layers, stage.is_first, stage.is_last)


def cut_chunks(model: nn.Module, pipeline: Pipeline) -> list[nn.Module]:
    """A model for each chunk of a stage's layers, which shares parameters with the stage's."""
    stage, chunks = pipeline.stage, []
    if len(stage.chunks) == 1:
        return [model]
    for number, layers in enumerate(stage.chunks):
        chunk = _copy(model)
        chunk.decoder = _copy(model.decoder)
        _cut(chunk, pipeline, layers, stage.starts(number), stage.ends(number))
        chunks.append(chunk)
    return chunks


def _copy(module: nn.Module) -> nn.Module:
    """With the same parameters and parts, which can be taken from it."""
    copied = copy.copy(module)
    vars(copied).update({name: value.copy() for name, value in vars(module).items() if isinstance(value, dict)})
    return copied


def _cut(model: nn.Module, pipeline: Pipeline, layers: Iterable[int], is_first: bool, is_last: bool):
    kept, numbered = nn.ModuleList(), dict(model.decoder.layers.named_children())
    for number in layers:
        kept.add_module(str(number), numbered[str(number)])
    model.decoder.layers = kept
    if not is_first:
        model.embed = pipeline.receive
        if is_last and model.output_layer is None:
            model.embedding.position_embeddings = None
        else:
            model.embedding = None
    if not is_last:
        model.finish = pipeline.send
        model.decoder.final_layernorm = nn.Identity()
        model.output_layer = None


def is_copy(stage: Stage, name: str) -> bool:
    """Whether the last stage's parameter of this name is the first's, too."""
    return stage.is_last and not stage.is_first and name.startswith("embedding.")


def add_ends(pipeline: Pipeline, names: list[str], gradients: Sequence[Tensor | None]) -> None:
    """Have the copies of a tied embedding on both ends get the sum of their gradients. Collective among the two.

    Args:
        pipeline: This rank's.
        names: The parameters' names.
        gradients: Theirs, in the same order.
    """
    if pipeline.ends is None:
        return
    if pipeline.stage.is_first or pipeline.stage.is_last:
        gradient = gradients[names.index("embedding.word_embeddings.weight")]
        assert gradient is not None, "both ends use the embedding"
        dist.all_reduce(gradient, group=pipeline.ends)
