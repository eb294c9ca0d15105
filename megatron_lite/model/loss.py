"""Cross entropy of the next token. Letters: B batch, T positions, H hidden, V padded vocabulary."""

import torch.nn.functional as F
from torch import Tensor


def token_losses(hidden_BTH: Tensor, weight_VH: Tensor, labels_BT: Tensor) -> Tensor:
    """losses_BT in fp32, in nats: -log softmax(hidden @ weight^T)[label], over the whole padded vocabulary.

    It takes the hidden vectors rather than the logits, so that a version which never holds all logits can replace it.
    """
    logits_BTV = F.linear(hidden_BTH, weight_VH).float()
    losses = F.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten(), reduction="none")
    return losses.view(labels_BT.shape)
