"""Attention as a GPU computes it, around a plain stand-in for torch's kernel for sequences of several lengths."""

from itertools import pairwise, product

import pytest
import torch

from megatron_lite.model import flash_attention
from megatron_lite.model.attention import Scope, explicit_attention, find_document_edges

DOCUMENTS = torch.tensor([[7] * 5 + [8] * 7, [0] * 2 + [1] * 9 + [2]])
EDGES = find_document_edges(DOCUMENTS, torch.device("cpu"))
OFFSET = torch.tensor([-1.0, 0.0, 0.7, 3.0])


def compute_scores(q_TND, k_SGD, is_causal, scale, window_size_left, window_size_right):
    """Scores of one sequence, [N, T, S]; windows count from the end, as the kernel's do."""
    k_SND = k_SGD.repeat_interleave(q_TND.shape[1] // k_SGD.shape[1], dim=1)
    scores = torch.einsum("tnd,snd->nts", q_TND, k_SND) * scale
    after = torch.arange(len(k_SGD)) - torch.arange(len(q_TND))[:, None] - len(k_SGD) + len(q_TND)
    unseen = after > (0 if is_causal else window_size_right)
    if window_size_left >= 0:
        unseen |= after < -window_size_left
    return scores.masked_fill(unseen, -torch.inf)


def list_sequences(query_edges, key_edges, queries, keys):
    """Slices of the queries and keys of each sequence that has queries."""
    assert query_edges.dtype == key_edges.dtype == torch.int32 and len(query_edges) == len(key_edges)
    for (begin, end), (first, last) in zip(pairwise(query_edges.tolist()), pairwise(key_edges.tolist())):
        assert end - begin <= queries and last - first <= keys
        if begin < end:
            yield slice(begin, end), slice(first, last)


def forward(q, k, v, query_edges, key_edges, queries, keys, dropout, is_causal, debugs, **options):
    assert not dropout and not debugs and q.shape[-1] % 8 == 0
    out, logsumexp = torch.full_like(q, torch.nan), q.new_full((q.shape[1], len(q)), torch.nan)
    for own, seen in list_sequences(query_edges, key_edges, queries, keys):
        scores = compute_scores(q[own], k[seen], is_causal, **options)
        v_SND = v[seen].repeat_interleave(q.shape[1] // v.shape[1], dim=1)
        logsumexp[:, own] = scores.logsumexp(-1)
        out[own] = torch.einsum("nts,snd->tnd", scores.softmax(-1), v_SND)
    return out, logsumexp, torch.empty(2), torch.empty(0), torch.empty(0)


def backward(gradient, q, k, v, out, logsumexp, *others, **options):
    """By the formula of flash kernels: probabilities from logsumexp, and the product of result and gradient."""
    query_edges, key_edges, queries, keys, _, is_causal, *_ = others
    assert gradient.is_contiguous()
    of_q, of_k, of_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    repeats = q.shape[1] // k.shape[1]
    for own, seen in list_sequences(query_edges, key_edges, queries, keys):
        scores = compute_scores(q[own], k[seen], is_causal, **options)
        shares = (scores - logsumexp[:, own, None]).exp()
        v_SND, k_SND = (x[seen].repeat_interleave(repeats, dim=1) for x in (v, k))
        of_shares = torch.einsum("tnd,snd->nts", gradient[own], v_SND)
        products = (gradient[own] * out[own]).sum(-1).T[..., None]
        of_scores = shares * (of_shares - products) * options["scale"]
        of_q[own] = torch.einsum("nts,snd->tnd", of_scores, k_SND)
        of_k[seen] = torch.einsum("nts,tnd->snd", of_scores, q[own]).unflatten(1, (-1, repeats)).sum(2)
        of_v[seen] = torch.einsum("nts,tnd->snd", shares, gradient[own]).unflatten(1, (-1, repeats)).sum(2)
    return of_q, of_k, of_v


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", backward)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("edges", [None, EDGES], ids=["whole", "documents"])
@pytest.mark.parametrize("window", [None, 0, 3, 20])
@pytest.mark.parametrize("queries", [12, 5, 1])
def test_it_equals_scores_in_memory(edges, window, queries):
    """Results and gradients; heads of 8 channels, and of 12, which are filled up; the last queries alone."""
    for width, offset in product((8, 12), (None, OFFSET)):
        generator = torch.Generator().manual_seed(1)
        sizes = [(2, 4, queries, width), (2, 2, 12, width), (2, 2, 12, width)]
        inputs = [torch.randn(size, generator=generator).requires_grad_() for size in sizes]
        if offset is not None:
            inputs.append(offset.clone().requires_grad_())
        scope = Scope(edges, window, *inputs[3:])
        results = [
            explicit_attention(*inputs[:3], scope, 0.0, 1, fp32_softmax=False, scale_by_layer=False),
            flash_attention._attend_on_gpu(*inputs[:3], scope, 0.0),
        ]
        weights = torch.arange(results[0].numel()).view_as(results[0]).cos()
        found = [[out, *torch.autograd.grad((out * weights).sum(), inputs)] for out in results]
        torch.testing.assert_close(*found, rtol=0, atol=3e-6)
