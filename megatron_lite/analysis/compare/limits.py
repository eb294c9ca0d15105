"""Limits on changes from one run to another, for CI: kept, exceeded, or not to be told within the noise."""

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass

from megatron_lite.analysis.compare.compare import PEAK, TRACED_STEP, WHOLE_STEP
from megatron_lite.analysis.compare.compare_results import Comparison, Pair
from megatron_lite.errors import UserError

TOTALS = {  # names in limits: titles of a comparison's totals, the first that there is
    "step_ms": (WHOLE_STEP, TRACED_STEP),
    "tokens_per_second": ("tokens per second",),
    "mfu": ("MFU, causal attention",),
    "peak_bytes": (PEAK,),
}
_LIMIT = re.compile(r"\s*(\w{1,60})\s*([<>])\s*([+-]?\d{1,6}(?:\.\d{1,6})?)\s*%\s*")


class Outcome(str, enum.Enum):
    """Outcomes of holding a limit against a comparison."""

    KEPT = "kept"
    EXCEEDED = "exceeded"
    UNCLEAR = "cannot tell"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Limit:
    """A change that must not come out, such as 'step_ms > +5%'."""

    text: str
    name: str
    is_upper: bool
    share: float  # 0.05


@dataclass(frozen=True)
class Judged:
    """A limit, what it was held against, and the outcome."""

    limit: Limit
    pair: Pair | None  # None: neither run says
    outcome: Outcome


def read_limit(text: str) -> Limit:
    """Read a limit as it is typed. Raises UserError for what is none."""
    found = _LIMIT.fullmatch(text)
    if found is None:
        raise UserError(f'--fail-if "{text}": give a name, > or <, and a change in percent, as in "step_ms > +5%".')
    name, sign, percent = found.groups()
    return Limit(text=text, name=name, is_upper=sign == ">", share=float(percent) / 100)


def judge(found: Comparison, limits: Iterable[Limit]) -> tuple[Judged, ...]:
    """Hold each limit against the comparison. Raises UserError for a name that it does not have."""
    totals = {total.name: total.pair for total in found.totals}
    pairs = {f"{phase.name}_ms": phase.device or phase.host for phase in found.phases}
    names = (*TOTALS, *pairs)
    for name, titles in TOTALS.items():
        known = [totals[title] for title in titles if title in totals]
        if known:
            pairs[name] = known[0]
    judged = []
    for limit in limits:
        if limit.name not in names:
            raise UserError(f'--fail-if "{limit.text}": there are {", ".join(names)}.')
        pair = pairs.get(limit.name)
        judged.append(Judged(limit, pair, _find_outcome(limit, pair)))
    return tuple(judged)


def _find_outcome(limit: Limit, pair: Pair | None) -> Outcome:
    """Find whether a limit is kept: it is told only where the whole band of what the change may be says the same."""
    if pair is None or pair.band is None or pair.ratio is None or not pair.a:
        return Outcome.UNCLEAR
    sign = 1 if limit.is_upper else -1
    change = sign * (pair.ratio - 1)
    most = sign * limit.share
    band = pair.band / pair.a
    if change - band > most:
        return Outcome.EXCEEDED
    if change + band <= most:
        return Outcome.KEPT
    return Outcome.UNCLEAR
