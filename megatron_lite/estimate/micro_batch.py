"""The moments of one micro-batch's forward and backward at which memory can be highest."""

from collections import Counter
from functools import cached_property

from megatron_lite.config.plan import Plan
from megatron_lite.config.recompute import recomputed_layers
from megatron_lite.estimate.activations import (
    backward_of_layer,
    forward_of_layer,
    input_of_layer,
    kept_at_ends,
    kept_by_embedding,
    kept_by_layer,
    layer_parameters,
    total,
)
from megatron_lite.estimate.attention_kernel import setting_of
from megatron_lite.estimate.liveness import Sized, gradient_of
from megatron_lite.estimate.loss import (
    in_cross_entropy,
    in_output_backward,
    output_weights,
)
from megatron_lite.estimate.peak_point import moment, times
from megatron_lite.estimate.prediction import Moment
from megatron_lite.estimate.states import earlier_gradients, gradient_weight, gradients_stay
from megatron_lite.phases import Phase


def layers_recomputed(plan: Plan) -> int:
    """The first so many forget their activations."""
    m = plan.args.model
    return recomputed_layers(m.recompute_granularity, m.recompute_method, m.recompute_num_layers, plan.shape.num_layers)


class MicroBatch:
    """The last of a step: it finds the gradients of those before it, and so holds most. `always`: what lives anyway."""

    def __init__(self, plan: Plan, always: Counter[Sized]):
        self._shape, self._setting = plan.shape, setting_of(plan)
        self._recomputed = layers_recomputed(plan)
        self._base = always + earlier_gradients(plan)
        self._weight, self._stay = gradient_weight(plan), gradients_stay(plan)

    def moments(self) -> list[Moment]:
        """In the order of the step."""
        number, setting = self._shape.num_layers, self._setting
        at_loss = self._base + self._below(number) + kept_at_ends(setting)
        # what lives grows or shrinks evenly over layers of one kind: the first and the last of each kind are enough
        turns = sorted({number, self._recomputed + 1, self._recomputed, 1} - {0, number + 1}, reverse=True)
        return [
            *self._last_forward(),
            moment(Phase.FORWARD, "cross entropy", at_loss + in_cross_entropy(setting)),
            *(
                [moment(Phase.BACKWARD, "cross entropy", at_loss + in_cross_entropy(setting))]
                if setting.in_fp16
                else []
            ),
            moment(Phase.BACKWARD, "output layer", at_loss + in_output_backward(setting, self._weight)),
            *(self._backward(turn) for turn in turns),
            moment(Phase.BACKWARD, "embedding", self._base + self._in_embedding),
        ]

    def _below(self, number: int) -> Counter[Sized]:
        """What the first `number` layers keep."""
        again = min(number, self._recomputed)
        return times(kept_by_layer(self._setting), number - again) + times(input_of_layer(self._setting), again)

    def _last_forward(self) -> list[Moment]:
        """Of a layer that is recomputed nothing: it holds more when it is."""
        number = self._shape.num_layers
        if number <= self._recomputed:
            return []
        inside = forward_of_layer(self._setting)
        tensors = self._base + self._below(number - 1) + kept_by_embedding(self._setting) + inside.tensors
        return [moment(Phase.FORWARD, f"layer {number}, {inside.operation}", tensors)]

    def _backward(self, number: int) -> Moment:
        inside = backward_of_layer(self._setting, self._weight, self._stay, number <= self._recomputed)
        outside = self._base + self._below(number - 1) + kept_by_embedding(self._setting) + self._made_before(number)
        where = f"layer {number} computed again" if inside.again else f"layer {number}, {inside.operation}"
        return moment(Phase.BACKWARD, where, outside + inside.tensors)

    def _made_before(self, number: int) -> Counter[Sized]:
        """Weights' gradients that live when backward comes to this layer. That of a tied output layer waits for the
        embedding's."""
        made = Counter()
        if self._stay or self._shape.tied_embeddings:
            made += output_weights(self._setting, self._weight)
        if self._stay:
            made[self._weight] += (self._shape.num_layers - number) * layer_parameters(self._setting)
        return made

    @cached_property
    def _in_embedding(self) -> Counter[Sized]:
        """The gradient of its matrix, which is added to that of a tied output layer: in a third tensor on a CPU, where a
        recorder watches, and in fp16, where the loss still holds the first (see rehearsal/kernels.py)."""
        made, words = self._made_before(0), output_weights(self._setting, self._weight)
        if self._stay and self._shape.position_embedding == "learned_absolute":
            made[self._weight] += self._shape.max_position_embeddings * self._shape.hidden_size
        computed = made + words + Counter([gradient_of(self._setting.hidden(""))])
        beside = self._shape.tied_embeddings and (self._setting.on_cpu or self._setting.in_fp16)
        return max(computed, made + words + words, key=total) if beside else computed
