"""The generators of one rank as tensors, and back: Python's, numpy's, torch's and the device's."""

import random

import numpy as np
import torch
from torch import Tensor

PYTHON_STATE, NUMPY_STATE = 625, 624  # integers of a Mersenne Twister, Python's with its position


def random_state(device: torch.device) -> dict[str, Tensor]:
    """python: int64 [627] version, state, whether there is a gauss; numpy: int64 [626] state, position, has_gauss;

    gauss: float64 [2], the normal number that either has in store; torch, cuda: uint8, as torch gives them.
    """
    version, internal, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state()
    state = {
        "python": torch.tensor([version, *internal, int(gauss is not None)]),
        "numpy": torch.tensor([*keys.tolist(), position, has_gauss]),
        "gauss": torch.tensor([gauss or 0.0, cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Tensor], device: torch.device):
    """The inverse. A state that was saved without a GPU leaves the GPU's generator as it is."""
    version, *internal, has_gauss = state["python"].tolist()
    gauss, cached = state["gauss"].tolist()
    random.setstate((version, tuple(internal), gauss if has_gauss else None))
    *keys, position, numpy_has_gauss = state["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, np.uint32), position, numpy_has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
