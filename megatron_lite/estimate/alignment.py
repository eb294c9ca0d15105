"""Sizes of matrix products that the hardware likes.

Source: NVIDIA Deep Learning Performance, "Matrix Multiplication Background User's Guide", 2023-02: tensor cores work
best on M, N and K of a multiple of 16 bytes (before cuBLAS 11 they needed that), on A100 of 128 bytes; and results are
cut into tiles of up to 256x128.
"""

MIN_BYTES = 16  # below it loads are narrow, and old libraries leave the tensor cores alone
BEST_BYTES = 128  # a whole line of the cache
TILE = 128  # edge of a usual tile of the result: a size just above a multiple leaves the last tiles nearly empty


def least_multiple(element_bytes: int) -> int:
    """Elements that a size must be a multiple of for full loads: 8 for fp16 and bf16, 4 for TF32, 16 for fp8."""
    return max(1, MIN_BYTES // element_bytes)


def best_multiple(element_bytes: int) -> int:
    """Elements that a size should be a multiple of: 64 for fp16 and bf16, 32 for TF32, 128 for fp8."""
    return max(1, BEST_BYTES // element_bytes)


def padded(size: int, multiple: int) -> int:
    """The next multiple: padded(50257, 64) is 50304."""
    return -(-size // multiple) * multiple
