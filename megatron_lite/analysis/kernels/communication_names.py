"""Names of NCCL's and RCCL's kernels."""

import re

from megatron_lite.analysis.kernels.figures import Role, TensorCores
from megatron_lite.analysis.kernels.kernel_name import KernelName, Part

_NCCL = re.compile(r"nccl(?P<generation>Sym(?:k)?DevKernel|DevKernel|Kernel)_(?P<operation>[A-Za-z]+)(?P<rest>\w*)")
_OPERATIONS = {
    "AllReduce": "every rank gets the sum (or another reduction) of all ranks' data",
    "ReduceScatter": "every rank gets its share of the sum",
    "AllGather": "every rank gets all ranks' shares",
    "Broadcast": "one rank's data goes to all",
    "Reduce": "one rank gets the sum",
    "SendRecv": "ranks send to each other: point to point, all-to-all",
    "Generic": "any operation: the name does not say which",
}
_ALGORITHMS = {
    "RING": "around a ring of GPUs: best bandwidth, latency grows with their number",
    "TREE": "along a tree: low latency among many nodes",
    "NVLS": "NVSwitch does the sum",
    "NVLSTREE": "NVSwitch within a node, a tree between nodes",
    "COLLNET": "the network does the sum (SHARP)",
    "PAT": "a parallel tree for shares",
}
_PROTOCOLS = {
    "LL128": "low latency at nearly full bandwidth, over NVLink",
    "SIMPLE": "full bandwidth, for large messages",
    "LL": "low latency at half the bandwidth, for small messages",
}
_TYPES = {
    "float": "fp32",
    "f32": "fp32",
    "half": "fp16",
    "f16": "fp16",
    "bf16": "bf16",
    "__nv_bfloat16": "bf16",
    "int8_t": "bytes",
    "int8": "bytes",
    "u8": "bytes",
    "i8": "bytes",
    "f8e4m3": "fp8",
    "f8e5m2": "fp8",
    "double": "fp64",
    "f64": "fp64",
}
REPRESENTATIVE = (
    "NCCL compiles one kernel for a whole class of operations and calls the code that is really wanted from it: "
    "LL, Sum and RING may stand in the name while another protocol runs"
)


def communication_name(name: str) -> KernelName | None:
    """ncclKernel_AllReduce_RING_LL_Sum_float(...), ncclDevKernel_AllReduce_Sum_bf16_RING_LL(...)."""
    found = _NCCL.search(name)
    if not found:
        return None
    operation, words = found["operation"], found["rest"].strip("_")
    parts = [Part(operation, "operation", _OPERATIONS.get(operation, "a collective"))]
    precision = ""
    tokens = re.findall(r"__nv_bfloat16|int8_t|u?int\d+_t|[A-Za-z0-9]+", words)
    for token in tokens:
        if token in _ALGORITHMS or re.match("NVLS|COLLNET", token):
            parts.append(Part(token, "algorithm", _ALGORITHMS.get(token, "NVSwitch or the network takes part")))
        elif token in _PROTOCOLS:
            parts.append(Part(token, "protocol", _PROTOCOLS[token]))
        elif token in _TYPES:
            precision = _TYPES[token]
            parts.append(Part(token, "format", f"elements are {precision}"))
        elif token in ("Sum", "Prod", "Max", "Min", "MinMax", "PreMulSum", "SumPostDiv", "Avg"):
            parts.append(Part(token, "reduction", "how elements of two ranks become one"))
    note = REPRESENTATIVE if any(part.field == "protocol" for part in parts) else ""
    return KernelName(
        name,
        "NCCL",
        Role.COMMUNICATION,
        TensorCores.NOT_APPLICABLE,
        "" if precision == "bytes" else precision,
        tuple(parts),
        note=note,
    )
