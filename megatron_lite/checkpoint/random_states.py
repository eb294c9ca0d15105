"""The generators of one rank as flat tensors, and back; and the form that Megatron-LM writes them in.

python  int64[627]: version, 625 integers, 1 if a Gaussian is kept        random.getstate()
numpy   int64[626]: 624 keys, position, 1 if a Gaussian is kept           numpy.random.get_state()
gauss   float64[2]: Python's and numpy's kept Gaussian, or 0
torch, cuda  uint8: torch.get_rng_state(), torch.cuda.get_rng_state()
"""

import random

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_lite.checkpoint.megatron_state import PythonState, RandomState
from megatron_lite.checkpoint.unpickle import Inert

NumpyState = tuple[str, NDArray[np.uint32], int, int, float]  # numpy.random.get_state()

# Megatron's streams for dropout and their first seeds, beside --seed (its tensor_parallel/random.py, one rank of each)
STREAMS = {"data-parallel-rng": 0, "model-parallel-rng": 2718, "expert-parallel-rng": 1024}


def get_random_state(device: torch.device) -> dict[str, Tensor]:
    """The state of every generator of this process that training uses."""
    python: PythonState = random.getstate()
    numpy = np.random.get_state(legacy=True)
    if isinstance(numpy, dict):
        raise TypeError(f"numpy's global generator is {numpy['bit_generator']}, not MT19937")
    state = _pack(python, numpy)
    state["torch"] = torch.get_rng_state()
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    """Continue with the generators of `get_random_state`.

    A state that was saved without a GPU leaves the GPU's generator as it is.
    """
    python, numpy = _unpack(state)
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def to_megatron(states: dict[str, Tensor], seed: int) -> RandomState:
    """Make an entry of Megatron's rng_state list.

    Megatron refuses an entry without its own streams, and a GPU's state is missing after a run on the CPU: those get
    the states that --seed would have started them with.

    Args:
        states: One rank's flat tensors, by kind.
        seed: The value of --seed.
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


def from_megatron(entry: RandomState) -> dict[str, Tensor]:
    """Make a rank's flat tensors, by kind, with cuda in any case.

    Args:
        entry: Entry of Megatron's rng_state list, as unpickle.load returns it. The array of numpy's keys may be left
            unmade, and then has (version, shape, dtype, column-major, bytes); a library that tells torch to trust
            numpy (megatron-core does) gets it made.
    """
    name, keys, position, has_gauss, gauss = entry["np_rng_state"]
    if isinstance(keys, Inert) and isinstance(keys.state, tuple):
        keys = np.frombuffer(keys.state[4], dtype="<u4")
    if not isinstance(keys, np.ndarray):
        raise TypeError(f"the keys of numpy's generator are a {type(keys).__name__}")
    states = _pack(entry["random_rng_state"], (name, keys, position, has_gauss, gauss))
    states["torch"] = entry["torch_rng_state"]
    states["cuda"] = entry["cuda_rng_state"]
    return states


def _pack(python: PythonState, numpy: NumpyState) -> dict[str, Tensor]:
    """The tensors of Python's and numpy's generators."""
    version, internal, python_gauss = python
    _, keys, position, has_gauss, numpy_gauss = numpy
    keeps_gauss = int(python_gauss is not None)
    return {
        "python": torch.tensor([version, *internal, keeps_gauss]),
        "numpy": torch.tensor([*keys.tolist(), position, has_gauss]),
        "gauss": torch.tensor([python_gauss or 0.0, numpy_gauss], dtype=torch.float64),
    }


def _unpack(states: dict[str, Tensor]) -> tuple[PythonState, NumpyState]:
    """The arguments of random.setstate and numpy.random.set_state, from the tensors of `_pack`."""
    version, *internal, has_gauss = states["python"].tolist()
    python_gauss, numpy_gauss = states["gauss"].tolist()
    python: PythonState = (version, tuple(internal), python_gauss if has_gauss else None)
    *keys, position, numpy_has_gauss = states["numpy"].tolist()
    numpy: NumpyState = ("MT19937", np.array(keys, dtype=np.uint32), position, numpy_has_gauss, numpy_gauss)
    return python, numpy


def _start_state(seed: int) -> Tensor:
    """A CUDA generator's state just after manual_seed: 8 bytes of seed, 8 of offset."""
    return torch.tensor([seed, 0], dtype=torch.int64).view(torch.uint8).clone()
