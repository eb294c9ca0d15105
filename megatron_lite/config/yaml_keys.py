"""Keys of Megatron-LM's YAML files that are not named as the flag that sets them."""

from collections.abc import Iterable

# Fields of Megatron's configuration classes, and the flags that fill them.
SAME = {
    "fp4": "fp4-format",
    "fp4-param": "fp4-param-gather",
    "fp8": "fp8-format",
    "fp8-param": "fp8-param-gather",
    "init-method": "init-method-xavier-uniform",
    "layernorm-zero-centered-gamma": "apply-layernorm-1p",
    "microbatch-group-size-per-vp-stage": "microbatch-group-size-per-virtual-pipeline-stage",
    "num-layers-in-first-pipeline-stage": "decoder-first-pipeline-num-layers",
    "num-layers-in-last-pipeline-stage": "decoder-last-pipeline-num-layers",
    "num-moe-experts": "num-experts",
    "overlap-p2p-comm-warmup-flush": "overlap-p2p-communication-warmup-flush",
    "virtual-pipeline-model-parallel-size": "num-virtual-stages-per-pipeline-rank",
}
OTHERWISE_NAMED = {
    "barrier-with-L1-time": "--no-barrier-with-level-1-timing",
    "overlap-p2p-comm": "--no-overlap-p2p-communication",
}
# What Megatron's YAML calls each activation; its gelu is the exact one, whatever is fused.
ACTIVATIONS = {
    "swiglu": "--swiglu",
    "silu": "--swiglu",  # with gated_linear_unit
    "squaredrelu": "--squared-relu",
    "squared_relu": "--squared-relu",
    "gelu": "--no-bias-gelu-fusion",
}
ACTIVATION_KEYS = ("activation-func", "gated-linear-unit")


def plain(name: str) -> str:
    """A key as a flag spells it, without its dashes in front: bias_swiglu_fusion -> bias-swiglu-fusion."""
    key = name.lstrip("-").replace("_", "-")
    return SAME.get(key, key)


def switches_off(names: Iterable[str]) -> dict[str, str]:
    """{key: the one of `names` that switches it off}: bias-swiglu-fusion -> --no-bias-swiglu-fusion.

    The key is the flag's name without its "no" or "disable", or that behind apply, enable, perform or use.
    """
    off = dict(OTHERWISE_NAMED)
    for name in sorted(names, key=lambda name: ("disable" in name, name)):  # of two spellings, --no-...
        words = name[2:].split("-")
        negation = next((word for word in words if word in ("no", "disable")), None)
        if negation:
            words.remove(negation)
            for before in ("", "apply-", "enable-", "perform-", "use-"):
                off.setdefault(before + "-".join(words), name)
    return off


def activation_words(values: dict[str, object]) -> tuple[list[tuple[str, list[str]]], str | None]:
    """(words, mistake) of activation_func and gated_linear_unit, in {key: value} of the whole file."""
    activation, gated = values.get("activation-func"), values.get("gated-linear-unit")
    swiglu = values.get("swiglu") is True
    if activation is None:
        if gated and not swiglu:
            return [], f"gated_linear_unit: {_shown(gated)}: needs activation_func: swiglu; add it, or give false."
        return [], None
    flag = ACTIVATIONS.get(activation) if isinstance(activation, str) else None
    if flag is None or (activation == "silu" and not (gated or swiglu)):
        return [], f"activation_func: {activation}: choose from swiglu, squaredrelu, gelu."
    if gated and flag != "--swiglu":
        return (
            [],
            f"gated_linear_unit: {_shown(gated)}: goes with activation_func: swiglu only, not {activation}; give false.",
        )
    asked = [name for name in ("--swiglu", "--squared-relu") if values.get(plain(name)) is True and name != flag]
    if asked:
        key = plain(asked[0]).replace("-", "_")
        return [], f"{key}: true: contradicts activation_func: {activation}; keep one."
    return [(flag, [])], None


def _shown(value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
