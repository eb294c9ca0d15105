"""Finds the steps of a training loop that says nothing of them, in its calls of backward and of optimizers."""

import weakref

from torch.optim import Optimizer


class TrainingCalls:
    """Knows which call of backward is the outermost, and which optimizer leads: a step ends where it has stepped.

    The first optimizer that steps leads; where it is gone, the next one does.

    Attributes:
        has_leader: An optimizer has stepped.
    """

    def __init__(self) -> None:
        self.has_leader = False
        self._leader: weakref.ref[Optimizer] | None = None
        self._depth = 0  # of calls of backward: activations computed again call it within itself

    @property
    def in_backward(self) -> bool:
        """Whether a call of backward is open."""
        return self._depth > 0

    def begin_backward(self) -> bool:
        """Note that backward is called. Returns whether no other call is open."""
        self._depth += 1
        return self._depth == 1

    def end_backward(self) -> bool:
        """Note that a call of backward has ended. Returns whether no other is open."""
        self._depth -= 1
        return self._depth == 0

    def begin_leading(self, optimizer: Optimizer) -> bool:
        """Let an optimizer lead that has stepped, if no other does. Returns whether it leads from now on."""
        if self._leader is not None and self._leader() is not None:
            return False
        self._leader = weakref.ref(optimizer)
        self.has_leader = True
        return True

    def leads(self, optimizer: Optimizer) -> bool:
        """Whether a step ends where this optimizer has stepped."""
        return self._leader is not None and self._leader() is optimizer
