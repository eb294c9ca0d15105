"""Which rank writes which tensor: replicas hold the same ones, so that each of them writes a part."""

from torch import Tensor


def share_of(tensors: dict[str, Tensor], rank: int, size: int) -> dict[str, Tensor]:
    """The part of `tensors` that `rank` of `size` writes: about the same number of bytes each, largest first.

    Scalars are the first rank's. Every rank comes to the same division, as names and shapes are the same.
    """
    loads, mine = [0] * size, {}
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].nbytes, item[0])):
        lightest = loads.index(min(loads)) if tensor.ndim else 0
        loads[lightest] += tensor.nbytes
        if lightest == rank:
            mine[name] = tensor
    return mine
