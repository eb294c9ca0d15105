"""The part of a step that concerns multi-token prediction: it scales the losses of further tokens, and takes them."""

import torch
from torch import Tensor

from megatron_lite.config.plan import Plan
from megatron_lite.model.gpt import GPT
from megatron_lite.parallel.replica import Replica


def name_prediction(depth: int) -> str:
    """Megatron-LM's name of the loss of a depth, counted from 0."""
    return f"mtp_{depth + 1} loss"


class PredictionStep:
    """The part of a training step that concerns further tokens."""

    def __init__(self, plan: Plan, replica: Replica):
        self._plan = plan
        self._depths = plan.shape.mtp_num_layers
        # the last stage has them, in its last chunk
        self._states = [chunk.mtp.state for chunk in replica.chunks if isinstance(chunk, GPT) and chunk.mtp is not None]
        self._micro_batches = 1

    @property
    def is_used(self) -> bool:
        """Whether the run predicts further tokens."""
        return self._depths > 0

    def begin(self, loss_scale: Tensor, micro_batches: int) -> None:
        """Begin a step; called before its first forward.

        Args:
            loss_scale: Loss scale of the optimizer.
            micro_batches: Micro-batches of the step.
        """
        self._micro_batches = micro_batches
        per_token = self._plan.args.training.calculate_per_token_loss
        for state in self._states:
            state.begin_step()
            state.per_token = per_token
            # as the main loss: a mean over micro-batches, unless sums over tokens are divided at the end
            state.loss_scale = loss_scale if per_token else loss_scale / micro_batches

    def end(self, device: torch.device) -> Tensor | None:
        """End a step.

        Args:
            device: Device of the model.

        Returns:
            This rank's share of each depth's mean loss, fp32, which all ranks add up; None without further tokens.
        """
        if not self.is_used:
            return None
        losses = torch.zeros(self._depths, dtype=torch.float32, device=device)
        layout = self._plan.layout
        for state in self._states:
            for depth, loss in state.losses.items():
                losses[depth] = loss / (self._micro_batches * layout.data * layout.tensor)
        return losses
