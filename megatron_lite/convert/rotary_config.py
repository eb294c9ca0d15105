"""Rotary frequencies in config.json, both ways: plain, or scaled for sequences longer than pretraining's."""

import math
from typing import TypedDict

from megatron_lite.config.shape import ModelShape
from megatron_lite.convert.config_file import ConfigFile
from megatron_lite.model.rotary_frequencies import (
    LLAMA_FAST_TURNS,
    LLAMA_LENGTH,
    LLAMA_SLOW_TURNS,
    compute_rotary_scale,
)

# config.json's keys for the numbers of Llama 3.1 that there is no flag for
LLAMA_3 = {
    "low_freq_factor": LLAMA_SLOW_TURNS,
    "high_freq_factor": LLAMA_FAST_TURNS,
    "original_max_position_embeddings": LLAMA_LENGTH,
}
MAX_ROTARY_BASE = 2**53  # whole numbers above are not exact


class Rotation(TypedDict, total=False):
    """Fields of ModelShape on rotary frequencies."""

    rotary_base: float
    rotary_seq_len_interpolation_factor: float
    rope_scaling_factor: float
    yarn_scaling_factor: float
    yarn_original_max_position_embeddings: int
    yarn_beta_fast: float
    yarn_beta_slow: float
    yarn_mscale: float
    yarn_mscale_all_dim: float
    yarn_round_to_int: bool


def build_rope_scaling(shape: ModelShape) -> dict[str, object] | None:
    """Make config.json's part on scaled rotary frequencies; None where they are plain.

    rope_scaling is the spelling that old and new versions of transformers understand.
    """
    if shape.rotary_seq_len_interpolation_factor is not None:
        return {"rope_type": "linear", "factor": float(shape.rotary_seq_len_interpolation_factor)}
    if shape.rope_scaling_factor is not None:
        return {"rope_type": "llama3", "factor": float(shape.rope_scaling_factor), **LLAMA_3}
    if shape.yarn_scaling_factor is None:
        return None
    yarn: dict[str, object] = {
        "rope_type": "yarn",
        "factor": float(shape.yarn_scaling_factor),
        "original_max_position_embeddings": shape.yarn_original_max_position_embeddings,
        "beta_fast": shape.yarn_beta_fast,
        "beta_slow": shape.yarn_beta_slow,
        "truncate": shape.yarn_round_to_int,
    }
    if shape.latent is not None:
        # by which scores are sharpened, too
        yarn |= {"mscale": shape.yarn_mscale, "mscale_all_dim": shape.yarn_mscale_all_dim}
    if shape.latent is None or not (shape.yarn_mscale and shape.yarn_mscale_all_dim):
        yarn["attention_factor"] = compute_rotary_scale(shape)
    return yarn


def read_rotation(config: ConfigFile, positions: int, usual_base: int) -> Rotation:
    """Read the rotation in either spelling: rope_parameters, or rope_theta and rope_scaling.

    Args:
        config: Config of the model.
        positions: The model's max_position_embeddings, which stand for the original ones where those are left out.
        usual_base: The architecture's rope_theta, where that is left out.

    Raises:
        CheckpointError: The rotation does not exist here.
    """
    key = "rope_parameters" if config.values.get("rope_parameters") else "rope_scaling"
    rope = config.values.get(key) or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise config.wrong(key, rope, "all layers rotate alike here")
    inner = ConfigFile(config.path, {**config.values, **rope})
    inner.refuse_unless("partial_rotary_factor", (1.0, None), "heads of this architecture rotate as a whole")
    # whole numbers, as --rotary-base and its likes are
    base = float(inner.whole("rope_theta", usual_base, MAX_ROTARY_BASE))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "linear":
        return {"rotary_base": base, "rotary_seq_len_interpolation_factor": float(inner.whole("factor"))}
    if kind == "llama3":
        for name, value in LLAMA_3.items():
            inner.refuse_unless(name, (value,), "only Llama 3.1's own numbers exist here")
        return {"rotary_base": base, "rope_scaling_factor": inner.number("factor")}
    if kind == "yarn":
        rotation = _read_yarn(inner, positions)
        rotation["rotary_base"] = base
        return rotation
    if kind != "default":
        raise config.wrong(key, rope, "only linear, llama3 and yarn exist here")
    return {"rotary_base": base}


def _read_yarn(rope: ConfigFile, positions: int) -> Rotation:
    """Read the numbers of YaRN.

    Args:
        rope: The configuration that has them among its keys.
        positions: The original ones, where those are left out.
    """
    factor = rope.number("factor")
    # transformers takes both, or neither
    both = rope.values.get("mscale") and rope.values.get("mscale_all_dim")
    mscale = rope.number("mscale") if both else 1.0
    all_dim = rope.number("mscale_all_dim") if both else 0.0
    if rope.values.get("attention_factor") is not None:
        mscale = _find_mscale(rope, factor)
        all_dim = 0.0
    return {
        "yarn_scaling_factor": factor,
        "yarn_original_max_position_embeddings": rope.whole("original_max_position_embeddings", positions),
        "yarn_beta_fast": rope.number("beta_fast") if rope.values.get("beta_fast") else 32.0,
        "yarn_beta_slow": rope.number("beta_slow") if rope.values.get("beta_slow") else 1.0,
        "yarn_mscale": mscale,
        "yarn_mscale_all_dim": all_dim,
        "yarn_round_to_int": rope.switch("truncate", True),
    }


def _find_mscale(rope: ConfigFile, factor: float) -> float:
    """The --mscale that gives the attention_factor of a config.json, which is 1 + mscale log(factor) / 10."""
    given = rope.number("attention_factor")
    if factor <= 1:
        rope.refuse_unless("attention_factor", (1.0,), "it is 1 here where factor is at most 1")
        return 1.0
    exact = (given - 1) / (0.1 * math.log(factor))
    if exact < 0:
        raise rope.wrong("attention_factor", given, "it is at least 1 here")
    # the usual ones are short
    short = round(exact, 6)
    return short if math.isclose(short, exact, rel_tol=1e-12) else exact
