"""How many layers forget their activations."""


def recomputed_layers(granularity: str | None, method: str | None, number: int | None, num_layers: int) -> int:
    """The first so many of `num_layers`, by --recompute-granularity, --recompute-method and --recompute-num-layers.

    uniform: every layer (Megatron keeps one activation per chunk of --recompute-num-layers; here one per layer, which
    costs a little more memory and the same time). block: the first --recompute-num-layers layers. selective: none.
    """
    if granularity != "full":
        return 0
    return num_layers if method == "uniform" else min(number or 1, num_layers)
