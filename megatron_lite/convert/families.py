"""Which Hugging Face model a shape is, or a config.json describes."""

from types import ModuleType

from megatron_lite.config.shape import ModelShape
from megatron_lite.convert import gpt2, llama
from megatron_lite.convert.config_file import ConfigFile
from megatron_lite.errors import ConfigError

ARCHITECTURES = {gpt2.ARCHITECTURE: gpt2, **dict.fromkeys(llama.MODEL_TYPES, llama)}
TITLES = {gpt2: "GPT-2", llama: "Llama, Qwen2 and Qwen3"}


def family_of_shape(shape: ModelShape) -> ModuleType:
    """gpt2 or llama. ConfigError with a line for each flag that the nearer of the two does not know."""
    family = llama if shape.position_embedding == "rope" else gpt2
    # Scores divided by a layer's number and multiplied back, and a softmax in fp32, are no other arithmetic.
    wrong = [
        f"{flag}: Hugging Face's {TITLES[family]} have {instead}; only a model trained with that can be converted."
        for flag, instead in family.objections(shape)
    ]
    if wrong:
        raise ConfigError(wrong)
    return family


def family_of_config(config: ConfigFile) -> ModuleType:
    """gpt2 or llama. CheckpointError for any other architecture."""
    named = config.values.get("architectures")
    name = str(named[0]) if isinstance(named, list) and named else None
    config.refuse_unless("quantization_config", (None,), "quantised weights cannot be trained here")
    if name not in ARCHITECTURES:
        raise config.wrong("architectures", named, f"known here are {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]
