"""Switches dropout off, which two runs cannot share, and remembers where it was."""

from collections.abc import Callable

from torch.nn import functional

from megatron_lite.instruments.replacing import get_function, put_in_place

BY_PROBABILITY = ("dropout", "alpha_dropout", "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout")
ATTENTION = "scaled_dot_product_attention"


class WithoutDropout:
    """Dropout of this process, which does nothing.

    Attributes:
        found: Probability by the function of torch that was asked for it.
    """

    def __init__(self) -> None:
        self.found: dict[str, float] = {}

    def attach(self) -> None:
        """Start, for the rest of the process."""
        for name in BY_PROBABILITY:
            put_in_place(functional, name, self._leave_out(name))
        attend = get_function(functional, ATTENTION)

        def attend_to_all(*arguments: object, dropout_p: float = 0.0, **named: object) -> object:
            # query, key, value, mask, and then the probability
            if len(arguments) > 4:
                dropout_p = float(arguments[4])  # type: ignore[arg-type]
                arguments = (*arguments[:4], 0.0, *arguments[5:])
            self._note(ATTENTION, dropout_p)
            return attend(*arguments, **named)

        put_in_place(functional, ATTENTION, attend_to_all)

    def _leave_out(self, name: str) -> Callable[..., object]:
        original = get_function(functional, name)

        def leave(input: object, p: float = 0.5, training: bool = True, inplace: bool = False) -> object:
            if training:
                self._note(name, p)
            return original(input, p, False, inplace)

        return leave

    def _note(self, name: str, probability: float) -> None:
        if probability:
            self.found.setdefault(name, float(probability))
