"""Chooses an attention kernel on this device: what a flag asks for, what torch can run, what is fastest.

Which fused kernel is fastest changes with GPU, shape and version, so on a GPU they are tried out. Letters as in
attention.py.
"""

import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_lite.config.args import EXPLICIT_BACKENDS
from megatron_lite.config.shape import ModelShape
from megatron_lite.errors import UserError, first_line
from megatron_lite.model.attention import (
    CAUSAL,
    EXPLICIT,
    Attend,
    Scope,
    explicit_attention,
    make_sdpa_arguments,
    sdpa_attention,
)

NAMES = {
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.CUDNN_ATTENTION: "cudnn",
    SDPBackend.EFFICIENT_ATTENTION: "efficient",
    SDPBackend.MATH: "math",
}
FORCED = {"flash": SDPBackend.FLASH_ATTENTION, "fused": SDPBackend.CUDNN_ATTENTION}
CUDA_ONLY = (SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
Trial = Callable[[], None]  # one forward and backward
MIN_SPEEDUP = (
    1.05  # by how much another kernel must win: below, a resumed run might choose another, whose last bits differ
)
WARM_UPS = 3
REPEATS = 7


@dataclass(frozen=True)
class Probe:
    """The arguments with which the model will call attention, as uninitialized tensors."""

    q_BNTD: Tensor
    k_BGTD: Tensor
    mask_B1TT: Tensor | None
    dropout: float


Pick = Callable[[Probe, tuple[str, ...], str | None], "Race"]  # a race among these kernels; torch's own choice, or None


def choose_attention(
    backend: str,
    shape: ModelShape,
    *,
    batch: int,
    device: torch.device | str,
    dtype: torch.dtype,
    masked: bool,
    on_gpu: bool = False,
    why_explicit: str = "",
    explain: bool = False,
    pick: Pick | None = None,
) -> Attend:
    """Choose the kernel for --attention-backend on this device.

    Args:
        backend: The flag's value: auto, flash, fused, unfused or local.
        shape: The model's shape.
        batch: Sequences in a micro-batch.
        device: Where attention computes.
        dtype: Precision of queries, keys and values; under autocast, autocast's.
        masked: Whether documents or windows limit who attends to whom.
        on_gpu: Whether the tensors stand for those of a GPU, wherever they lie.
        why_explicit: Why auto means the explicit kernel; "": it does not.
        explain: Whether to fill why_not, which costs a few more queries to torch.
        pick: A race of kernels for auto, as `fastest` is one. It is called with the probe, the names of the fused
            kernels that can run, and torch's own choice among them or None. None: torch's own choice is taken.

    Raises:
        UserError: The flag names a kernel that cannot run with this device, dtype, shape, mask or dropout.
    """
    if backend in EXPLICIT_BACKENDS or (backend == "auto" and why_explicit):
        asked = f"--attention-backend {backend} asks for the explicit kernel"
        return _choose_explicitly(shape, explain, why_explicit if backend == "auto" else asked)
    if backend != "auto" and backend not in FORCED:
        raise UserError(f"--attention-backend {backend}: not one of auto, flash, fused, unfused, local; use auto")
    has_offset = shape.softmax_type != "vanilla"
    probes = _probes(shape, batch, torch.device(device), dtype)
    by_torch = partial(sdpa_attention, aligns_ends=on_gpu or torch.device(device).type == "cuda")
    if (masked or has_offset) and backend in ("auto", "flash"):
        choice, reason = _ask_torch(probes[0], SDPBackend.FLASH_ATTENTION)
        if choice == SDPBackend.FLASH_ATTENTION:
            # imports torch.compile's parts, which takes a second
            from megatron_lite.model.flash_attention import flash_attention

            return Attend(flash_attention, "sdpa flash")
        if has_offset and backend == "auto":
            return _choose_explicitly(shape, explain, f"flash cannot run here ({reason}), and no other knows offsets")
    if masked:
        # only now: a mask of long sequences may not fit into memory, and flash takes none
        probes = _add_mask(probes)
    if backend == "auto":
        return _choose_automatically(probes, by_torch, explain, pick)
    wanted = FORCED[backend]
    for expand, probe in enumerate(probes):
        choice, reason = _ask_torch(probe, wanted)
        if choice == wanted:
            return Attend(partial(by_torch, backend=wanted, expand=bool(expand)), f"sdpa {NAMES[wanted]}")
    raise UserError(f"--attention-backend {backend}: cannot run here ({reason}); use --attention-backend auto")


def _choose_explicitly(shape: ModelShape, explain: bool, reason: str) -> Attend:
    """The explicit kernel.

    Args:
        shape: The model's.
        explain: Whether to tell why.
        reason: Why not torch's.
    """
    function = partial(
        explicit_attention,
        fp32_softmax=shape.softmax_in_fp32,
        scale_by_layer=shape.query_key_layer_scaling,
    )
    return Attend(function, EXPLICIT, (f"sdpa: {reason}",) if explain else ())


def _choose_automatically(
    probes: list[Probe], by_torch: Callable[..., Tensor], explain: bool, pick: Pick | None
) -> Attend:
    """The kernel for auto: torch's choice, or the fastest.

    Keys are repeated per head only if no fused kernel runs otherwise.
    """
    choices = [_ask_torch(probe)[0] for probe in probes]
    fused = [i for i, choice in enumerate(choices) if choice not in (None, SDPBackend.MATH)]
    chosen = fused[0] if fused else 0
    own = _name_backend(choices[chosen])
    backend: SDPBackend | None = None
    timed = ""
    why_not: tuple[str, ...] = ()
    if pick is not None or explain:
        answers = {b: _ask_torch(probes[chosen], b) for b in NAMES if b != SDPBackend.MATH}
    if pick is not None:
        able = {NAMES[b]: b for b, (choice, _) in answers.items() if choice == b}
        race = pick(probes[chosen], tuple(able), own)
        # the race was another rank's: this GPU may lack its winner
        if race.winner != own and race.winner in able:
            backend = able[race.winner]
            own = race.winner
        if race.winner == own:
            timed = race.words
    if explain:
        why_not = tuple(f"sdpa {NAMES[b]}: {reason}" for b, (choice, reason) in answers.items() if choice != b)
    function = partial(by_torch, backend=backend, expand=chosen > 0)
    return Attend(function, f"sdpa {own}" if own else "sdpa", why_not, timed)


def _probes(shape: ModelShape, batch: int, device: torch.device, dtype: torch.dtype) -> list[Probe]:
    """The model's arguments as they are, then (with grouped queries) with keys expanded per head; without a mask."""

    def heads(number: int) -> Tensor:
        # The layout in which the model hands them over, since kernels look at strides, too.
        rows = torch.empty(batch, shape.seq_length, number, shape.kv_channels, device=device, dtype=dtype)
        return rows.transpose(1, 2).requires_grad_()

    query = heads(shape.num_attention_heads)
    key_heads = sorted({shape.num_query_groups, shape.num_attention_heads})
    return [Probe(query, heads(number), None, shape.attention_dropout) for number in key_heads]


def _add_mask(probes: list[Probe]) -> list[Probe]:
    """The same probes with one mask for all, [B, 1, T, T]."""
    query_BNTD = probes[0].q_BNTD
    batch, _, length, _ = query_BNTD.shape
    mask_B1TT = torch.empty(batch, 1, length, length, device=query_BNTD.device, dtype=torch.bool)
    return [replace(probe, mask_B1TT=mask_B1TT) for probe in probes]


def _ask_torch(probe: Probe, backend: SDPBackend | None = None) -> tuple[SDPBackend | None, str]:
    """Ask which backend torch would run for the probe, if allowed all or only the given one, and why that one cannot.

    torch gives its reasons as warnings, and only while refusing; there is no call that returns them.
    """
    device = probe.q_BNTD.device.type
    arguments = make_sdpa_arguments(probe.q_BNTD, probe.k_BGTD, probe.mask_B1TT, probe.dropout)
    if backend in CUDA_ONLY and device != "cuda":
        return None, f"it needs a CUDA device, not {device}"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with nullcontext() if backend is None else sdpa_kernel(backend):
                number = torch._fused_sdp_choice(probe.q_BNTD, probe.k_BGTD, probe.k_BGTD, **arguments)
        except (AttributeError, NotImplementedError, RuntimeError) as error:
            return None, _find_reasons(caught, backend) or first_line(error)
    choice = SDPBackend(number)
    return choice, "" if choice == backend else f"torch takes {NAMES.get(choice, choice.name)} for {device} tensors"


def _name_backend(backend: SDPBackend | None) -> str | None:
    """The name of a kernel of torch; None for none, and for one that has no name here."""
    return None if backend is None else NAMES.get(backend)


def _find_reasons(caught: list[warnings.WarningMessage], backend: SDPBackend | None) -> str:
    """The lines below the heading "<kernel> not used because:" of this backend, on one line."""
    name = _name_backend(backend) or ""
    title = "memory efficient" if name == "efficient" else name
    found: list[str] = []
    inside = False
    for warning in caught:
        text = str(warning.message).split(" (Triggered internally")[0].strip()
        if text.endswith("not used because:"):
            inside = text.lower().startswith(title)
        elif inside:
            found.append(" ".join(text.split()))
    return "; ".join(found)


# --- the race of fused kernels


@dataclass(frozen=True)
class Race:
    """The result of timing attention kernels."""

    winner: str | None  # None: none ran
    times_ms: Mapping[str, float]  # forward and backward, median; {} where there was nothing to choose

    @property
    def words(self) -> str:
        """Times in words, "1.21 ms, flash 1.60 ms forward and backward"; empty where nothing was timed."""
        if self.winner is None or self.winner not in self.times_ms:
            return ""
        others = sorted((ms, name) for name, ms in self.times_ms.items() if name != self.winner)
        words = [f"{self.times_ms[self.winner]:.2f} ms", *(f"{name} {ms:.2f} ms" for ms, name in others)]
        return f"{', '.join(words)} forward and backward"


def fastest(probe: Probe, able: tuple[str, ...], preferred: str | None) -> Race:
    """Time kernels on this GPU, and keep no memory.

    Args:
        probe: What the arguments are like.
        able: Names of the kernels that can run.
        preferred: The name of torch's own choice among them; None: it has none.
    """
    if len(able) < 2:
        return Race(preferred, {})
    trials = make_trials(probe, able)
    found = race(trials, preferred, gpu_ms)
    del trials
    torch.cuda.empty_cache()
    return found


def make_trials(probe: Probe, names: tuple[str, ...]) -> dict[str, Trial]:
    """Forward and backward of attention by each kernel, on normal numbers: zeros would be faster than any data."""
    backends = {name: backend for backend, name in NAMES.items()}
    q_BNTD, k_BGTD, v_BGTD = (
        torch.randn_like(like).requires_grad_() for like in (probe.q_BNTD, probe.k_BGTD, probe.k_BGTD)
    )
    gradient_BNTD = torch.randn_like(q_BNTD)
    scope = CAUSAL
    if probe.mask_B1TT is not None:
        # any window asks for a mask
        scope = Scope(window=q_BNTD.shape[2] // 2)

    def trial(name: str) -> None:
        out_BNTD = sdpa_attention(q_BNTD, k_BGTD, v_BGTD, scope, probe.dropout, 1, backend=backends[name], expand=False)
        torch.autograd.grad(out_BNTD, (q_BNTD, k_BGTD, v_BGTD), gradient_BNTD)

    return {name: partial(trial, name) for name in names}


def race(trials: Mapping[str, Trial], preferred: str | None, time_ms: Callable[[Trial], float]) -> Race:
    """Find the fastest of some trials. One trial alone is not timed.

    A kernel that torch offers and that then fails is out of the race.

    Args:
        trials: Trials by the names of their kernels.
        preferred: The name of torch's own choice, which wins unless another is MIN_SPEEDUP faster; None: it has none.
        time_ms: Measures a trial.
    """
    if len(trials) < 2:
        return Race(preferred, {})
    times: dict[str, float] = {}
    for name, trial in trials.items():
        try:
            times[name] = time_ms(trial)
        except RuntimeError:  # out of memory is one, too
            continue
    if not times:
        return Race(preferred, times)
    winner = min(times, key=lambda name: times[name])
    if preferred is not None and preferred in times and times[preferred] <= MIN_SPEEDUP * times[winner]:
        winner = preferred
    return Race(winner, times)


def gpu_ms(trial: Trial) -> float:
    """Median milliseconds of a trial in the current GPU's stream."""
    for _ in range(WARM_UPS):
        trial()
    edges = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
    edges[0].record()
    for edge in edges[1:]:
        trial()
        edge.record()
    torch.cuda.synchronize()
    times_ms: list[float] = [first.elapsed_time(last) for first, last in pairwise(edges)]
    return median(times_ms)
