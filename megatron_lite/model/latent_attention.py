"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): keys and values of all heads are made from
one vector of few channels, and so may queries be. Parameter names are those of Megatron-Core's local specification.

Only a part of a head's channels rotates with the position; that part of the keys is the same for all heads.

Letters: B batch, T positions, H hidden, N heads, C channels of a latent vector, R channels that rotate, K those of a
head that do not, V channels of a head's value, D width of a head as the kernel gets it, W columns of all heads.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lite.config.shape import LatentShape, ModelShape
from megatron_lite.model.attention import Attend, Scope
from megatron_lite.model.norm import Norm
from megatron_lite.model.rotary import rotate
from megatron_lite.model.rotary_frequencies import compute_score_factor

# turns the channels that rotate
Rotate = Callable[[Tensor], Tensor]


class LatentAttention(nn.Module):
    """Attention of a layer, hidden_BTH -> BTH.

    The rows of linear_q_proj, or linear_q_up_proj, are [K, R] per head, those of linear_kv_up_proj [K, V], those of
    linear_kv_down_proj [C, R].
    """

    def __init__(
        self,
        shape: ModelShape,
        latent: LatentShape,
        layer_number: int,
        attend: Attend,
    ):
        """
        Args:
            shape: The model's shape.
            latent: Sizes of this kind of attention.
            layer_number: The layer's number, from 1 over the whole model, not over a pipeline stage.
            attend: The attention kernel.
        """
        super().__init__()
        # the same for all layers where it is not used, so that a compiled layer serves all
        self.layer_number = layer_number if shape.query_key_layer_scaling else 1
        self.attend = attend
        self.latent = latent
        self.dropout = shape.attention_dropout
        self.rotary_interleaved = shape.rotary_interleaved
        # kernels scale scores by 1 / sqrt(D); queries make up for another scale
        width_factor = math.sqrt(latent.head_width / latent.query_width)
        self.query_scale = compute_score_factor(latent) * width_factor
        hidden = shape.hidden_size
        heads = shape.num_attention_heads
        query_rows = heads * latent.query_width
        self.linear_q_proj: nn.Linear | None = None
        self.linear_q_down_proj: nn.Linear | None = None
        self.linear_q_up_proj: nn.Linear | None = None
        self.q_layernorm: Norm | None = None
        if latent.q_lora_rank is None:
            self.linear_q_proj = nn.Linear(hidden, query_rows, bias=False)
        else:
            self.linear_q_down_proj = nn.Linear(hidden, latent.q_lora_rank, bias=False)
            self.linear_q_up_proj = nn.Linear(latent.q_lora_rank, query_rows, bias=False)
        down_width = latent.kv_lora_rank + latent.qk_pos_emb_head_dim
        key_value_width = latent.qk_head_dim + latent.v_head_dim
        up_width = heads * key_value_width
        self.linear_kv_down_proj = nn.Linear(hidden, down_width, bias=False)
        self.linear_kv_up_proj = nn.Linear(latent.kv_lora_rank, up_width, bias=False)
        self.linear_proj = nn.Linear(shape.attention_width, hidden, bias=shape.linear_bias)
        if shape.qk_layernorm and latent.q_lora_rank is not None:
            self.q_layernorm = Norm(latent.q_lora_rank, shape)
        self.kv_layernorm: Norm | None = None
        if shape.qk_layernorm:
            self.kv_layernorm = Norm(latent.kv_lora_rank, shape)

    @property
    def columns(self) -> list[nn.Linear]:
        """Linear layers of whose rows, heads, tensor parallel ranks have some each."""
        queries = self.linear_q_up_proj
        if queries is None:
            queries = self.linear_q_proj
        assert queries is not None
        return [queries, self.linear_kv_up_proj]

    @property
    def replicated(self) -> list[nn.Linear]:
        """Linear layers that every tensor parallel rank has whole."""
        if self.linear_q_down_proj is None:
            return [self.linear_kv_down_proj]
        return [self.linear_q_down_proj, self.linear_kv_down_proj]

    def forward(
        self,
        hidden_BTH: Tensor,
        edges_E: Tensor | None = None,
        cos_B1TR: Tensor | None = None,
        sin_B1TR: Tensor | None = None,
    ) -> Tensor:
        """Attend: (B, T, H) -> (B, T, H).

        Args:
            hidden_BTH: The layer's input.
            edges_E: Where documents begin and end, as in Scope; None: each sequence is one.
            cos_B1TR: Cosines of the rotation, by make_rotary_tables.
            sin_B1TR: Sines of the rotation.
        """
        assert cos_B1TR is not None and sin_B1TR is not None
        rotate_own = partial(
            rotate,
            cos_B1TR=cos_B1TR,
            sin_B1TR=sin_B1TR,
            interleaved=self.rotary_interleaved,
        )
        q_BNTD = self._make_queries(hidden_BTH, rotate_own)
        k_BNTD, v_BNTD = self._make_keys_and_values(hidden_BTH, rotate_own)
        dropout = self.dropout if self.training else 0.0
        scope = Scope(edges_E)
        out_BNTD = self.attend.function(
            q_BNTD,
            k_BNTD,
            v_BNTD,
            scope,
            dropout,
            self.layer_number,
        )
        value_width = self.latent.v_head_dim
        out_BNTV = out_BNTD[..., :value_width]
        out_BTW = out_BNTV.transpose(1, 2).flatten(2)
        projected_BTH: Tensor = self.linear_proj(out_BTW)
        return projected_BTH

    def _make_queries(self, hidden_BTH: Tensor, rotate_own: Rotate) -> Tensor:
        """Make the kernel's queries, q_BNTD."""
        sizes = self.latent
        columns_BTW = self._project_queries(hidden_BTH)
        q_BNTD = self._split_heads(columns_BTW, sizes.query_width)
        widths = (sizes.qk_head_dim, sizes.qk_pos_emb_head_dim)
        own_BNTK, turned_BNTR = q_BNTD.split(widths, dim=-1)
        turned_BNTR = rotate_own(turned_BNTR)
        q_BNTD = torch.cat((own_BNTK, turned_BNTR), dim=-1)
        q_BNTD = self._widen(q_BNTD)
        if self.query_scale != 1:
            q_BNTD = q_BNTD * self.query_scale
        return q_BNTD

    def _make_keys_and_values(self, hidden_BTH: Tensor, rotate_own: Rotate) -> tuple[Tensor, Tensor]:
        """Make the kernel's keys and values, k_BNTD and v_BNTD, of one latent vector."""
        sizes = self.latent
        down_BTC = self.linear_kv_down_proj(hidden_BTH)
        down_widths = (sizes.kv_lora_rank, sizes.qk_pos_emb_head_dim)
        latent_BTC, turned_BTR = down_BTC.split(down_widths, dim=-1)
        if self.kv_layernorm is not None:
            latent_BTC = self.kv_layernorm(latent_BTC)
        columns_BTW = self.linear_kv_up_proj(latent_BTC)
        widths = (sizes.qk_head_dim, sizes.v_head_dim)
        kv_BNTD = self._split_heads(columns_BTW, sum(widths))
        own_BNTK, v_BNTV = kv_BNTD.split(widths, dim=-1)
        turned_BTR = self.spread_keys(turned_BTR)
        turned_B1TR = rotate_own(turned_BTR[:, None])
        heads = own_BNTK.shape[1]
        turned_BNTR = turned_B1TR.expand(-1, heads, -1, -1)
        k_BNTD = torch.cat((own_BNTK, turned_BNTR), dim=-1)
        return self._widen(k_BNTD), self._widen(v_BNTV)

    def spread_keys(self, keys_BTR: Tensor) -> Tensor:
        """Return what all heads' keys share, of all tokens. Tensor parallel ranks replace this."""
        return keys_BTR

    def _project_queries(self, hidden_BTH: Tensor) -> Tensor:
        """Queries of all heads, (B, T, W)."""
        if self.linear_q_proj is not None:
            queries_BTW: Tensor = self.linear_q_proj(hidden_BTH)
            return queries_BTW
        assert self.linear_q_down_proj is not None
        assert self.linear_q_up_proj is not None
        latent_BTC = self.linear_q_down_proj(hidden_BTH)
        if self.q_layernorm is not None:
            latent_BTC = self.q_layernorm(latent_BTC)
        queries_BTW = self.linear_q_up_proj(latent_BTC)
        return queries_BTW

    def _split_heads(self, columns_BTW: Tensor, width: int) -> Tensor:
        """Split columns into heads, (B, N, T, width).

        The number of heads is left to the tensor, as a tensor parallel rank has some of them.
        """
        heads_BTND: Tensor = columns_BTW.unflatten(-1, (-1, width))
        return heads_BTND.transpose(1, 2)

    def _widen(self, x_BNTD: Tensor) -> Tensor:
        """Zeros behind the last channel, so that queries, keys and values are of one width, as flash kernels ask for.

        Neither scores nor the values' own channels change.
        """
        width = x_BNTD.shape[-1]
        lacking = self.latent.head_width - width
        if not lacking:
            return x_BNTD
        return F.pad(x_BNTD, (0, lacking))
