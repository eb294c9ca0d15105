"""Groups of parameters: with or without weight decay, and with a learning rate of their own."""

from dataclasses import dataclass

from megatron_lite.config.args import OptimizerArgs

EMBEDDING_AND_OUTPUT = ("embedding.word_embeddings.weight", "output_layer.weight")  # what --decoupled-lr is for
EMBEDDINGS = ("embedding.", "output_layer.")  # of which one size is the vocabulary's, or that of positions
NORMS_OF_HEADS = ("q_layernorm.", "k_layernorm.")  # what --apply-wd-to-qk-layernorm is for


USUAL = "usual"
OWN = "decoupled"  # that of --decoupled-lr
OF_WIDTH = "of the width"  # --use-mup's, which differs from the usual one by the model's width


@dataclass(frozen=True)
class ParameterGroup:
    """Settings that parameters of an optimizer have in common."""

    decays: bool = True
    rate: str = USUAL  # the learning rate: USUAL, OWN or OF_WIDTH
    is_orthogonal: bool = False  # a matrix that Muon updates


# in the order in which Megatron-LM has them
ORTHOGONAL = ParameterGroup(is_orthogonal=True)
GROUPS = (
    ORTHOGONAL,
    *(ParameterGroup(decays, rate) for decays in (True, False) for rate in (USUAL, OF_WIDTH, OWN)),
)


def find_group(name: str, dimensions: int, o: OptimizerArgs, width: float = 1.0) -> ParameterGroup:
    """The group of one parameter.

    Matrices and embeddings decay, vectors (biases, norms) do not, but for those that a flag names.

    Args:
        name: Megatron-Core's.
        dimensions: Number of dimensions of its tensor.
        o: The optimizer's flags.
        width: ModelShape.mup_width_mult.
    """
    if o.decoupled_lr is not None and name in EMBEDDING_AND_OUTPUT:
        return ParameterGroup(rate=OWN)
    if o.optimizer == "muon" and dimensions == 2 and name not in EMBEDDING_AND_OUTPUT:
        return ORTHOGONAL
    is_norm_of_heads = any(norm in name for norm in NORMS_OF_HEADS)
    decays = dimensions > 1 or (o.apply_wd_to_qk_layernorm and is_norm_of_heads)
    if width == 1:
        return ParameterGroup(decays)
    # under muP, a matrix both of whose sizes grow with the width
    is_hidden = dimensions > 1 and not name.startswith(EMBEDDINGS)
    changes = not is_hidden if o.optimizer == "sgd" else is_hidden
    return ParameterGroup(decays, OF_WIDTH if changes else USUAL)


def list_groups(o: OptimizerArgs, width: float = 1.0) -> list[ParameterGroup]:
    """The groups that Megatron-LM makes with these flags, also those without a parameter.

    The arguments are those of find_group.
    """
    rates = {USUAL}
    others = [ORTHOGONAL] if o.optimizer == "muon" else []
    if o.decoupled_lr is not None:
        rates.add(OWN)
    if width != 1:
        rates.add(OF_WIDTH)
    usual = [kind for kind in GROUPS if kind.rate in rates and not kind.is_orthogonal]
    return others + [kind for kind in usual if kind.decays or kind.rate == _find_vector_rate(o, width)]


def _find_vector_rate(o: OptimizerArgs, width: float) -> str:
    """The learning rate of biases and norms."""
    return OF_WIDTH if width != 1 and o.optimizer == "sgd" else USUAL
