"""The memory of GELU: torch's kernel keeps its input. On a CPU in 16 bits the tanh formula is computed in pieces
(model/gelu.py): its slope is kept instead, and of the pieces that are at work there are copies in fp32."""

from megatron_lite.estimate.liveness import Op, Sized
from megatron_lite.estimate.sizes import FP32, Setting
from megatron_lite.model.kernel_choice import COPIES, PIECE, works_in_pieces
from megatron_lite.units import count


def gelu_op(setting: Setting, inner: Sized) -> Op:
    """From the value "fc1" to "activated", both of the size `inner`."""
    in_pieces = works_in_pieces(setting.on_cpu, setting.element_bytes)
    if not in_pieces or setting.shape.activation != "gelu_tanh":
        return Op("gelu", ("fc1",), (("activated", inner),), ("fc1",))
    elements = min(PIECE * setting.threads, setting.tokens * setting.shape.ffn_hidden_size)
    pieces = Sized(
        "workspace",
        "pieces of GELU in fp32",
        COPIES * FP32 * elements,
        f"{FP32} bytes x {COPIES} x {count(elements)} elements",
    )
    return Op("gelu", ("fc1",), (("activated", inner),), keeps_too=(inner,), forward_scratch=(pieces,))
