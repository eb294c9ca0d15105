"""pretrain_gpt.py with routers that send most tokens to the first half of the experts: a cause to be found by a report."""

import sys

import torch

from megatron_lite.__main__ import train
from megatron_lite.model.experts import Router

PREFERENCE = 8.0  # added to the logits of the first half of the experts


def prefer_first(router: Router, hidden_MH: torch.Tensor) -> torch.Tensor:
    logits_ME = compute_logits(router, hidden_MH)
    preferred = torch.zeros(logits_ME.shape[1])
    preferred[: len(preferred) // 2] = PREFERENCE
    return logits_ME + preferred


compute_logits = Router.compute_logits
Router.compute_logits = prefer_first

if __name__ == "__main__":
    sys.exit(train(sys.argv[1:]))
