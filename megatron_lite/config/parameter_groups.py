"""Which parameters have a weight decay, and which a learning rate of their own."""

from dataclasses import dataclass

from megatron_lite.config.args import OptimizerArgs

EMBEDDING_AND_OUTPUT = ("embedding.word_embeddings.weight", "output_layer.weight")  # what --decoupled-lr is for
NORMS_OF_HEADS = ("q_layernorm.", "k_layernorm.")  # what --apply-wd-to-qk-layernorm is for


@dataclass(frozen=True)
class ParameterGroup:
    """What parameters of an optimizer have in common."""

    decays: bool = True
    decoupled: bool = False  # has the learning rate of --decoupled-lr


# in the order in which Megatron-LM has them
DEFAULT, DECOUPLED, WITHOUT_DECAY = ParameterGroup(), ParameterGroup(decoupled=True), ParameterGroup(decays=False)
GROUPS = (DEFAULT, DECOUPLED, WITHOUT_DECAY)


def find_group(name: str, dimensions: int, o: OptimizerArgs) -> ParameterGroup:
    """The group of one parameter: matrices and embeddings decay, vectors (biases, norms) do not, but those that a flag names.

    Args:
        name: Megatron-Core's.
        dimensions: Of its tensor.
        o: The optimizer's flags.
    """
    if o.decoupled_lr is not None and name in EMBEDDING_AND_OUTPUT:
        return DECOUPLED
    is_norm_of_heads = any(norm in name for norm in NORMS_OF_HEADS)
    if dimensions > 1 or (o.apply_wd_to_qk_layernorm and is_norm_of_heads):
        return DEFAULT
    return WITHOUT_DECAY
