"""Causal self-attention around an exchangeable kernel.

Letters: B batch, T positions, H hidden, N query heads, G query groups (key/value heads), D width of one head,
R rotated part of D.
"""

from torch import Tensor, nn

from megatron_lite.config.shape import ModelShape
from megatron_lite.model.attend import Attend
from megatron_lite.model.norms import Norm
from megatron_lite.model.rotary import rotate


class SelfAttention(nn.Module):
    """hidden_BTH -> BTH. The rows of linear_qkv are grouped: [queries of the group, its key, its value], per group.

    layer_number counts from 1 over the whole model, not over a pipeline stage.
    """

    def __init__(self, shape: ModelShape, layer_number: int, attend: Attend):
        super().__init__()
        # the same for all layers where it is not used, so that a compiled layer serves all
        self.layer_number = layer_number if shape.query_key_layer_scaling else 1
        self.attend = attend
        self.heads_per_group = shape.num_attention_heads // shape.num_query_groups
        self.kv_channels = shape.kv_channels
        self.dropout = shape.attention_dropout
        self.rotary_interleaved = shape.rotary_interleaved
        self.linear_qkv = nn.Linear(shape.hidden_size, shape.qkv_width, bias=shape.qkv_bias)
        self.linear_proj = nn.Linear(shape.attention_width, shape.hidden_size, bias=shape.linear_bias)
        self.q_layernorm = Norm(shape.kv_channels, shape) if shape.qk_layernorm else None
        self.k_layernorm = Norm(shape.kv_channels, shape) if shape.qk_layernorm else None

    def forward(
        self,
        hidden_BTH: Tensor,
        mask_B1TT: Tensor | None = None,
        cos_B1TR: Tensor | None = None,
        sin_B1TR: Tensor | None = None,
    ) -> Tensor:
        q_BNTD, k_BGTD, v_BGTD = self._split(self.linear_qkv(hidden_BTH))
        if self.q_layernorm is not None:
            q_BNTD, k_BGTD = self.q_layernorm(q_BNTD), self.k_layernorm(k_BGTD)
        if cos_B1TR is not None:
            q_BNTD = rotate(q_BNTD, cos_B1TR, sin_B1TR, self.rotary_interleaved)
            k_BGTD = rotate(k_BGTD, cos_B1TR, sin_B1TR, self.rotary_interleaved)
        dropout = self.dropout if self.training else 0.0
        out_BNTD = self.attend.function(q_BNTD, k_BGTD, v_BGTD, mask_B1TT, dropout, self.layer_number)
        return self.linear_proj(out_BNTD.transpose(1, 2).flatten(2))

    def _split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # The number of groups is left to the tensor: a tensor-parallel rank holds only its share of them.
        grouped = qkv.unflatten(-1, (-1, self.heads_per_group + 2, self.kv_channels))
        # one split, whose backward is one copy; a slice each would fill a whole tensor with zeros and add it
        q, k, v = grouped.split((self.heads_per_group, 1, 1), dim=-2)
        q_BTND, k_BTGD, v_BTGD = q.flatten(2, 3), k.squeeze(3), v.squeeze(3)
        return q_BTND.transpose(1, 2), k_BTGD.transpose(1, 2), v_BTGD.transpose(1, 2)
