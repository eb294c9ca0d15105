"""What both losses are tested with: hidden vectors, weights, labels, factors; and torch's own loss."""

import torch
import torch.nn.functional as F

B, T, H, V = 2, 7, 16, 50


def made(dtype, seed=0):
    draw = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(B, T, H, generator=draw), torch.randn(V, H, generator=draw)
    labels = torch.randint(V, (B, T), generator=draw)
    return (
        hidden.to(dtype).requires_grad_(),
        weight.to(dtype).requires_grad_(),
        labels,
        torch.rand(B, T, generator=draw),
    )


def whole(hidden_BTH, weight_VH, labels_BT):
    logits_MV = F.linear(hidden_BTH, weight_VH).float().flatten(0, 1)
    return F.cross_entropy(logits_MV, labels_BT.flatten(), reduction="none").view(labels_BT.shape)
