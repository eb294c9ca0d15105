"""The generators of one rank as flat tensors, and back; and the form that Megatron-LM writes them in.

python  int64[627]: version, 625 integers, 1 if a Gaussian is kept        random.getstate()
numpy   int64[626]: 624 keys, position, 1 if a Gaussian is kept           numpy.random.get_state()
gauss   float64[2]: Python's and numpy's kept Gaussian, or 0
torch, cuda  uint8: torch.get_rng_state(), torch.cuda.get_rng_state()
"""

import random

import numpy as np
import torch
from torch import Tensor

from megatron_lite.checkpoint.unpickle import Inert

# Megatron's streams for dropout and their first seeds, beside --seed (its tensor_parallel/random.py, one rank of each)
STREAMS = {"data-parallel-rng": 0, "model-parallel-rng": 2718, "expert-parallel-rng": 1024}


def get_random_state(device: torch.device) -> dict[str, Tensor]:
    """The state of every generator of this process that training uses."""
    state = _pack(random.getstate(), np.random.get_state()) | {"torch": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Tensor], device: torch.device):
    """The inverse. A state that was saved without a GPU leaves the GPU's generator as it is."""
    python, numpy = _unpack(state)
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def to_megatron(states: dict[str, Tensor], seed: int) -> dict:
    """One entry of Megatron's rng_state list, from one rank's flat tensors.

    Megatron refuses an entry without its own streams, and a GPU's state is missing after a run on the CPU: those get
    the states that `seed` would have started them with.
    """
    python, numpy = _unpack(states)
    cuda = states.get("cuda")
    return {
        "random_rng_state": python,
        "np_rng_state": numpy,
        "torch_rng_state": states["torch"].cpu(),
        "cuda_rng_state": _start_state(seed) if cuda is None else cuda.cpu(),
        "rng_tracker_states": {name: _start_state(seed + offset) for name, offset in STREAMS.items()},
    }


def from_megatron(entry: dict) -> dict[str, Tensor]:
    """The inverse, of an entry as unpickle.load returns it; with cuda in any case.

    The array of numpy's keys may be left unmade, and then has (version, shape, dtype, column-major, bytes); a library
    that tells torch to trust numpy (megatron-core does) gets it made.
    """
    name, keys, *rest = entry["np_rng_state"]
    if isinstance(keys, Inert):
        keys = np.frombuffer(keys.state[4], dtype="<u4")
    states = _pack(entry["random_rng_state"], (name, keys, *rest))
    return states | {"torch": entry["torch_rng_state"], "cuda": entry["cuda_rng_state"]}


def _pack(python: tuple, numpy: tuple) -> dict[str, Tensor]:
    """The tensors of Python's and numpy's generators."""
    version, internal, python_gauss = python
    _, keys, position, has_gauss, numpy_gauss = numpy
    return {
        "python": torch.tensor([version, *internal, int(python_gauss is not None)]),
        "numpy": torch.tensor([*keys.tolist(), position, has_gauss]),
        "gauss": torch.tensor([python_gauss or 0.0, numpy_gauss], dtype=torch.float64),
    }


def _unpack(states: dict[str, Tensor]) -> tuple[tuple, tuple]:
    """The inverse: what random.setstate and numpy.random.set_state take."""
    version, *internal, has_gauss = states["python"].tolist()
    python_gauss, numpy_gauss = states["gauss"].tolist()
    *keys, position, numpy_has_gauss = states["numpy"].tolist()
    return (
        (version, tuple(internal), python_gauss if has_gauss else None),
        ("MT19937", np.array(keys, dtype=np.uint32), position, numpy_has_gauss, numpy_gauss),
    )


def _start_state(seed: int) -> Tensor:
    """A CUDA generator's state just after manual_seed: 8 bytes of seed, 8 of offset."""
    return torch.tensor([seed, 0], dtype=torch.int64).view(torch.uint8).clone()
