"""Small mixtures of experts that between them turn every switch of a router."""

from dataclasses import replace

from megatron_lite.config.shape import ExpertShape, ModelShape
from support.model_variants import PLAIN

PLAIN_EXPERTS = ExpertShape(number=4, layers=(True, True), topk=2, ffn_hidden_size=48)
DENSE = replace(
    PLAIN,
    linear_bias=False,
    qkv_bias=False,
    activation="swiglu",
    normalization="RMSNorm",
    position_embedding="rope",
    tied_embeddings=False,
)
DEEPSEEK = replace(
    PLAIN_EXPERTS,
    number=8,
    topk=4,
    groups=4,
    group_topk=2,
    score_function="sigmoid",
    scaling_factor=2.5,
    expert_bias=True,
    balancing=(("seq_aux_loss", 0.01),),
    shared_ffn_hidden_size=32,
    layers=(False, True),
)


def mix(experts: ExpertShape, **changes) -> ModelShape:
    """A small model with these experts. changes: to its other sizes."""
    return replace(DENSE, experts=experts, **changes)


EXPERT_VARIANTS = {
    "mixtral": mix(replace(PLAIN_EXPERTS, balancing=(("aux_loss", 0.1),))),
    "mixtral, gelu, tied": mix(PLAIN_EXPERTS, activation="gelu_erf", tied_embeddings=True),
    "qwen": mix(
        replace(PLAIN_EXPERTS, number=8, pre_softmax=True, shared_ffn_hidden_size=32, shared_gate=True),
        num_query_groups=2,
    ),
    "deepseek": mix(DEEPSEEK),
    "z loss": mix(replace(PLAIN_EXPERTS, pre_softmax=True, z_loss_coeff=0.01)),
    "loss of sequences": mix(replace(PLAIN_EXPERTS, balancing=(("seq_aux_loss", 0.1),))),
    "global loss": mix(replace(PLAIN_EXPERTS, balancing=(("global_aux_loss", 0.1),))),
    "two losses": mix(replace(PLAIN_EXPERTS, balancing=(("aux_loss", 0.1), ("seq_aux_loss", 0.2)))),
    "sinkhorn, one expert": mix(replace(PLAIN_EXPERTS, topk=1, sinkhorn=True), activation="gelu_erf"),
    "sinkhorn, two experts": mix(replace(PLAIN_EXPERTS, sinkhorn=True)),
    "every second layer": mix(replace(PLAIN_EXPERTS, layers=(True, False))),
    "capacity": mix(replace(PLAIN_EXPERTS, capacity_factor=0.5, balancing=(("aux_loss", 0.1),))),
    "router in fp32": mix(replace(PLAIN_EXPERTS, router_dtype="fp32")),
    "router in fp64": mix(replace(PLAIN_EXPERTS, router_dtype="fp64")),
    "shares on input": mix(replace(PLAIN_EXPERTS, topk=1, pre_softmax=True, probs_on_input=True)),
}
