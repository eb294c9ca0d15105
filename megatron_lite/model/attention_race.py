"""Which attention kernel is fastest on this GPU at the run's own shape: tried out, since that changes with GPU, shape and version."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median

import torch

from megatron_lite.model.attend import NAMES, Probe, sdpa_attention

Trial = Callable[[], None]  # one forward and backward
MARGIN = 1.05  # by how much another kernel must win: below, a resumed run might choose another, whose last bits differ
WARM_UPS, REPEATS = 3, 7


@dataclass(frozen=True)
class Race:
    """Kernels by name, of those that ran."""

    winner: str | None  # None: none ran
    times_ms: Mapping[str, float]  # forward and backward, median; {} where there was nothing to choose

    @property
    def words(self) -> str:
        """'1.21 ms, flash 1.60 ms forward and backward'; empty where nothing was timed."""
        if self.winner not in self.times_ms:
            return ""
        others = [
            f"{name} {ms:.2f} ms"
            for name, ms in sorted(self.times_ms.items(), key=lambda item: item[1])
            if name != self.winner
        ]
        return f"{', '.join([f'{self.times_ms[self.winner]:.2f} ms', *others])} forward and backward"


def fastest(probe: Probe, able: tuple[str, ...], preferred: str | None) -> Race:
    """A race of the kernels `able` on this GPU, with arguments like the probe's. Leaves no memory behind."""
    if len(able) < 2:
        return Race(preferred, {})
    trials = trials_of(probe, able)
    found = race(trials, preferred, gpu_ms)
    del trials
    torch.cuda.empty_cache()
    return found


def trials_of(probe: Probe, names: tuple[str, ...]) -> dict[str, Trial]:
    """Forward and backward of attention by each kernel, on normal numbers: zeros would be faster than any data."""
    backends = {name: backend for backend, name in NAMES.items()}
    q_BNTD, k_BGTD, v_BGTD = (
        torch.randn_like(like).requires_grad_() for like in (probe.q_BNTD, probe.k_BGTD, probe.k_BGTD)
    )
    mask_B1TT = None if probe.mask_B1TT is None else torch.ones_like(probe.mask_B1TT).tril()
    gradient_BNTD = torch.randn_like(q_BNTD)

    def trial(name: str):
        out_BNTD = sdpa_attention(
            q_BNTD, k_BGTD, v_BGTD, mask_B1TT, probe.dropout, 1, backend=backends[name], expand=False
        )
        torch.autograd.grad(out_BNTD, (q_BNTD, k_BGTD, v_BGTD), gradient_BNTD)

    return {name: partial(trial, name) for name in names}


def race(trials: Mapping[str, Trial], preferred: str | None, time_ms: Callable[[Trial], float]) -> Race:
    """The fastest of `trials`; `preferred`, torch's own choice, unless another is MARGIN faster. One trial is not timed.

    A kernel that torch offers and that then fails is out of the race.
    """
    if len(trials) < 2:
        return Race(preferred, {})
    times = {}
    for name, trial in trials.items():
        try:
            times[name] = time_ms(trial)
        except RuntimeError:  # out of memory is one, too
            continue
    return Race(_winner(times, preferred), times)


def _winner(times_ms: Mapping[str, float], preferred: str | None) -> str | None:
    fastest = min(times_ms, key=times_ms.get, default=preferred)
    stays = preferred in times_ms and times_ms[preferred] <= MARGIN * times_ms[fastest]
    return preferred if stays else fastest


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
    return median(first.elapsed_time(last) for first, last in pairwise(edges))
