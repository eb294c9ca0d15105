"""Puts on transformer layers, from outside, torch.compile and recomputation in backward.

--torch-compile layers compiles one layer at a time: layers are alike, so that one compilation serves all; and gradients
of a layer are there for DistributedDataParallel to reduce as soon as its backward is through, which a graph of the
whole model would keep until its end. On GPUs the loss is compiled, too.
"""

import hashlib
import os
import platform
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from subprocess import CalledProcessError
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_lite.config.plan import Compilation, Plan
from megatron_lite.config.world import World
from megatron_lite.errors import first_line
from megatron_lite.machine import find_missing_compiler, read_processor
from megatron_lite.model.attention import Attend
from megatron_lite.model.gpt import TransformerLayer
from megatron_lite.model.mlp import GELU_CUBIC, GELU_SCALE, gelu_tanh

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
TRAINING_AND_EVALUATION = 2  # the variants of a layer that a run needs
LOSS_PIECES = 2  # forward and backward, in evaluation the same
# graphs of a layer, at most, whose attention calls a kernel that is not compiled (model/flash_attention.py)
LAYER_PIECES = 6
OLDEST = (7, 0)  # compute capability of the first GPUs that Triton compiles for
PLACE = "TORCHINDUCTOR_CACHE_DIR"  # inductor's, and Triton's below it, unless TRITON_CACHE_DIR names another


def no_compiler(world: World) -> str:
    """Why inductor can make no kernels for this rank's GPU, with the remedy; empty: it can, or there is no GPU."""
    if not world.gpus:
        return ""
    capability = torch.cuda.get_device_capability(world.gpu)
    if capability < OLDEST:
        major, minor = capability
        return f"Triton compiles for GPUs of compute capability 7.0 and later, and this one has {major}.{minor}"
    if missing := find_missing_compiler(on_gpu=True, environ=os.environ):
        return missing
    # the first thing that Triton does is to build and load a helper that launches its kernels, which fails without
    # libcuda, the C library's headers or a folder whose files may be run
    try:
        from triton.runtime.driver import driver

        # made when it is read
        driver.active  # noqa: B018
    except CalledProcessError as error:
        return f"Triton does not start here ({error.cmd[0]} failed to build what launches its kernels, see above)"
    except (ImportError, AssertionError, RuntimeError) as error:
        return f"Triton does not start here ({first_line(error)})"
    return ""


def count_compilations(plan: Plan) -> int:
    """The most graphs that torch.compile compiles if the layers' inputs keep their form while training."""
    shape = plan.shape
    windows = {shape.find_window(layer) for layer in range(shape.num_layers)}
    # a layer that scales by its number is a variant of its own
    variants = shape.num_layers if shape.query_key_layer_scaling else len(windows)
    takes_flash = plan.masks_attention or shape.softmax_type != "vanilla"
    pieces = LAYER_PIECES if takes_flash else 1
    of_layers = TRAINING_AND_EVALUATION * variants * pieces
    of_loss = LOSS_PIECES if plan.compilation.loss else 0
    return of_layers + of_loss


def compile_layers(layers: Iterable[TransformerLayer], backend: str, graphs: int) -> None:
    """Compile each layer's forward at its first call. Parameters keep their names.

    Call it before `recompute_layers`, which then repeats compiled layers.

    Args:
        layers: A model's transformer layers.
        backend: The name of torch.compile's backend.
        graphs: The most graphs that will be compiled, of `count_compilations`.
    """
    # takes a second, which runs without the flag do not pay
    import torch._dynamo

    dynamo = torch._dynamo.config
    # would cut each layer at bucket edges, although buckets are reduced between layers anyway
    dynamo.optimize_ddp = False
    # beyond its limit torch would go on eagerly, without a word
    dynamo.recompile_limit = max(dynamo.recompile_limit, 2 * graphs)
    for layer in layers:
        if layer.mlp.activation is gelu_tanh:
            layer.mlp.activation = gelu_as_sigmoid
        compiled = compile_function(layer.forward, backend)
        replace_method(layer, "forward", partial(_call_with_any_edges, compiled))


def _call_with_any_edges(compiled: Callable[..., Tensor], hidden_BTH: Tensor, *others: Tensor | None) -> Tensor:
    """Call a compiled layer, whose graph serves any number of documents.

    Args:
        compiled: The layer's forward.
        hidden_BTH: The layer's input.
        others: The further arguments of TransformerLayer.forward.
    """
    edges_E = others[0] if others else None
    if edges_E is not None:
        # imported by compile_layers already
        from torch._dynamo import maybe_mark_dynamic

        # with each new size torch would compile anew, up to its limit
        maybe_mark_dynamic(edges_E, 0)
    return compiled(hidden_BTH, *others)


def gelu_as_sigmoid(x: Tensor) -> Tensor:
    """GELU by gelu_tanh's formula, which inductor fuses.

    Of torch's own function it would keep the tanh, which is slow on CPUs.
    """
    wide = x.float()
    inner = GELU_SCALE * wide * (1 + GELU_CUBIC * wide * wide)
    active = wide * torch.sigmoid(inner)
    return active.to(x.dtype)


def compile_function(function: Callable[Arguments, Result], backend: str) -> Callable[Arguments, Result]:
    """Have torch.compile compile a function for each shape at its first call. backend: the compiler's name."""
    return torch.compile(function, backend=backend, dynamic=False)


def describe_compilation(compilation: Compilation, backend: str, num_layers: int) -> str:
    """A line on what is compiled, or why nothing is, and the flag for the other choice.

    Args:
        compilation: What the plan compiles.
        backend: The name of torch.compile's backend.
        num_layers: Transformer layers of this rank.
    """
    why = f" ({compilation.why})" if compilation.why else ""
    if not compilation.layers:
        return f"torch.compile: none{why}"
    what = f"each of {num_layers} layers"
    if compilation.loss:
        what += " and the loss"
    consequence = "the steps in which that happens take longer and are left out of averages"
    return f"compiling {what} with {backend}{why}: {consequence}"


# --- where compiled kernels are kept from one run to the next: torch's own place is a folder in /tmp, which a new
# container or a restarted machine has lost


def keep_compiled(environ: MutableMapping[str, str]) -> Path | None:
    """Have inductor keep what it compiles in the user's cache folder, which all ranks of a machine share: it writes
    whole files.

    Before torch's compiler is imported, which settles on a folder then. None, and all as torch has it, if the user
    named a folder or none can be written.
    """
    if PLACE in environ:
        return None
    # XDG_CACHE_HOME counts only if absolute (XDG Base Directory Specification 0.8)
    home = Path(environ.get("XDG_CACHE_HOME", ""))
    if not home.is_absolute():
        home = Path(environ.get("HOME", "/nonexistent")) / ".cache"
    folder = home / "megatron_lite" / "compiled" / f"torch-{torch.__version__}-{_hash_processor()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return None
    if not os.access(folder, os.W_OK | os.X_OK):
        return None
    environ[PLACE] = str(folder)
    return folder


def _hash_processor() -> str:
    """Eight digits for this kind of processor: C++ is compiled for the very one, under a key that does not name it, and
    machines of a cluster may share a home."""
    told = read_processor()
    telling = ("vendor_id", "model name", "flags", "Features", "CPU part")
    kind = [told[name] for name in telling if name in told]
    if not kind:
        kind = [platform.machine(), platform.processor()]
    digest = hashlib.sha256("\n".join(kind).encode())
    return digest.hexdigest()[:8]


# --- what a rank does otherwise than the model's classes do


def replace_method(module: nn.Module, name: str, function: Callable[..., Tensor]) -> None:
    """Have one module call a function instead of its class's method.

    Args:
        module: The module.
        name: The method's name.
        function: Is called with the same arguments.
    """
    assert callable(getattr(module, name))
    setattr(module, name, function)


# --- recomputation


def recompute_layers(layers: nn.ModuleList, chunks: Iterable[range], count: Callable[[int], int]) -> None:
    """Have the first layers of each chunk forget their activations and compute them again in backward.

    Args:
        layers: This rank's transformer layers, by their numbers in the whole model.
        chunks: The numbers of each chunk's layers.
        count: How many layers are recomputed, of a chunk of so many.

    With --recompute-granularity selective that is none: core attention alone is recomputed, by the attention kernel.
    """
    by_number = dict(layers.named_children())
    for chunk in chunks:
        recompute_all(by_number[str(number)] for number in chunk[: count(len(chunk))])


def recompute_all(layers: Iterable[nn.Module]) -> None:
    """Have each of the layers forget its activations and compute them again in backward."""
    for layer in layers:
        replace_method(layer, "forward", recomputed(layer.forward))


def recompute_attention(attend: Attend) -> Attend:
    """Attention that keeps its arguments only."""
    if attend.recomputes:
        return attend
    return replace(attend, function=recomputed(attend.function), recomputes=True)


def recomputed(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make a function keep its inputs only. Random states are restored, so that dropout masks repeat."""
    return partial(checkpoint, function, use_reentrant=False)
