"""Random states: as flat tensors, and as Megatron writes them.

python  int64[627]: version, 625 integers, 1 if a Gaussian is kept        random.getstate()
numpy   int64[626]: 624 keys, position, 1 if a Gaussian is kept           numpy.random.get_state()
gauss   float64[2]: Python's and numpy's kept Gaussian, or 0
torch, cuda  uint8: torch.get_rng_state(), torch.cuda.get_rng_state()
"""

import numpy as np
import torch
from torch import Tensor

from megatron_lite.checkpoint.megatron_unpickle import Inert

# Megatron's streams for dropout and their first seeds, beside --seed (its tensor_parallel/random.py, one rank of each)
STREAMS = {"data-parallel-rng": 0, "model-parallel-rng": 2718, "expert-parallel-rng": 1024}


def to_megatron(states: dict[str, Tensor], seed: int) -> dict:
    """One entry of Megatron's rng_state list, from one rank's flat tensors.

    Megatron refuses an entry without its own streams, and a GPU's state is missing after a run on the CPU: those get
    the states that `seed` would have started them with.
    """
    version, *internal, has_gauss = states["python"].tolist()
    python_gauss, numpy_gauss = states["gauss"].tolist()
    *keys, position, numpy_has_gauss = states["numpy"].tolist()
    cuda = states.get("cuda")
    return {
        "random_rng_state": (version, tuple(internal), python_gauss if has_gauss else None),
        "np_rng_state": ("MT19937", np.array(keys, dtype=np.uint32), position, numpy_has_gauss, numpy_gauss),
        "torch_rng_state": states["torch"].cpu(),
        "cuda_rng_state": _fresh(seed) if cuda is None else cuda.cpu(),
        "rng_tracker_states": {name: _fresh(seed + offset) for name, offset in STREAMS.items()},
    }


def from_megatron(entry: dict) -> dict[str, Tensor]:
    """The inverse, of an entry as megatron_unpickle.load returns it; with cuda in any case."""
    version, internal, python_gauss = entry["random_rng_state"]
    _, keys, position, has_gauss, numpy_gauss = entry["np_rng_state"]
    return {
        "python": torch.tensor([version, *internal, int(python_gauss is not None)]),
        "numpy": torch.tensor([*_integers(keys), position, has_gauss]),
        "gauss": torch.tensor([python_gauss or 0.0, numpy_gauss], dtype=torch.float64),
        "torch": entry["torch_rng_state"],
        "cuda": entry["cuda_rng_state"],
    }


def _integers(keys: Inert | np.ndarray) -> list[int]:
    """The numbers of a uint32 array: one that is left unmade keeps (version, shape, dtype, column-major, bytes).

    A library that tells torch to trust numpy (megatron-core does) gets it made.
    """
    return (keys if isinstance(keys, np.ndarray) else np.frombuffer(keys.state[4], dtype="<u4")).tolist()


def _fresh(seed: int) -> Tensor:
    """A CUDA generator's state just after manual_seed: 8 bytes of seed, 8 of offset."""
    return torch.tensor([seed, 0], dtype=torch.int64).view(torch.uint8).clone()
