"""Names of PyTorch's own kernels (ATen), of cuDNN's kernels without tensor cores, and of copies."""

import re

from megatron_lite.analysis.kernels.figures import Role, TensorCores
from megatron_lite.analysis.kernels.kernel_name import KernelName, Part
from megatron_lite.analysis.kernels.name_words import template_format

_LOOPS = (
    ("vectorized_elementwise_kernel", "element by element, several per load: contiguous tensors"),
    (
        "unrolled_elementwise_kernel",
        "element by element, one per load: contiguous, but types differ or data is not aligned",
    ),
    ("index_elementwise_kernel", "element by element through an index tensor"),
    ("elementwise_kernel_with_index", "element by element, each computed from its position"),
    (
        "elementwise_kernel",
        "element by element with strides: some tensor is transposed, sliced or broadcast, which is slower",
    ),
    ("distribution_elementwise", "random numbers"),
    ("reduce_kernel", "a reduction"),
    ("CatArrayBatchedCopy", "joins tensors to one"),
)
_FUNCTIONS = re.compile(r"\w*(Functor(OnSelf)?(_\w+)?|Ops|_kernel(_cuda|_impl)?|CUDAKernelImpl|_out|_scalar|_functor)")
_WRAPPERS = (
    "gpu_kernel_impl",
    "gpu_index_kernel",
    "AUnaryFunctor",
    "BUnaryFunctor",
    "BinaryFunctor",
    "UnaryFunctor",
    "multi_tensor_apply_kernel",
)
_LISTS = re.compile(r"Metadata<(?:\w+, )?(?:\(int\))?(\d+)")
_ADAM = {
    "FusedAdamMathFunctor": "one step of Adam for many parameters at once",
    "LpNormFunctor": "norms, for clipping",
    "UnscaleFunctor": "divides gradients by the loss scale",
    "CopyFunctor": "copies",
    "ScaleFunctor": "multiplies by a factor",
}
_DIRECTIONS = {
    "HtoD": "from the host to the device",
    "DtoH": "from the device to the host",
    "DtoD": "within the device",
    "PtoP": "from one device to another",
    "HtoH": "within the host",
}
_CUDNN_SUMS = re.compile(r"convolve_sgemm|winograd\w*::|dgrad_engine|wgrad_alg\d|dgrad2d|wgrad2d|fft2d_[rc]2[rc]")


def torch_name(name: str) -> KernelName | None:
    """An ATen kernel, a list kernel, a copy, or a convolution on the CUDA cores."""
    return _copy(name) or _lists(name) or _loop(name) or _convolution(name)


def functor_of(name: str) -> str:
    """What an elementwise or reduction kernel computes: 'MulFunctor', 'silu_kernel'; '' where nothing tells."""
    words = re.findall(r"\w+", name.partition("<")[2])
    return next(
        (
            one
            for one in words
            if _FUNCTIONS.fullmatch(one) and not one.startswith(_WRAPPERS) and "elementwise" not in one
        ),
        "",
    )


def _copy(name: str) -> KernelName | None:
    found = re.match(r"\[?(?:CUDA )?(?P<what>[Mm]emcpy|[Mm]emset)\s*(?P<way>[HDP]to[HDP])?", name)
    if not found:
        return None
    if found["what"].lower() == "memset":
        return KernelName(
            name,
            "copy engine",
            Role.TRANSFER,
            TensorCores.NOT_APPLICABLE,
            "",
            (Part("Memset", "operation", "fills memory"),),
        )
    way = found["way"] or ""
    parts = [Part(way, "direction", f"copies {_DIRECTIONS.get(way, 'data')}")]
    if "Pageable" in name:
        parts.append(
            Part(
                "Pageable",
                "memory",
                "host memory that is not pinned: the copy goes by way of a buffer and the host waits for it",
            )
        )
    if "Pinned" in name:
        parts.append(Part("Pinned", "memory", "pinned host memory: the copy can run beside the host and the kernels"))
    role = Role.CAST_COPY if way == "DtoD" else Role.TRANSFER
    return KernelName(name, "copy engine", role, TensorCores.NOT_APPLICABLE, "", tuple(parts))


def _lists(name: str) -> KernelName | None:
    if "multi_tensor_apply" not in name:
        return None
    functor = functor_of(name)
    lists = _LISTS.search(name)
    parts = [
        Part(
            "multi_tensor_apply",
            "operation",
            "one launch works through lists of tensors: the foreach and fused optimizers",
        )
    ]
    if functor:
        parts.append(Part(functor, "function", _ADAM.get(functor, "what is done to each element")))
    if lists:
        parts.append(
            Part(lists[1], "lists", f"{lists[1]} list{'s' if lists[1] != '1' else ''} of tensors side by side")
        )
    return KernelName(name, "PyTorch", Role.OPTIMIZER, TensorCores.NOT_APPLICABLE, template_format(name), tuple(parts))


def _loop(name: str) -> KernelName | None:
    loop = next((one for one in _LOOPS if re.search(rf"(^|[ :]){one[0]}", name)), None)
    if not loop:
        return None
    function, reduces = functor_of(name), loop[0] == "reduce_kernel"
    parts = [Part(loop[0], "loop", loop[1])]
    if function:
        parts.append(
            Part(function, "function", "how elements are joined" if reduces else "what is computed for each element")
        )
    return KernelName(name, "PyTorch", Role.OTHER, TensorCores.NOT_APPLICABLE, template_format(name), tuple(parts))


def _convolution(name: str) -> KernelName | None:
    if not _CUDNN_SUMS.search(name):
        return None
    precision = template_format(name)
    return KernelName(
        name,
        "cuDNN",
        Role.CONVOLUTION,
        TensorCores.NO,
        precision,
        (Part("", "unit", "a convolution on the CUDA cores: the tensor cores stand idle"),),
        f"{precision or 'unknown'} operands",
    )
