"""The order in which stages of a pipeline compute, and when each does if only earlier actions delay it.

Imports nothing of the package: the trainer follows the order, and planner and explainer simulate it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

ZERO_BUBBLE = "ZeroBubble"  # --pipeline-schedule
# kinds of actions
FORWARD = "forward"
BACKWARD = "backward"  # where backward is split, of inputs only
WEIGHT_GRADIENTS = "weights"


class Action(NamedTuple):
    """An action of a stage, computed without a break: forward or backward of one micro-batch through one chunk.

    Where backward is split, gradients of inputs are one action, and gradients of weights another.
    """

    is_forward: bool
    micro_batch: int
    chunk: int = 0
    of_weights: bool = False

    @property
    def kind(self) -> str:
        """FORWARD, BACKWARD or WEIGHT_GRADIENTS."""
        if self.is_forward:
            return FORWARD
        return WEIGHT_GRADIENTS if self.of_weights else BACKWARD


@dataclass(frozen=True)
class Stage:
    """Layers that one rank of a pipeline has, with the embedding if it is first, final norm and loss if it is last.

    Its layers are one piece, or several chunks that are interleaved with those of other stages: a micro-batch goes
    through the first chunk of every stage, then through the second of every stage, and so on.
    """

    number: int
    stages: int
    chunks: tuple[range, ...]  # of layers; those of one stage may differ in their number, and have none
    splits_backward: bool = False  # into gradients of inputs and of weights, which fill its waiting
    # micro-batches that go through one chunk before they go through the next; 0: as many as there are stages
    micro_batch_group_size: int = 0

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self.stages - 1

    @property
    def layers(self) -> list[int]:
        """Layers of all chunks, in order."""
        return [layer for chunk in self.chunks for layer in chunk]

    def describe_layers(self, between: str) -> str:
        """Name the layers of each chunk, counted from 1: "1-4, 9-12" with a hyphen between; "none" for no layer."""
        pieces = []
        for chunk in self.chunks:
            pieces.append(f"{chunk.start + 1}{between}{chunk.stop}" if chunk else "none")
        return ", ".join(pieces)

    @property
    def has_equal_chunks(self) -> bool:
        """Whether all chunks have as many layers; one chunk is."""
        return len({len(chunk) for chunk in self.chunks}) == 1

    @property
    def group(self) -> int:
        """Micro-batches that go through one chunk before they go through the next."""
        return self.micro_batch_group_size or self.stages

    @property
    def sends_ahead(self) -> int:
        """How many tensors a stage may have sent that were not asked for yet.

        What comes round to the first stage waits there until a whole group has gone through the chunk before.
        """
        return max(self.group - self.stages, 0) + 1

    def starts(self, chunk: int) -> bool:
        """Whether this chunk has the embedding."""
        return self.is_first and chunk == 0

    def ends(self, chunk: int) -> bool:
        """Whether this chunk has the loss."""
        return self.is_last and chunk == len(self.chunks) - 1

    def count_held(self, micro_batches: int) -> tuple[int, int]:
        """Micro-batches whose activations the stage holds when it holds most.

        Args:
            micro_batches: Micro-batches of a step.

        Returns:
            (those that wait for their backward, the running one among them; those that wait for the gradients of their
            weights only).
        """
        if not self.splits_backward:
            return self.count_waiting(micro_batches), 0
        held = 0
        waiting = 0
        most = (0, 0)
        for action in order_actions(self, micro_batches):
            if action.kind == FORWARD:
                held += 1
                waiting += 1
            elif action.kind == BACKWARD:
                waiting -= 1
            else:
                held -= 1
            most = max(most, (held, waiting))
        most_held, of_these_waiting = most
        return of_these_waiting, most_held - of_these_waiting

    def count_waiting(self, micro_batches: int) -> int:
        """The most forwards of a chunk that wait for their backward at once."""
        ahead = self.stages - 1 - self.number
        if len(self.chunks) > 1:
            ahead = 2 * ahead + (len(self.chunks) - 1) * self.group
        return min(ahead + 1, micro_batches * len(self.chunks))

    def list_fullest(self, micro_batches: int) -> list[tuple[int, list[int]]]:
        """Moments at which the stage holds most: one where chunks are equal, else one for each running chunk.

        Args:
            micro_batches: Micro-batches of a step.

        Returns:
            Pairs of the running chunk, and of how many other micro-batches wait for the backward of each chunk.
        """
        if self.has_equal_chunks:
            last = len(self.chunks) - 1
            others = self.count_held(micro_batches)[0] - 1
            return [(last, [0] * last + [others])]
        waiting = [0] * len(self.chunks)
        fullest: dict[int, list[int]] = {}
        for action in order_actions(self, self._shorten(micro_batches)):
            if not action.is_forward:
                waiting[action.chunk] -= 1
                continue
            held = fullest.get(action.chunk)
            if held is None or self._sum_layers(waiting) > self._sum_layers(held):
                fullest[action.chunk] = list(waiting)
            waiting[action.chunk] += 1
        return sorted(fullest.items())

    def _sum_layers(self, waiting: list[int]) -> int:
        """Layers whose activations wait, of all micro-batches."""
        return sum(number * len(chunk) for number, chunk in zip(waiting, self.chunks))

    def _shorten(self, micro_batches: int) -> int:
        """Find a number of micro-batches with the same fullest moments: a schedule repeats once all stages are busy."""
        enough = 2 * self.stages + 3 * self.group
        shorter = enough - enough % self.group + micro_batches % self.group
        return min(micro_batches, shorter)


def order_actions(stage: Stage, micro_batches: int) -> list[Action]:
    """The actions of one step of a stage in their order: 1F1B, interleaved where it has several chunks.

    Some forwards ahead (`Stage.count_waiting`), then one of either, then the remaining backwards: it holds the
    activations of few micro-batches. A single stage goes forward and backward by turns. Of several chunks each has a
    group of micro-batches before the next one, as many as there are stages unless
    --microbatch-group-size-per-virtual-pipeline-stage says otherwise (Narayanan et al. 2021, arXiv 2104.04473, section
    2.2).
    """
    if stage.splits_backward:
        return _fill_bubbles(stage.stages, micro_batches)[stage.number]
    forwards = list_forwards(stage, micro_batches)
    backwards = _list_backwards(stage, forwards)
    ahead = stage.count_waiting(micro_batches) - 1
    order = forwards[:ahead]
    for pair in zip(forwards[ahead:], backwards):
        order += pair
    return order + backwards[len(forwards) - ahead :]


def list_forwards(stage: Stage, micro_batches: int) -> list[Action]:
    """All forwards in their order, as an evaluation does them."""
    found = []
    for start in range(0, micro_batches, stage.group):
        group = range(start, min(start + stage.group, micro_batches))
        for chunk in range(len(stage.chunks)):
            found += [Action(True, number, chunk) for number in group]
    return found


def _list_backwards(stage: Stage, forwards: list[Action]) -> list[Action]:
    """The backwards in the order of these forwards, from the last chunk to the first."""
    last = len(stage.chunks) - 1
    return [Action(False, action.micro_batch, last - action.chunk) for action in forwards]


def find_source(stage: Stage, action: Action) -> tuple[int, Action] | None:
    """Find the stage, and its action, whose result an action takes; None if it takes nothing from another stage."""
    if action.of_weights:
        return None
    if action.is_forward and stage.starts(action.chunk):
        return None
    if not action.is_forward and stage.ends(action.chunk):
        return None
    step = 1 if action.is_forward else -1
    number = stage.number - step
    if 0 <= number < stage.stages:
        return number, action
    # from one end of the pipeline to the other, and to the chunk before or behind
    return number % stage.stages, action._replace(chunk=action.chunk - step)


# --- gradients of weights that fill what stages would wait


@dataclass
class _Progress:
    """How far one stage has come in the simulation of _fill_bubbles."""

    stage: Stage
    max_held: int  # micro-batches that any stage may hold
    forwards: list[Action]
    backwards: list[Action]
    num_forwards: int = 0
    num_backwards: int = 0
    num_weights: int = 0
    order: list[Action] = field(default_factory=list)
    done: set[Action] = field(default_factory=set)

    @property
    def has_ended(self) -> bool:
        return self.num_weights == len(self.backwards)

    def choose(self, others: "list[_Progress]") -> Action | None:
        """The next action: a backward if one can be done, else a forward, else the weights of an earlier backward.

        Args:
            others: The progress of all stages.
        """
        backward = self._find_next(self.backwards, self.num_backwards, others)
        if backward is not None:
            return backward
        waiting = self.num_forwards - self.num_backwards
        held = self.num_forwards - self.num_weights
        if waiting < self.stage.count_waiting(len(self.forwards)) and held < self.max_held:
            forward = self._find_next(self.forwards, self.num_forwards, others)
            if forward is not None:
                return forward
        if self.num_weights < self.num_backwards:
            return self.backwards[self.num_weights]._replace(of_weights=True)
        return None

    def _find_next(self, actions: list[Action], number: int, others: "list[_Progress]") -> Action | None:
        """The action of this number; None if there is none, or its input has not been computed."""
        if number == len(actions):
            return None
        action = actions[number]
        if not action.is_forward and action._replace(is_forward=True) not in self.done:
            return None
        source = find_source(self.stage, action)
        if source is not None and source[1] not in others[source[0]].done:
            return None
        return action

    def take(self, action: Action) -> None:
        """Note that an action is done."""
        self.order.append(action)
        self.done.add(action)
        if action.kind == FORWARD:
            self.num_forwards += 1
        elif action.kind == BACKWARD:
            self.num_backwards += 1
        else:
            self.num_weights += 1


@lru_cache(maxsize=4)
def _fill_bubbles(stages: int, micro_batches: int) -> list[list[Action]]:
    """The actions of every stage, where gradients of weights fill the time in which one would wait.

    All stages are simulated with actions that take equally long. Each goes no further ahead than 1F1B does, and holds
    no more than 1F1B's first (Qi et al. 2023, arXiv 2401.10241).
    """
    every = []
    for number in range(stages):
        stage = Stage(number, stages, (range(0),))
        forwards = list_forwards(stage, micro_batches)
        max_held = min(stages, micro_batches)
        every.append(_Progress(stage, max_held, forwards, _list_backwards(stage, forwards)))
    while not all(one.has_ended for one in every):
        # all choose by what was done before any of them acts
        chosen = [one.choose(every) for one in every]
        for one, action in zip(every, chosen):
            if action is not None:
                one.take(action)
    return [one.order for one in every]


# --- when each action is computed


@dataclass(frozen=True)
class TimedAction:
    """An action of a stage with its time, in milliseconds from the schedule's start."""

    stage: int  # from 0
    kind: str  # forward | backward | weights
    micro_batch: int  # from 0
    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class ActionTimes:
    """How long one action of a stage takes, of one chunk and one micro-batch, ms."""

    forward: float
    backward: float
    weights: float = 0.0  # that part of backward which comes later, where it is split
    # how long an action of each chunk takes, beside the mean of all; (): all take as long
    of_chunks: tuple[float, ...] = ()

    def find(self, action: Action) -> float:
        """How long this action takes, ms."""
        by_kind = {FORWARD: self.forward, BACKWARD: self.backward, WEIGHT_GRADIENTS: self.weights}
        longer = self.of_chunks[action.chunk] if self.of_chunks else 1.0
        return by_kind[action.kind] * longer


def simulate_schedule(stages: Sequence[Stage], micro_batches: int, times: Sequence[ActionTimes]) -> list[TimedAction]:
    """Simulate a step of a pipeline in which only earlier actions delay each. Sends between stages take no time.

    Args:
        stages: All stages, in order.
        micro_batches: Micro-batches of a step.
        times: How long the actions of each stage take.

    Returns:
        All actions of all stages, in the order of their starts.
    """
    waiting = [order_actions(stage, micro_batches)[::-1] for stage in stages]  # the next one is last
    ends_ms: list[dict[Action, float]] = [{} for _ in stages]
    free_ms = [0.0] * len(stages)
    found: list[TimedAction] = []
    goes_on = True
    while goes_on:
        goes_on = False
        for number, stage in enumerate(stages):
            while waiting[number]:
                action = waiting[number][-1]
                arrived_ms = _find_arrival(stage, action, ends_ms)
                if arrived_ms is None:
                    break
                start_ms = max(free_ms[number], arrived_ms)
                end_ms = start_ms + times[number].find(action)
                found.append(TimedAction(number, action.kind, action.micro_batch, start_ms, end_ms))
                ends_ms[number][action] = end_ms
                free_ms[number] = end_ms
                waiting[number].pop()
                goes_on = True
    return sorted(found, key=lambda one: (one.start_ms, one.stage))


def _find_arrival(stage: Stage, action: Action, ends_ms: list[dict[Action, float]]) -> float | None:
    """When what an action takes has been computed, ms; 0 if it takes nothing, None if it has not been computed yet.

    Args:
        stage: The action's.
        action: An action of the stage.
        ends_ms: When each stage has ended what it did.
    """
    source = find_source(stage, action)
    if source is None:
        return 0.0
    number, given = source
    return ends_ms[number].get(given)


def measure_bubble(stages: int, number: int, pieces: int) -> float:
    """Share of a step that equal stages wait by the schedule.

    Args:
        stages: Stages of the pipeline.
        number: Micro-batches of a step.
        pieces: Pieces of a micro-batch: chunks of layers, and three times as many where gradients of weights fill two
            thirds of what stages would wait.
    """
    waited = (stages - 1) / pieces
    return waited / (number + waited)
