"""Which work is done in pieces that stay in a processor's cache."""

BYTES_OF_16_BITS = 2


def works_in_pieces(on_cpu: bool, element_bytes: int) -> bool:
    """Whether GELU and the logits' product are: on a CPU in 16 bits, where torch's own ways of doing them whole are slower. In fp32
    they are not (docs/benchmarks.md)."""
    return on_cpu and element_bytes == BYTES_OF_16_BITS
