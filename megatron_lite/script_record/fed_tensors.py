"""Records the tensors that models and losses are given, and gives them those of another run."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from megatron_lite.formats.prove_record import FED_INPUTS, FED_TARGETS
from megatron_lite.instruments.replacing import get_function, put_in_place
from megatron_lite.script_record.kept_tensors import KeptTensors

# losses of torch.nn.functional, whose second argument says what is right
LOSSES = (
    "cross_entropy",
    "nll_loss",
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "kl_div",
)


class GivenTensors:
    """The inputs of models and the targets of losses, by number of the micro-batch over all steps.

    Args:
        kept: Where copies go.
        file: With the tensors to take instead; "": the script's own.
    """

    def __init__(self, kept: KeptTensors, file: str) -> None:
        self._kept = kept
        self._fed: dict[str, np.ndarray] = {}
        if file:
            with np.load(Path(file)) as arrays:
                self._fed = dict(arrays)
        self._micro_batch = -1
        self._targets = 0
        self._is_open = False  # within the losses: one loss calls another

    def attach(self) -> None:
        """See losses, for the rest of the process."""
        for name in LOSSES:
            self._see_loss(name)

    def take_inputs(
        self, arguments: tuple[object, ...], named: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """Begin the next micro-batch.

        Args:
            arguments: Of the call of a model.
            named: Likewise.

        Returns:
            Those to call it with.
        """
        self._micro_batch += 1
        self._targets = 0
        count = 0

        def take(tensor: Tensor) -> Tensor:
            nonlocal count
            taken = self._exchange(f"{FED_INPUTS}/{self._micro_batch}/{count}", tensor)
            count += 1
            return taken

        changed: tuple[tuple[object, ...], dict[str, object]] = tree_map_only(Tensor, take, (arguments, named))
        return changed

    def _see_loss(self, name: str) -> None:
        compute = get_function(functional, name)

        def compute_with(input: Tensor, target: object, *arguments: object, **named: object) -> object:
            if self._is_open or self._micro_batch < 0 or not isinstance(target, Tensor):
                return compute(input, target, *arguments, **named)
            self._is_open = True
            try:
                target = self._exchange(f"{FED_TARGETS}/{self._micro_batch}/{self._targets}", target)
                self._targets += 1
                return compute(input, target, *arguments, **named)
            finally:
                self._is_open = False

        put_in_place(functional, name, compute_with)

    def _exchange(self, key: str, own: Tensor) -> Tensor:
        """Take the tensor of the other run; note the script's own without one."""
        if own.requires_grad or type(own) is not Tensor:
            # what another stage or network computed is no data
            return own
        if key in self._fed:
            return torch.from_numpy(self._fed[key]).to(own.device, own.dtype)
        self._kept.keep_array(key, own)
        return own
