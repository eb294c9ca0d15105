"""Names the modules and parameters of a model as it has them on one rank, whatever wraps it there."""

from collections.abc import Iterator

from torch import nn

# classes that hold the model as `module`, or as what the second word says
WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "Float16Module": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "OptimizedModule": "_orig_mod",
    "LocalSGD": "module",
}
INNER = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}  # names of what wraps parts of a model
LAYER_NUMBER = "layer_number"  # attribute of Megatron-Core's layers: their place in the whole model, from 1
SHARED_EMBEDDING = "shared_embedding"  # attribute of the weight that it shares between first and last stage
EMBEDDING_NAME = "embedding.word_embeddings.weight"


def unwrap(module: nn.Module) -> nn.Module:
    """Find the model that wrappers of parallelism hold.

    Args:
        module: What a script calls.
    """
    while type(module).__name__ in WRAPPERS:
        inner = getattr(module, WRAPPERS[type(module).__name__], None)
        if not isinstance(inner, nn.Module):
            return module
        module = inner
    return module


def list_modules(model: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """List the modules of a model with their names.

    Args:
        model: Without wrappers.
        prefix: Before each name: "" for a process' first model.
    """
    renamed = _find_layers_of_stages(model)
    for name, module in model.named_modules():
        yield prefix + _clean(name, renamed), module


def list_parameters(model: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Parameter]]:
    """List the parameters of a model with their names; one that has several names comes with each.

    Args:
        model: Without wrappers.
        prefix: Before each name: "" for a process' first model.
    """
    renamed = _find_layers_of_stages(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if getattr(parameter, SHARED_EMBEDDING, False):
            yield prefix + EMBEDDING_NAME, parameter
        else:
            yield prefix + _clean(name, renamed), parameter


def _find_layers_of_stages(model: nn.Module) -> dict[str, str]:
    """Find layers that a stage numbers from 0: what their names begin with, and what they begin with in the whole."""
    renamed = {}
    for name, module in model.named_modules():
        number = getattr(module, LAYER_NUMBER, None)
        folder, _, index = name.rpartition(".")
        if isinstance(number, int) and index.isdigit() and folder and int(index) != number - 1:
            renamed[f"{name}."] = f"{folder}.{number - 1}."
    return renamed


def _clean(name: str, renamed: dict[str, str]) -> str:
    for own, whole in renamed.items():
        if f"{name}.".startswith(own):
            name = (whole + f"{name}."[len(own) :]).removesuffix(".")
            break
    return ".".join(part for part in name.split(".") if part not in INNER)
