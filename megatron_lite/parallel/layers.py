"""What is put on transformer layers from outside: torch.compile, and recomputation in backward.

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

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_lite.config.plan import Compilation
from megatron_lite.config.shape import ModelShape
from megatron_lite.config.world import World
from megatron_lite.errors import first_line
from megatron_lite.machine import find_missing_compiler, read_processor
from megatron_lite.model.attention import Attend
from megatron_lite.model.gpt import GELU_CUBIC, GELU_SCALE, gelu_tanh

TRAINING_AND_EVALUATION = 2  # the variants of a layer that a run needs
LOSS_PIECES = 2  # forward and backward, in evaluation the same
OLDEST = (7, 0)  # compute capability of the first GPUs that Triton compiles for
PLACE = "TORCHINDUCTOR_CACHE_DIR"  # inductor's, and Triton's below it, unless TRITON_CACHE_DIR names another


def no_compiler(world: World) -> str:
    """Why inductor can make no kernels for this rank's GPU, with the remedy; empty: it can, or there is no GPU."""
    if not world.gpus:
        return ""
    capability = torch.cuda.get_device_capability(world.gpu)
    if capability < OLDEST:
        return (
            "Triton compiles for GPUs of compute capability 7.0 and later, "
            f"and this one has {'.'.join(map(str, capability))}"
        )
    if missing := find_missing_compiler(on_gpu=True, environ=os.environ):
        return missing
    # the first thing that Triton does is to build and load a helper that launches its kernels, which fails without
    # libcuda, the C library's headers or a folder whose files may be run
    try:
        from triton.runtime.driver import driver

        driver.active  # noqa: B018  made here
    except CalledProcessError as error:
        return f"Triton does not start here ({error.cmd[0]} failed to build what launches its kernels, see above)"
    except (ImportError, AssertionError, RuntimeError) as error:
        return f"Triton does not start here ({first_line(error)})"
    return ""


def count_compilations(shape: ModelShape, compilation: Compilation) -> int:
    """The most graphs that torch.compile compiles if the layers' inputs keep their form while training."""
    # a layer that scales by its number is a variant of its own
    layers = TRAINING_AND_EVALUATION * (shape.num_layers if shape.query_key_layer_scaling else 1)
    return layers + (LOSS_PIECES if compilation.loss else 0)


def compile_layers(layers: nn.ModuleList, backend: str, graphs: int):
    """Compile each layer's forward at its first call. Parameters keep their names.

    Call it before `recompute_layers`, which then repeats compiled layers. graphs: of `count_compilations`.
    """
    import torch._dynamo  # takes a second, which runs without the flag do not pay

    dynamo = torch._dynamo.config
    # would cut each layer at bucket edges, although buckets are reduced between layers anyway
    dynamo.optimize_ddp = False
    # beyond its limit torch would go on eagerly, without a word
    dynamo.recompile_limit = max(dynamo.recompile_limit, 2 * graphs)
    for layer in layers:
        if layer.mlp.activation is gelu_tanh:
            layer.mlp.activation = gelu_as_sigmoid
        layer.forward = compile_function(layer.forward, backend)


def gelu_as_sigmoid(x: Tensor) -> Tensor:
    """gelu_tanh's formula, which inductor fuses; of torch's own function it would keep the tanh,
    which is slow on CPUs."""
    wide = x.float()
    return (wide * torch.sigmoid(GELU_SCALE * wide * (1 + GELU_CUBIC * wide * wide))).to(x.dtype)


def compile_function(function: Callable, backend: str) -> Callable:
    """`function`, compiled for each shape at its first call."""
    return torch.compile(function, backend=backend, dynamic=False)


def describe_compilation(compilation: Compilation, backend: str, num_layers: int) -> str:
    """What is compiled, or why nothing is, and the flag for the other choice."""
    why = compilation.why
    if not compilation.layers:
        return f"torch.compile: none{why and f' ({why})'}"
    what = f"each of {num_layers} layers" + " and the loss" * compilation.loss
    return (
        f"compiling {what} with {backend}{why and f' ({why})'}: the steps in "
        "which that happens take longer and are left out of averages"
    )


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
    home = home if home.is_absolute() else Path(environ.get("HOME", "/nonexistent")) / ".cache"
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
    kind = [told[name] for name in telling if name in told] or [platform.machine(), platform.processor()]
    return hashlib.sha256("\n".join(kind).encode()).hexdigest()[:8]


# --- what a rank does otherwise than the model's classes do


def replace_method(module: nn.Module, name: str, function: Callable[..., Tensor]) -> None:
    """Have one module call `function` instead of its class's method of this name, with the same arguments."""
    assert callable(getattr(module, name))
    setattr(module, name, function)


# --- recomputation


def recompute_layers(layers: nn.ModuleList, chunks: Iterable[range], count: Callable[[int], int]):
    """Have the first layers of each chunk forget their activations and compute them again in backward.

    count: How many of them, of a chunk of so many layers.

    With --recompute-granularity selective that is none: core attention alone is recomputed, by the attention kernel.
    """
    by_number = dict(layers.named_children())
    for chunk in chunks:
        for number in chunk[: count(len(chunk))]:
            by_number[str(number)].forward = recomputed(by_number[str(number)].forward)


def recompute_attention(attend: Attend) -> Attend:
    """Attention that keeps its arguments only."""
    return attend if attend.recomputes else replace(attend, function=recomputed(attend.function), recomputes=True)


def recomputed(function):
    """`function`, keeping its inputs only. Random states are restored, so that dropout masks repeat."""
    return partial(checkpoint, function, use_reentrant=False)
