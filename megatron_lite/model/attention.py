"""The attention kernels, and what they take of the tokens besides causality.

Letters: B batch, N query heads, G query groups (key/value heads), T positions of queries, S positions of keys, D width
of one head, E edges of documents.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

EXPLICIT = "explicit"  # the name of explicit_attention


class Scope(NamedTuple):
    """Keys that a query attends to, among those that are not later than itself.

    The queries are those of the keys' last positions.

    edges_E: Where documents begin and end, of find_document_edges: a query attends within its own. None: to all.
    window: How many tokens before itself a query attends to. None: all.
    offset_N: Per head, a score that takes part in the softmax and adds nothing to its result, so that probabilities
        sum to less than 1 (--softmax-type). None: there is none.
    """

    edges_E: Tensor | None = None
    window: int | None = None
    offset_N: Tensor | None = None

    @property
    def is_causal(self) -> bool:
        """Whether positions alone decide, and all earlier ones are attended to."""
        return self.edges_E is None and self.window is None

    @property
    def is_plain(self) -> bool:
        """Whether attention is causal and no more."""
        return self.is_causal and self.offset_N is None


CAUSAL = Scope()


@dataclass(frozen=True)
class Attend:
    """An attention kernel that was chosen.

    function(q_BNTD, k_BGSD, v_BGSD, scope, dropout, layer_number) -> out_BNTD; dropout is a probability; layer_number
    counts from 1.
    name: what will run. why_not: one line for each fused kernel that cannot run here, if it was asked for. timed: what
    a race of kernels measured, in words. recomputes: it keeps its arguments only, and computes again in backward.
    """

    function: Callable[..., Tensor]
    name: str
    why_not: tuple[str, ...] = ()
    timed: str = ""
    recomputes: bool = False


# --- documents and windows


def find_document_edges(documents_BT: Tensor, device: torch.device) -> Tensor:
    """Find where documents begin, and where the last one ends, among the tokens of all sequences one after another.

    Args:
        documents_BT: The number of each token's document. Where `device` is a GPU it had better lie on the host, which
            else waits for the GPU.
        device: Where attention computes.

    Returns:
        edges_E, int32 on `device`: places from 0 to B * T in ascending order. The last one is repeated, so that their
        number depends little on the data.
    """
    begins_BT = torch.ones_like(documents_BT, dtype=torch.bool)
    begins_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    tokens = documents_BT.numel()
    number = tokens
    if device.type == "cuda":
        # a GPU spends time on empty documents; powers of two: few sizes, for which torch.compile compiles anew
        number = 2 ** int(begins_BT.sum()).bit_length()
    begins_L = begins_BT.flatten()
    document_L = begins_L.cumsum(0) - 1
    places_L = torch.arange(tokens, dtype=torch.int32, device=begins_L.device)
    edges_E = torch.full((number + 1,), tokens, dtype=torch.int32, device=begins_L.device)
    edges_E.scatter_reduce_(0, document_L, places_L, "amin")
    return edges_E.to(device, non_blocking=True)


def cut_edges(edges_E: Tensor, length: int, first: int, last: int) -> Tensor:
    """Find the edges of what lies in some of the positions of each sequence.

    Args:
        edges_E: Places among tokens of sequences of `length`, of which each begins with an edge.
        length: Positions of each sequence.
        first: The first position that stays.
        last: The position behind the last one that stays.

    Returns:
        Places among tokens of sequences of `last - first`; what lies outside becomes empty.
    """
    sequence_E = edges_E // length
    position_E = edges_E - sequence_E * length
    kept_E = position_E.clamp(first, last) - first
    return sequence_E * (last - first) + kept_E


def make_mask(scope: Scope, batch: int, queries: int, keys: int, device: torch.device) -> Tensor | None:
    """Make a mask of a scope.

    Args:
        scope: The keys that each query attends to.
        batch: Number of sequences.
        queries: Positions of queries in each, which are the last ones of the keys.
        keys: Positions of keys in each.
        device: Where the mask is needed.

    Returns:
        mask_B1TS, True where a query attends to a key, with B = 1 where all sequences have the same; None where it is
        plain causal.
    """
    has_window = scope.window is not None and scope.window < keys - 1
    if scope.edges_E is None and not has_window and queries == keys:
        return None
    earlier = keys - queries
    mask_TS = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(earlier)
    if has_window:
        assert scope.window is not None
        mask_TS = mask_TS.triu(earlier - scope.window)
    if scope.edges_E is None:
        return mask_TS[None, None]
    places_L = torch.arange(batch * keys, dtype=torch.int32, device=device)
    documents_BS = torch.searchsorted(scope.edges_E, places_L, right=True).view(batch, keys)
    of_queries_BT = documents_BS[:, earlier:]
    is_same_BTS = of_queries_BT[:, :, None] == documents_BS[:, None, :]
    return (is_same_BTS & mask_TS)[:, None]


# --- kernels


def explicit_attention(
    q_BNTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    scope: Scope,
    dropout: float,
    layer_number: int,
    *,
    fp32_softmax: bool,
    scale_by_layer: bool,
) -> Tensor:
    """Attend, softmax(q k^T / sqrt(D)) v, with the scores held in memory.

    Args:
        q_BNTD: Queries of the last positions of the keys.
        k_BGSD: Keys.
        v_BGSD: Values.
        scope: The keys that each query attends to.
        dropout: The probability with which probabilities become 0.
        layer_number: The layer's number, from 1.
        fp32_softmax: Whether the softmax is in fp32.
        scale_by_layer: Whether the stored scores are divided by layer_number, which keeps them in fp16's range, and
            multiplied back inside the softmax, which then is in fp32.

    Returns:
        out_BNTD.
    """
    k_BNSD = repeat_heads(k_BGSD, q_BNTD)
    v_BNSD = repeat_heads(v_BGSD, q_BNTD)
    mask_B1TS = make_mask(scope, len(q_BNTD), q_BNTD.shape[2], k_BNSD.shape[2], q_BNTD.device)
    damping = layer_number if scale_by_layer else 1
    scale = 1 / (math.sqrt(q_BNTD.shape[-1]) * damping)
    scores = _compute_scores(q_BNTD, k_BNSD, scale, mask_B1TS)
    if fp32_softmax or scale_by_layer:
        scores = scores.float() * damping
    probabilities = _compute_softmax(scores, scope.offset_N).to(v_BNSD.dtype)
    if dropout:
        probabilities = F.dropout(probabilities, dropout)
    return probabilities @ v_BNSD


def _compute_softmax(scores_BNTS: Tensor, offset_N: Tensor | None) -> Tensor:
    """The softmax over the last dimension, of which an offset per head takes its share."""
    if offset_N is None:
        return scores_BNTS.softmax(dim=-1)
    batch, _, queries, _ = scores_BNTS.shape
    offset_BNT1 = offset_N.to(scores_BNTS.dtype)[None, :, None, None].expand(batch, -1, queries, -1)
    both = torch.cat((scores_BNTS, offset_BNT1), dim=-1)
    return both.softmax(dim=-1)[..., :-1]


def _compute_scores(q_BNTD: Tensor, k_BNSD: Tensor, scale: float, mask_B1TS: Tensor | None) -> Tensor:
    """Compute scale * q k^T, scores_BNTS, which are -inf where a token must not look."""
    if mask_B1TS is not None:
        scores_BNTS = (q_BNTD * scale) @ k_BNSD.transpose(-2, -1)
        return scores_BNTS.masked_fill(~mask_B1TS, -math.inf)
    rows = q_BNTD.shape[:2].numel()
    positions, width = q_BNTD.shape[2:]
    future = torch.full((positions, positions), -math.inf, dtype=q_BNTD.dtype, device=q_BNTD.device).triu(1)
    # scaling and masking within the product: no pass of their own over the scores
    scores = torch.baddbmm(
        future.expand(rows, -1, -1),
        q_BNTD.reshape(rows, positions, width),
        k_BNSD.reshape(rows, positions, width).transpose(1, 2),
        alpha=scale,
    )
    return scores.view(*q_BNTD.shape[:3], positions)


def sdpa_attention(
    q_BNTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    scope: Scope,
    dropout: float,
    layer_number: int,
    *,
    backend: SDPBackend | None,
    expand: bool,
    aligns_ends: bool = False,
) -> Tensor:
    """Attend by torch's scaled_dot_product_attention, with scopes as masks.

    Args:
        q_BNTD: Queries of the last positions of the keys.
        k_BGSD: Keys.
        v_BGSD: Values.
        scope: The keys that each query attends to.
        dropout: The probability with which probabilities become 0.
        layer_number: The layer's number, which is not needed: fused kernels keep scores in fp32, so that dividing by it
            and multiplying back would change nothing.
        backend: The only backend that may run; None: torch chooses.
        expand: Whether keys and values are repeated per head, for kernels that know no groups.
        aligns_ends: Whether the kernels know causal attention of the last positions' queries, as those of GPUs do;
            else it is a mask, too.

    Returns:
        out_BNTD.
    """
    assert scope.offset_N is None, "flash_attention has it"
    if expand:
        k_BGSD = repeat_heads(k_BGSD, q_BNTD)
        v_BGSD = repeat_heads(v_BGSD, q_BNTD)
    queries = q_BNTD.shape[2]
    keys = k_BGSD.shape[2]
    mask_B1TS: Tensor | None
    if aligns_ends and scope.is_causal and queries != keys:
        # imports torch.compile's parts, which takes a second
        from torch._subclasses import FakeTensor
        from torch.nn.attention.bias import causal_lower_right
        from torch.utils._python_dispatch import _disable_current_modes

        # a walk on fake tensors cannot make this subclass of tensors, which has no elements that it would have to fake
        with _disable_current_modes() if isinstance(q_BNTD, FakeTensor) else nullcontext():
            mask_B1TS = causal_lower_right(queries, keys)
    else:
        mask_B1TS = make_mask(scope, len(q_BNTD), queries, keys, q_BNTD.device)
    arguments = make_sdpa_arguments(q_BNTD, k_BGSD, mask_B1TS, dropout)
    with nullcontext() if backend is None else sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q_BNTD, k_BGSD, v_BGSD, **arguments)


def make_sdpa_arguments(q_BNTD: Tensor, k_BGSD: Tensor, mask_B1TS: Tensor | None, dropout: float) -> dict[str, Any]:
    """Make the keyword arguments of torch's scaled_dot_product_attention.

    Args:
        q_BNTD: Queries.
        k_BGSD: Keys.
        mask_B1TS: True where a query attends to a key; None: plain causal.
        dropout: The probability with which probabilities become 0.
    """
    return {
        "attn_mask": mask_B1TS,
        "dropout_p": dropout,
        "is_causal": mask_B1TS is None,
        "enable_gqa": q_BNTD.shape[1] != k_BGSD.shape[1],
    }


def repeat_heads(x_BGSD: Tensor, q_BNTD: Tensor) -> Tensor:
    """Keys or values repeated for each head of their group, BNSD."""
    repeats = q_BNTD.shape[1] // x_BGSD.shape[1]
    return x_BGSD if repeats == 1 else x_BGSD.repeat_interleave(repeats, dim=1)
