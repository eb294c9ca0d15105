"""Multi-token prediction: layers behind the decoder that predict the tokens after the next one.

DeepSeek-V3 (arXiv 2412.19437, section 2.2). The layer of depth d takes the hidden state of a token by depth d - 1 and
the embedding of the token d places further on, and predicts the token after that. Embedding and output projection are
the model's own. Parameter names are those of Megatron-Core's MultiTokenPredictionBlock.

Letters: B batch, T positions, H hidden, R rotated channels.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron_lite.config.shape import ModelShape
from megatron_lite.model.attached_loss import attach_loss
from megatron_lite.model.norm import Norm


class Targets(NamedTuple):
    """Tokens of sequences, and what is predicted of them."""

    tokens_BT: Tensor
    labels_BT: Tensor
    positions_BT: Tensor  # or (1, T), where all sequences have the same
    mask_BT: Tensor | None  # 1 where a label counts, else 0; None: all count

    def shift(self) -> "Targets":
        """The same for the next token of each one; the last, which has none, gets zeros and does not count."""
        mask_BT = torch.ones_like(self.labels_BT, dtype=torch.float32) if self.mask_BT is None else self.mask_BT
        return Targets(
            tokens_BT=_shift(self.tokens_BT),
            labels_BT=_shift(self.labels_BT),
            positions_BT=_shift(self.positions_BT),
            mask_BT=_shift(mask_BT),
        )


def _shift(x_BT: Tensor) -> Tensor:
    """Each position's right neighbor, and zero at the end."""
    return torch.cat((x_BT[:, 1:], torch.zeros_like(x_BT[:, :1])), dim=1)


class PredictionState:
    """State of multi-token prediction between micro-batches."""

    def __init__(self) -> None:
        # of each depth, the sum over the step's micro-batches of its mean over tokens
        self.losses: dict[int, Tensor] = {}
        # by what losses are multiplied before backward, as the main loss is: set before each step
        self.loss_scale: Tensor | float = 1.0
        # a sum over tokens is the objective, not a mean
        self.per_token = False

    def begin_step(self) -> None:
        """Forget the losses of the step before."""
        self.losses = {}

    def add(self, depth: int, loss: Tensor) -> None:
        """Add the mean loss of one micro-batch at this depth, counted from 0."""
        before = self.losses.get(depth)
        self.losses[depth] = loss if before is None else before + loss


class PredictionLayer(nn.Module):
    """Makes hidden_BTH of the next depth from that of one depth.

    The norms are of the token's embedding (enorm) and of its hidden state (hnorm); eh_proj makes one vector of both.
    """

    def __init__(self, shape: ModelShape, transformer_layer: nn.Module):
        super().__init__()
        self.enorm = Norm(shape.hidden_size, shape)
        self.hnorm = Norm(shape.hidden_size, shape)
        self.eh_proj = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=False)
        self.transformer_layer = transformer_layer
        self.final_layernorm = Norm(shape.hidden_size, shape)

    def forward(
        self,
        hidden_BTH: Tensor,
        embedded_BTH: Tensor,
        edges_E: Tensor | None,
        cos_B1TR: Tensor | None,
        sin_B1TR: Tensor | None,
    ) -> Tensor:
        """Compute the next depth: (B, T, H) -> (B, T, H).

        Args:
            hidden_BTH: Hidden states of the depth before.
            embedded_BTH: Embeddings of the next tokens.
            edges_E: Where documents begin and end, as in Scope; None: each sequence is one.
            cos_B1TR: Cosines of the rotation, by make_rotary_tables; None: nothing rotates.
            sin_B1TR: Sines of the rotation.
        """
        both = torch.cat((self.enorm(embedded_BTH), self.hnorm(hidden_BTH)), dim=-1)
        joined_BTH = self.eh_proj(both)
        further_BTH: Tensor = self.final_layernorm(self.transformer_layer(joined_BTH, edges_E, cos_B1TR, sin_B1TR))
        return further_BTH


class MultiTokenPrediction(nn.Module):
    """All depths. Their losses are attached to the decoder's output, whose values stay as they are."""

    def __init__(self, shape: ModelShape, make_layer: Callable[[int], nn.Module]):
        """
        Args:
            shape: The model's.
            make_layer: Makes the transformer layer of a number, counted from 1 over decoder and depths.
        """
        super().__init__()
        numbers = range(shape.num_layers + 1, shape.num_layers + shape.mtp_num_layers + 1)
        self.layers = nn.ModuleList(PredictionLayer(shape, make_layer(number)) for number in numbers)
        self.weight = shape.mtp_loss_scaling_factor / max(shape.mtp_num_layers, 1)
        self.state = PredictionState()

    def list_layers(self) -> list[nn.Module]:
        """List the transformer layer of each depth."""
        found = []
        for depth in self.layers:
            assert isinstance(depth, PredictionLayer)
            found.append(depth.transformer_layer)
        return found

    def forward(
        self,
        hidden_BTH: Tensor,
        targets: Targets,
        embed: Callable[[Tensor, Tensor], Tensor],
        measure: Callable[[Tensor, Tensor], Tensor],
        edges_E: Tensor | None = None,
        cos_B1TR: Tensor | None = None,
        sin_B1TR: Tensor | None = None,
    ) -> Tensor:
        """Return hidden_BTH, whose backward begins that of all depths' losses, too.

        Args:
            hidden_BTH: The decoder's output.
            targets: The micro-batch.
            embed: (tokens_BT, positions_BT) -> hidden_BTH.
            measure: (hidden_BTH, labels_BT) -> losses_BT.
            edges_E: Where documents begin and end, as in Scope; None: each sequence is one.
            cos_B1TR: Cosines of the rotation, by make_rotary_tables; None: nothing rotates.
            sin_B1TR: Sines of the rotation.
        """
        further_BTH = hidden_BTH
        for depth, layer in enumerate(self.layers):
            targets = targets.shift()
            assert targets.mask_BT is not None
            embedded_BTH = embed(targets.tokens_BT, targets.positions_BT)
            further_BTH = layer(further_BTH, embedded_BTH, edges_E, cos_B1TR, sin_B1TR)
            loss = (measure(further_BTH, targets.labels_BT) * targets.mask_BT).sum()
            mean = loss / targets.mask_BT.sum().clamp(min=1)
            self.state.add(depth, mean.detach())
            objective = loss if self.state.per_token else mean
            hidden_BTH = attach_loss(hidden_BTH, objective * self.weight, self.state)
        return hidden_BTH
