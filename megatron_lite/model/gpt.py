"""The GPT model. Parameter names and layouts are those of Megatron-Core's local layer specification.

Letters: B batch, T positions, H hidden, V padded vocabulary, R rotated part of a head.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lite.config.shape import ModelShape
from megatron_lite.model.attend import Attend, document_mask
from megatron_lite.model.attention import SelfAttention
from megatron_lite.model.embedding import Embedding
from megatron_lite.model.loss import token_losses
from megatron_lite.model.mlp import MLP
from megatron_lite.model.norms import Norm
from megatron_lite.model.rotary import rotary_tables


class TransformerLayer(nn.Module):
    """Pre-norm block: hidden + dropout(attention(norm(hidden))), then the same with the MLP.

    forward takes and returns tensors only; None stands for "plain causal" and "no rotation".
    """

    def __init__(self, shape: ModelShape, layer_number: int, attend: Attend):
        super().__init__()
        self.input_layernorm = Norm(shape.hidden_size, shape)
        self.self_attention = SelfAttention(shape, layer_number, attend)
        self.pre_mlp_layernorm = Norm(shape.hidden_size, shape)
        self.mlp = MLP(shape)
        self.dropout = nn.Dropout(shape.hidden_dropout) if shape.hidden_dropout else nn.Identity()

    def forward(
        self,
        hidden_BTH: Tensor,
        mask_B1TT: Tensor | None = None,
        cos_B1TR: Tensor | None = None,
        sin_B1TR: Tensor | None = None,
    ) -> Tensor:
        attended_BTH = self.self_attention(self.input_layernorm(hidden_BTH), mask_B1TT, cos_B1TR, sin_B1TR)
        hidden_BTH = hidden_BTH + self.dropout(attended_BTH)
        return hidden_BTH + self.dropout(self.mlp(self.pre_mlp_layernorm(hidden_BTH)))


class Decoder(nn.Module):
    """All layers and the final norm, BTH -> BTH."""

    def __init__(self, shape: ModelShape, attend: Attend):
        super().__init__()
        self.layers = nn.ModuleList(TransformerLayer(shape, i + 1, attend) for i in range(shape.num_layers))
        self.final_layernorm = Norm(shape.hidden_size, shape)

    def forward(
        self,
        hidden_BTH: Tensor,
        mask_B1TT: Tensor | None = None,
        cos_B1TR: Tensor | None = None,
        sin_B1TR: Tensor | None = None,
    ) -> Tensor:
        for layer in self.layers:
            hidden_BTH = layer(hidden_BTH, mask_B1TT, cos_B1TR, sin_B1TR)
        return self.final_layernorm(hidden_BTH)


class GPT(nn.Module):
    """tokens -> logits, or tokens and labels -> losses.

    `attend` is what choose_attention returns. `losses` maps (hidden_BTH, weight_VH, labels_BT) to losses_BT.
    """

    def __init__(self, shape: ModelShape, attend: Attend, losses: Callable[..., Tensor] = token_losses):
        super().__init__()
        self.shape = shape
        self.losses = losses
        self.embedding = Embedding(shape)
        self.decoder = Decoder(shape, attend)
        self.output_layer = None
        if not shape.tied_embeddings:
            self.output_layer = nn.Linear(shape.hidden_size, shape.padded_vocab_size, bias=False)

    def forward(
        self,
        tokens_BT: Tensor,
        labels_BT: Tensor | None = None,
        positions_BT: Tensor | None = None,
        documents_BT: Tensor | None = None,
    ) -> Tensor:
        """logits_BTV without labels, else the fp32 loss of each token, losses_BT (nats).

        positions_BT: of learned positions, 0..T-1 if None. documents_BT: a token attends only within its own document number (and causally);
        plain causal attention if None.
        """
        if positions_BT is None:
            positions_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)[None]
        mask_B1TT = None if documents_BT is None else document_mask(documents_BT)
        cos_B1TR, sin_B1TR = self._rotary(tokens_BT)
        hidden_BTH = self.embedding(tokens_BT, positions_BT)
        hidden_BTH = self.decoder(hidden_BTH, mask_B1TT, cos_B1TR, sin_B1TR)
        if labels_BT is None:
            return F.linear(hidden_BTH, self.output_weight)
        return self.losses(hidden_BTH, self.output_weight, labels_BT)

    @property
    def output_weight(self) -> Tensor:
        """weight_VH of the output projection: the word embeddings' own when tied."""
        return self.embedding.word_embeddings.weight if self.output_layer is None else self.output_layer.weight

    def _rotary(self, tokens_BT: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Rotations count from the start of the sequence, as in Megatron: only learned positions can be reset."""
        if self.shape.position_embedding != "rope":
            return None, None
        return rotary_tables(torch.arange(tokens_BT.shape[1], device=tokens_BT.device)[None], self.shape)
