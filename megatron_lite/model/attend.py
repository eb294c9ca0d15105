"""The attention kernels and the choice between them.

Letters: B batch, N query heads, G query groups (key/value heads), T positions, D width of one head.
"""

import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_lite.config.shape import ModelShape
from megatron_lite.errors import UserError, first_line
from megatron_lite.model.kernel_choice import EXPLICIT

NAMES = {
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.CUDNN_ATTENTION: "cudnn",
    SDPBackend.EFFICIENT_ATTENTION: "efficient",
    SDPBackend.MATH: "math",
}
FORCED = {"flash": SDPBackend.FLASH_ATTENTION, "fused": SDPBackend.CUDNN_ATTENTION}
CUDA_ONLY = (SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)


@dataclass(frozen=True)
class Attend:
    """A chosen kernel.

    function(q_BNTD, k_BGTD, v_BGTD, mask_B1TT, dropout, layer_number) -> out_BNTD; mask True = may attend, None =
    causal; dropout is a probability; layer_number counts from 1.
    name: what will run. why_not: one line for each fused kernel that cannot run here, if it was asked for. timed: what a race
    of kernels measured, in words.
    """

    function: Callable[..., Tensor]
    name: str
    why_not: tuple[str, ...] = ()
    timed: str = ""


@dataclass(frozen=True)
class Probe:
    """The arguments with which the model will call attention, as uninitialised tensors."""

    q_BNTD: Tensor
    k_BGTD: Tensor
    mask_B1TT: Tensor | None
    dropout: float

    @property
    def arguments(self) -> dict:
        return _sdpa_arguments(self.q_BNTD, self.k_BGTD, self.mask_B1TT, self.dropout)


def choose_attention(
    backend: str,
    shape: ModelShape,
    *,
    batch: int,
    device: torch.device | str,
    dtype: torch.dtype,
    masked: bool,
    prefer_explicit: bool = False,
    explain: bool = False,
    pick: Callable | None = None,
) -> Attend:
    """The kernel for --attention-backend (auto | flash | fused | unfused | local) on this device.

    batch: sequences in a micro-batch. dtype: what q, k, v will have (under autocast: autocast's). masked: documents
    are kept apart by a mask. prefer_explicit: what auto means. explain: fill why_not, which costs a few more queries to torch.
    pick(probe, names of the fused kernels that can run, torch's own choice among them or None): a race of them, as of
    attention_race.fastest, for auto; None: torch's own choice.
    Raises UserError if the flag names a kernel that cannot run with this device, dtype, shape, mask or dropout.
    """
    if backend in EXPLICIT or backend == "auto" and prefer_explicit:
        return _explicit(backend, shape, explain)
    if backend != "auto" and backend not in FORCED:
        raise UserError(f"--attention-backend {backend}: not one of auto, flash, fused, unfused, local; use auto")
    probes = _probes(shape, batch, torch.device(device), dtype, masked)
    if backend in FORCED:
        return _forced(backend, probes)
    return _automatic(probes, explain, pick)


def document_mask(documents_BT: Tensor) -> Tensor:
    """mask_B1TT, True where the row's token may attend to the column's: same document number, not later."""
    same = documents_BT[:, None, :, None] == documents_BT[:, None, None, :]
    return same.tril()


def explicit_attention(
    q_BNTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    mask_B1TT: Tensor | None,
    dropout: float,
    layer_number: int,
    *,
    fp32_softmax: bool,
    scale_by_layer: bool,
) -> Tensor:
    """softmax(q k^T / sqrt(D)) v with the scores held in memory; arguments and result as in Attend.

    scale_by_layer: the stored scores are divided by layer_number, which keeps them in fp16's range, and multiplied
    back inside the softmax (which then is in fp32).
    """
    k_BNTD, v_BNTD = _per_head(k_BGTD, q_BNTD), _per_head(v_BGTD, q_BNTD)
    damping = layer_number if scale_by_layer else 1
    scale = 1 / (math.sqrt(q_BNTD.shape[-1]) * damping)
    scores = _scores(q_BNTD, k_BNTD, scale, mask_B1TT)
    if fp32_softmax or scale_by_layer:
        scores = scores.float() * damping
    probabilities = scores.softmax(dim=-1).to(v_BNTD.dtype)
    if dropout:
        probabilities = F.dropout(probabilities, dropout)
    return probabilities @ v_BNTD


def _scores(q_BNTD: Tensor, k_BNTD: Tensor, scale: float, mask_B1TT: Tensor | None) -> Tensor:
    """scale * q k^T, -inf where a token must not look; BNTT."""
    if mask_B1TT is not None:
        return ((q_BNTD * scale) @ k_BNTD.transpose(-2, -1)).masked_fill(~mask_B1TT, -math.inf)
    rows, positions, width = q_BNTD.shape[:2].numel(), *q_BNTD.shape[2:]
    future = torch.full((positions, positions), -math.inf, dtype=q_BNTD.dtype, device=q_BNTD.device).triu(1)
    # scaling and masking within the product: no pass of their own over the scores
    scores = torch.baddbmm(
        future.expand(rows, -1, -1),
        q_BNTD.reshape(rows, positions, width),
        k_BNTD.reshape(rows, positions, width).transpose(1, 2),
        alpha=scale,
    )
    return scores.view(*q_BNTD.shape[:3], positions)


def sdpa_attention(
    q_BNTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    mask_B1TT: Tensor | None,
    dropout: float,
    layer_number: int,
    *,
    backend: SDPBackend | None,
    expand: bool,
) -> Tensor:
    """torch's scaled_dot_product_attention, restricted to one backend unless that is None.

    expand: repeat keys and values per head, for kernels that know no groups. layer_number is not needed: the fused
    kernels keep scores in fp32, so that dividing by it and multiplying back would change nothing.
    """
    if expand:
        k_BGTD, v_BGTD = _per_head(k_BGTD, q_BNTD), _per_head(v_BGTD, q_BNTD)
    arguments = _sdpa_arguments(q_BNTD, k_BGTD, mask_B1TT, dropout)
    with nullcontext() if backend is None else sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q_BNTD, k_BGTD, v_BGTD, **arguments)


def _sdpa_arguments(q_BNTD: Tensor, k_BGTD: Tensor, mask_B1TT: Tensor | None, dropout: float) -> dict:
    return {
        "attn_mask": mask_B1TT,
        "dropout_p": dropout,
        "is_causal": mask_B1TT is None,
        "enable_gqa": q_BNTD.shape[1] != k_BGTD.shape[1],
    }


def _per_head(x_BGTD: Tensor, q_BNTD: Tensor) -> Tensor:
    repeats = q_BNTD.shape[1] // x_BGTD.shape[1]
    return x_BGTD if repeats == 1 else x_BGTD.repeat_interleave(repeats, dim=1)


def _explicit(backend: str, shape: ModelShape, explain: bool) -> Attend:
    function = partial(
        explicit_attention, fp32_softmax=shape.softmax_in_fp32, scale_by_layer=shape.query_key_layer_scaling
    )
    reason = (
        "in bf16 on a CPU it is slower for so few positions"
        if backend == "auto"
        else f"--attention-backend {backend} asks for the explicit kernel"
    )
    return Attend(function, "explicit", (f"sdpa: {reason}",) if explain else ())


def _automatic(probes: list[Probe], explain: bool, pick: Callable | None) -> Attend:
    """torch's own choice or the race's; keys are expanded per head only where that makes a fused kernel possible."""
    choices = [_ask_torch(probe)[0] for probe in probes]
    fused = [i for i, choice in enumerate(choices) if choice not in (None, SDPBackend.MATH)]
    chosen = fused[0] if fused else 0
    own, backend, timed = NAMES.get(choices[chosen]), None, ""
    if pick is not None:
        able = {NAMES[b]: b for b in NAMES if b != SDPBackend.MATH and _ask_torch(probes[chosen], b)[0] == b}
        race = pick(probes[chosen], tuple(able), own)
        if race.winner == own or race.winner in able:  # the race was another rank's; this GPU may lack its winner
            backend, own, timed = None if race.winner == own else able[race.winner], race.winner, race.words
    function = partial(sdpa_attention, backend=backend, expand=chosen > 0)
    return Attend(function, f"sdpa {own}" if own else "sdpa", _rejections(probes[chosen]) if explain else (), timed)


def _forced(backend: str, probes: list[Probe]) -> Attend:
    wanted = FORCED[backend]
    answers = [_ask_torch(probe, wanted) for probe in probes]
    able = [i for i, (choice, _) in enumerate(answers) if choice == wanted]
    if not able:
        reason = answers[-1][1]
        raise UserError(f"--attention-backend {backend}: cannot run here ({reason}); use --attention-backend auto")
    return Attend(partial(sdpa_attention, backend=wanted, expand=able[0] > 0), f"sdpa {NAMES[wanted]}")


def _rejections(probe: Probe) -> tuple[str, ...]:
    answers = {backend: _ask_torch(probe, backend) for backend in NAMES if backend != SDPBackend.MATH}
    return tuple(f"sdpa {NAMES[b]}: {reason}" for b, (choice, reason) in answers.items() if choice != b)


def _probes(shape: ModelShape, batch: int, device: torch.device, dtype: torch.dtype, masked: bool) -> list[Probe]:
    """The model's arguments as they are, then (with grouped queries) with keys expanded per head."""

    def heads(number: int) -> Tensor:
        # The layout in which the model hands them over, since kernels look at strides, too.
        rows = torch.empty(batch, shape.seq_length, number, shape.kv_channels, device=device, dtype=dtype)
        return rows.transpose(1, 2).requires_grad_()

    mask = None
    if masked:
        mask = torch.empty(batch, 1, shape.seq_length, shape.seq_length, device=device, dtype=torch.bool)
    query = heads(shape.num_attention_heads)
    key_heads = sorted({shape.num_query_groups, shape.num_attention_heads})
    return [Probe(query, heads(number), mask, shape.attention_dropout) for number in key_heads]


def _ask_torch(probe: Probe, backend: SDPBackend | None = None) -> tuple[SDPBackend | None, str]:
    """Which backend torch would run for the probe, if allowed all or only the given one; and why that one cannot.

    torch gives its reasons as warnings, and only while refusing; there is no call that returns them.
    """
    device = probe.q_BNTD.device.type
    if backend in CUDA_ONLY and device != "cuda":
        return None, f"it needs a CUDA device, not {device}"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with nullcontext() if backend is None else sdpa_kernel(backend):
                choice = torch._fused_sdp_choice(probe.q_BNTD, probe.k_BGTD, probe.k_BGTD, **probe.arguments)
        except (AttributeError, NotImplementedError, RuntimeError) as error:
            return None, _reason([str(w.message) for w in caught], backend) or first_line(error)
    choice = SDPBackend(choice)
    return choice, "" if choice == backend else f"torch takes {NAMES.get(choice, choice.name)} for {device} tensors"


def _reason(messages: list[str], backend: SDPBackend | None) -> str:
    """The lines below the heading "<kernel> not used because:" of this backend, on one line."""
    titles = {"flash": "flash", "cudnn": "cudnn", "efficient": "memory efficient"}
    title, found, inside = titles.get(NAMES.get(backend), ""), [], False
    for message in messages:
        text = message.split(" (Triggered internally")[0].strip()
        if text.endswith("not used because:"):
            inside = text.lower().startswith(title)
        elif inside:
            found.append(" ".join(text.split()))
    return "; ".join(found)
