"""What layers keep from forward to backward, and the most that lives while backward goes through one of them."""

from collections import Counter
from dataclasses import dataclass
from functools import cache

from megatron_lite.estimate.layer import layer_ops
from megatron_lite.estimate.norms import norm_ops
from megatron_lite.estimate.sizes import NORMS, Setting
from megatron_lite.estimate.tape import Op, Sized, Tape, gradient_of


@dataclass(frozen=True)
class Highest:
    """tensors: at the highest point, the layer's kept ones among them. operation: whose forward or backward runs then.
    again: it is a forward that is repeated in backward."""

    tensors: Counter[Sized]
    operation: str
    again: bool = False


def total(tensors: Counter[Sized]) -> int:
    """Bytes of all together."""
    return sum(sized.num_bytes * times for sized, times in tensors.items())


@cache
def kept_by_layer(setting: Setting) -> Counter[Sized]:
    """Of one layer's forward; the layer's input belongs to it, its result does not."""
    return _kept(layer_ops(setting), setting)


def kept_at_ends(setting: Setting) -> Counter[Sized]:
    """By the embedding's dropout, and by the last norm up to the output layer's input."""
    ops = norm_ops(setting, "final_layernorm", "in", "normed", setting.shape.hidden_size)
    output = Op("output_layer", ("normed",), (), ("normed",))
    return kept_by_embedding(setting) + _kept((*ops, output), setting)


def kept_by_embedding(setting: Setting) -> Counter[Sized]:
    """Dropout's mask."""
    return Counter([setting.mask()] if setting.shape.hidden_dropout else [])


def input_of_layer(setting: Setting) -> Counter[Sized]:
    """All that a recomputed layer keeps."""
    return Counter([setting.hidden("inputs of recomputed layers")])


@cache
def forward_of_layer(setting: Setting) -> Highest:
    """Of a layer that is not recomputed."""
    tape = _forward(layer_ops(setting), setting)
    return Highest(tape.live.most, tape.live.most_in)


@cache
def backward_of_layer(setting: Setting, weight: Sized, stays: bool, recomputed: bool) -> Highest:
    """weight: the gradient of one parameter's element, which lives on behind the layer's backward if it `stays`."""
    tape, source = Tape(layer_ops(setting), weight, stays), setting.hidden(NORMS)
    tape.begin("in", source, held=recomputed)
    if recomputed:
        tape.live.add(gradient_of(source), "")  # of the layer's result: it is there before anything is computed again
    tape.forward(again=recomputed)
    again_bytes = tape.live.most_bytes if recomputed else 0
    if not recomputed:
        tape.live.forget_most()
    tape.backward("out", source, counted=not recomputed)
    return Highest(tape.live.most, tape.live.most_in, tape.live.most_bytes == again_bytes)


def _kept(ops: tuple[Op, ...], setting: Setting) -> Counter[Sized]:
    return +_forward(ops, setting).live.tensors


def _forward(ops: tuple[Op, ...], setting: Setting) -> Tape:
    tape = Tape(ops)
    tape.begin("in", setting.hidden(NORMS))
    tape.forward()
    return tape


def layer_parameters(setting: Setting) -> int:
    """Of one layer."""
    return sum(op.weights for op in layer_ops(setting))
