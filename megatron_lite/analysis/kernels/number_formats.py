"""How kernels and profilers spell number formats."""

import re

FORMATS = {
    "bf16": "bf16",
    "f16": "fp16",
    "fp16": "fp16",
    "tf32": "tf32",
    "f32": "fp32",
    "fp32": "fp32",
    "f64": "fp64",
    "e4m3": "fp8",
    "e5m2": "fp8",
    "f8": "fp8",
    "fp8": "fp8",
    "s8": "int8",
    "i8": "int8",
    "u8": "int8",
    "int8": "int8",
}
ACCUMULATORS = {"h": "fp16", "s": "fp32", "d": "fp64", "i": "int32", "c": "complex fp32", "z": "complex fp64"}
MIXED = ("fp8", "bf16", "fp16")  # what tensor cores are for

# As torch writes the type of an operator's argument -> (format, bytes of an element).
TENSOR_TYPES = {
    "float": ("fp32", 4),
    "double": ("fp64", 8),
    "c10::Half": ("fp16", 2),
    "c10::BFloat16": ("bf16", 2),
    "long int": ("int64", 8),
    "long": ("int64", 8),
    "long long": ("int64", 8),
    "int": ("int32", 4),
    "short int": ("int16", 2),
    "short": ("int16", 2),
    "signed char": ("int8", 1),
    "unsigned char": ("uint8", 1),
    "bool": ("bool", 1),
    "c10::Float8_e4m3fn": ("fp8", 1),
    "c10::Float8_e5m2": ("fp8", 1),
    "c10::Float8_e4m3fnuz": ("fp8", 1),
    "c10::Float8_e5m2fnuz": ("fp8", 1),
    "c10::complex<float>": ("complex64", 8),
    "c10::complex<double>": ("complex128", 16),
}
FORMAT_BYTES = {name: size for name, size in TENSOR_TYPES.values()} | {"fp16/bf16": 2, "tf32": 4}
_CPP_TYPES = {"__nv_bfloat16": "bf16", "bfloat16_t": "bf16", "BFloat16": "bf16", "__half": "fp16", "bhalf_t": "bf16", "half_t": "fp16",
              "_Float16": "fp16", "Half": "fp16", "float_e4m3_t": "fp8", "float_e5m2_t": "fp8", "tfloat32_t": "tf32", "float": "fp32",
              "double": "fp64"}  # fmt: skip
_CPP_TYPE = re.compile(r"(?<![A-Za-z0-9_])(?:\w+::)*(" + "|".join(_CPP_TYPES) + r")(?![A-Za-z0-9_])")


def template_format(name: str) -> str:
    """The narrowest number format among a C++ name's template arguments: what the operands most likely have; '' without any."""
    arguments = name.partition("<")[2]
    formats = [_CPP_TYPES[one] for one in _CPP_TYPE.findall(arguments.rpartition(">(")[0] or arguments)]
    return next((one for one in (*MIXED, "tf32") if one in formats), formats[0] if formats else "")
