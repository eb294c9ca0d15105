"""Windows of attention in config.json, both ways: ours are the tokens before a token, sliding_window counts it, too."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypedDict

from megatron_lite.config.shape import ModelShape
from megatron_lite.convert.config_file import ConfigFile

SLIDING = "sliding_attention"
FULL = "full_attention"
WHOLE_ATTENTION = "attention always reaches back to the start here"
MAX_WINDOW_LAYERS = 28  # transformers' own default


@dataclass(frozen=True)
class WindowKeys:
    """How an architecture tells of its windows."""

    size: int | None  # sliding_window where it is left out
    has_switch: bool = False  # there is a window only with use_sliding_window
    by_layer: bool = False  # only some layers may have one
    # of those, without layer_types: the first layers have none. False: versions of transformers differ on it
    begins_late: bool = True


class AttentionWindow(TypedDict, total=False):
    """Fields of ModelShape on windows."""

    window: int
    window_layers: str


def list_objections(shape: ModelShape, keys: WindowKeys | None) -> Iterator[tuple[str, str]]:
    """List what windows cannot be: a flag, and what there is instead.

    Args:
        shape: Shape of the model.
        keys: Keys of its architecture; None: it has no windows.
    """
    if shape.window is None:
        return
    if keys is None:
        yield "--window-size", "attention to all tokens before"
    elif shape.window_layers and not keys.by_layer:
        yield "--window-attn-skip-freq", "the window in each layer"


def list_notes(shape: ModelShape) -> Iterator[str]:
    """Note what older versions of transformers do not read."""
    sliding = [shape.find_window(layer) is not None for layer in range(shape.num_layers)]
    if sliding != sorted(sliding):
        yield "--window-attn-skip-freq: layer_types has it, which transformers reads from 4.53 on"


def build_window(shape: ModelShape, keys: WindowKeys | None) -> dict[str, object]:
    """Make config.json's part on windows.

    Args:
        shape: Shape of the model.
        keys: Keys of its architecture; None: it has no windows.
    """
    if keys is None:
        return {"use_sliding_window": False}
    values: dict[str, object] = {"sliding_window": None if shape.window is None else shape.window + 1}
    if keys.has_switch:
        values["use_sliding_window"] = shape.window is not None
    if keys.by_layer and shape.window is not None:
        types = [FULL if shape.find_window(layer) is None else SLIDING for layer in range(shape.num_layers)]
        values["layer_types"] = types
        values["max_window_layers"] = types.index(SLIDING) if SLIDING in types else shape.num_layers
    return values


def read_window(config: ConfigFile, keys: WindowKeys | None, num_layers: int) -> AttentionWindow:
    """Read which layers have a window, and of how many tokens.

    Args:
        config: Config of the model.
        keys: Keys of its architecture; None: it has no windows.
        num_layers: Number of layers of the model.

    Raises:
        CheckpointError: Keys contradict each other, or there are windows where the architecture has none.
    """
    layer_types = _read_layer_types(config, num_layers)
    size = None
    if keys is None:
        config.refuse_unless("use_sliding_window", (False, None), WHOLE_ATTENTION)
        config.refuse_unless("sliding_window", (None, 0), WHOLE_ATTENTION)
    elif not keys.has_switch or config.switch("use_sliding_window", False):
        given = config.get("sliding_window", keys.size)
        size = None if given is None else config.whole("sliding_window", keys.size)
    if keys is None or size is None:
        if layer_types is not None and any(layer_types):
            raise config.wrong("layer_types", config.values["layer_types"], WHOLE_ATTENTION)
        return {}
    sliding = [True] * num_layers
    if keys.by_layer:
        sliding = layer_types or _choose_late_layers(config, keys, num_layers)
    elif layer_types is not None and not all(layer_types):
        raise config.wrong("layer_types", config.values["layer_types"], "sliding_window is of all layers here")
    if not any(sliding):
        return {}
    pattern = "" if all(sliding) else "".join(str(int(one)) for one in sliding)
    return {"window": size - 1, "window_layers": pattern}


def _read_layer_types(config: ConfigFile, num_layers: int) -> list[bool] | None:
    """Whether each layer has a window, by layer_types; None without that key.

    Args:
        config: Config of the model.
        num_layers: Number of layers of the model.

    Raises:
        CheckpointError: There are other types, or more or fewer of them.
    """
    types = config.values.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, list) or any(one not in (FULL, SLIDING) for one in types):
        raise config.wrong("layer_types", types, f"only {FULL} and {SLIDING} exist here")
    if len(types) != num_layers:
        raise config.wrong("layer_types", types, f"must have num_hidden_layers, {num_layers}, entries")
    return [one == SLIDING for one in types]


def _choose_late_layers(config: ConfigFile, keys: WindowKeys, num_layers: int) -> list[bool]:
    """Whether each layer has a window, by max_window_layers, before which there is none.

    Args:
        config: Config of the model.
        keys: Keys of its architecture.
        num_layers: Number of layers of the model.

    Raises:
        CheckpointError: Which layers that is depends on the version of transformers.
    """
    if not keys.begins_late:
        raise config.wrong("use_sliding_window", True, "which layers that is needs layer_types")
    first = config.values.get("max_window_layers", MAX_WINDOW_LAYERS)
    if first != 0:
        first = config.whole("max_window_layers", MAX_WINDOW_LAYERS)
    return [layer >= first for layer in range(num_layers)]
