"""The model and the training step whose memory real CUDA snapshots show: the "medium" language model of Stanford's course
CS336, assignment 2 (24 layers, width 1024, 16 heads, MLP 4096, vocabulary 10,000; pre-norm with RMSNorm, rotary positions,
gated SiLU, attention written out), with its AdamW, which makes new moments in every step.

Under autocast, products are in bf16 and exponentials in fp32, as CUDA's lists have it; casts are spelt out here, since the
CPU's lists differ.

Letters: B batch, T positions, H hidden, N heads, D width of one head, V vocabulary.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from megatron_lite.phases import Phase

LAYERS, HIDDEN, HEADS, MLP_WIDTH, VOCABULARY, BATCH = 24, 1024, 16, 4096, 10_000, 4
BATCHES = 5  # made at once
HEAD_WIDTH = HIDDEN // HEADS


class Casts:
    """What autocast does to a product's inputs and to an exponential's."""

    def __init__(self, bf16: bool):
        self._bf16 = bf16

    def product(self, equation: str, *inputs: Tensor) -> Tensor:
        return torch.einsum(equation, *(x.to(torch.bfloat16) if self._bf16 else x for x in inputs))

    @staticmethod
    def exp(x: Tensor) -> Tensor:
        return torch.exp(x.float())


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x_BTH: Tensor) -> Tensor:
        inverse = torch.rsqrt(x_BTH.pow(2).mean(-1, keepdim=True) + 1e-5)
        normal_BTH = x_BTH * inverse
        return self.weight * normal_BTH


class Matrix(nn.Module):
    def __init__(self, inputs: int, outputs: int, casts: Casts):
        super().__init__()
        self.weight, self.casts = nn.Parameter(torch.empty(outputs, inputs)), casts

    def forward(self, x: Tensor) -> Tensor:
        return self.casts.product("...i,oi->...o", x, self.weight)


class Attention(nn.Module):
    def __init__(self, casts: Casts):
        super().__init__()
        self.casts = casts
        self.q, self.k, self.v, self.out = (Matrix(HIDDEN, HIDDEN, casts) for _ in range(4))

    def forward(self, x_BTH: Tensor, rotations_2TD: Tensor) -> Tensor:
        q, k, v = (_heads(matrix(x_BTH)) for matrix in (self.q, self.k, self.v))
        q, k = _rotated(q, rotations_2TD), _rotated(k, rotations_2TD)
        positions = torch.arange(x_BTH.shape[1])
        mask = positions[:, None] >= positions[None, :]
        mixed_BNTD = self._mix(q, k, v, mask)
        return self.out(mixed_BNTD.transpose(1, 2).reshape(x_BTH.shape))

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = self.casts.product("bnqd,bnkd->bnqk", q, k) / math.sqrt(HEAD_WIDTH)
        scores = torch.where(mask, scores, float("-inf"))
        weights = self._softmax(scores)
        return self.casts.product("bnqk,bnkd->bnqd", weights, v)

    def _softmax(self, x: Tensor) -> Tensor:
        shifted = x - torch.max(x, dim=-1, keepdim=True)[0]
        exponentials = self.casts.exp(shifted)
        return exponentials / torch.sum(exponentials, dim=-1, keepdim=True)


class Layer(nn.Module):
    def __init__(self, casts: Casts):
        super().__init__()
        self.norm1, self.attention, self.norm2 = RMSNorm(), Attention(casts), RMSNorm()
        self.gate, self.value = (Matrix(HIDDEN, MLP_WIDTH, casts) for _ in range(2))
        self.down = Matrix(MLP_WIDTH, HIDDEN, casts)

    def forward(self, x_BTH: Tensor, rotations_2TD: Tensor) -> Tensor:
        attended_BTH = self.attention(self.norm1(x_BTH), rotations_2TD)
        between_BTH = x_BTH + attended_BTH
        return between_BTH + self._mlp(self.norm2(between_BTH))

    def _mlp(self, x_BTH: Tensor) -> Tensor:
        return self.down(_silu(self.gate(x_BTH)) * self.value(x_BTH))


class LanguageModel(nn.Module):
    def __init__(self, positions: int, casts: Casts):
        super().__init__()
        self.words = nn.Parameter(torch.empty(VOCABULARY, HIDDEN))
        self.layers = nn.ModuleList(Layer(casts) for _ in range(LAYERS))
        self.norm, self.head = RMSNorm(), Matrix(HIDDEN, VOCABULARY, casts)
        self.register_buffer("rotations_2TD", torch.empty(2, positions, HEAD_WIDTH // 2))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTH = self.words[tokens_BT]
        for layer in self.layers:
            x_BTH = layer(x_BTH, self.rotations_2TD)
        return self.head(self.norm(x_BTH))


class AdamW:
    """New moments in each step; the old ones of a parameter live until the next parameter's are read."""

    def __init__(self, parameters: list[nn.Parameter]):
        self.parameters, self.state = parameters, {}

    @torch.no_grad()
    def step(self):
        for p in self.parameters:
            state = self.state.setdefault(p, {})
            p.sub_(1e-4 * p)
            old_m = state.get("m", torch.zeros_like(p))
            old_v = state.get("v", torch.zeros_like(p))
            m = 0.9 * old_m + 0.1 * p.grad
            v = 0.999 * old_v + 0.001 * torch.square(p.grad)
            p.sub_(1e-3 * m / (torch.sqrt(v) + 1e-8))
            state["m"], state["v"] = m, v


def prepare(positions: int, bf16: bool) -> Callable:
    """Model, optimizer and data; returns step(phase)."""
    casts = Casts(bf16)
    model = LanguageModel(positions, casts)
    optimizer = AdamW(list(model.parameters()))
    inputs, targets = (torch.empty(BATCHES * BATCH, positions, dtype=torch.int64) for _ in range(2))

    def step(phase):
        x_BT, y_BT = inputs[:BATCH].clone(), targets[:BATCH].clone()
        for parameter in optimizer.parameters:
            parameter.grad = None
        with phase(Phase.FORWARD):
            logits_BTV = model(x_BT)
            loss = _cross_entropy(logits_BTV, y_BT, casts)
        with phase(Phase.BACKWARD):
            loss.backward()
        with phase(Phase.OPTIMIZER_STEP):
            optimizer.step()

    return step


def _heads(x_BTH: Tensor) -> Tensor:
    return x_BTH.unflatten(-1, (HEADS, HEAD_WIDTH)).transpose(1, 2)


def _rotated(x: Tensor, rotations_2TD: Tensor) -> Tensor:
    cos, sin = rotations_2TD
    even, odd = x[..., 0::2], x[..., 1::2]
    first = cos * even - sin * odd
    second = sin * even + cos * odd
    return torch.stack((first, second), dim=-1).flatten(-2)


def _silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def _cross_entropy(logits_BTV: Tensor, targets_BT: Tensor, casts: Casts) -> Tensor:
    negative = -_log_softmax(logits_BTV, casts)
    return torch.gather(negative, -1, targets_BT.unsqueeze(-1)).mean()


def _log_softmax(x: Tensor, casts: Casts) -> Tensor:
    highest = torch.max(x, dim=-1, keepdim=True)[0]
    x = x - highest
    return x - torch.log(torch.sum(casts.exp(x), dim=-1, keepdim=True))
