"""Says which error gradients that differ show."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_lite.analysis.equality.call_order import CallOrder
from megatron_lite.analysis.equality.compared_parts import ComparedParts
from megatron_lite.analysis.equality.facts import LayoutFacts
from megatron_lite.analysis.equality.gradient_patterns import Pattern, Shown, is_same_ratio, show_pattern
from megatron_lite.formats.prove_report import Difference, ErrorKind
from megatron_lite.units import counted, significant

MAX_OTHERS_SHOWING = 8  # names behind the first
NEAR_SUM = 1e-2  # relative: half of what the sum of replicas may be off from a number of times the gradient
EXACT = 2e-3  # relative: a ratio that is this near to a size of the layout comes from it


@dataclass(frozen=True)
class _Case:
    """A step's gradients, as all judgments of them need them."""

    shown: dict[str, Shown]
    order: CallOrder
    facts: LayoutFacts
    # from 1
    step: int

    def select(self, *patterns: Pattern) -> list[str]:
        """Names with a pattern, in the order of backward."""
        return self.order.sort_backward([name for name, shown in self.shown.items() if shown.pattern in patterns])

    @property
    def equal(self) -> list[str]:
        """Names of which both runs have the same, and of which a ratio would say something."""
        return [name for name in self.select(Pattern.EQUAL) if self.shown[name].is_right]

    def deny(self, names: Sequence[str]) -> list[str]:
        """Names whose gradients certainly have not the factor of others."""
        factor = self.shown[names[0]].ratio
        return [name for name in self.select(Pattern.EQUAL) if self.shown[name].denies(factor)]

    def make(
        self, kind: ErrorKind, names: Sequence[str], evidence: str, remedy: str, confidence: str = "high"
    ) -> Difference:
        """Make a difference that names show."""
        return Difference(
            kind=kind,
            where=names[0],
            step=self.step,
            evidence=evidence,
            remedy=remedy,
            others=tuple(names[1 : MAX_OTHERS_SHOWING + 1]),
            confidence=confidence,
        )


def check_gradients(entries: ComparedParts, order: CallOrder, facts: LayoutFacts, step: int) -> list[Difference]:
    """Name the errors that a step's gradients show, first those that backward reaches first.

    Args:
        entries: The ranks' gradients beside the reference's.
        order: The order in which modules are called.
        facts: Sizes of the layout.
        step: Number of the step, from 1.
    """
    shown = {name: show_pattern(parts) for name, parts in entries.compared.items()}
    case = _Case(shown, order, facts, step)
    found = [
        *_check_lacking(case, entries),
        *_check_elsewhere(case),
        *_check_unreduced(case),
        *_check_scaled(case),
    ]
    if not found:
        return _check_other(case)
    ranks = {name: number for number, name in enumerate(order.sort_backward(list(shown)))}
    return sorted(found, key=lambda difference: ranks.get(difference.where, -1))


def _check_lacking(case: _Case, entries: ComparedParts) -> list[Difference]:
    names = case.order.sort_backward(list(entries.lacking))
    found = []
    if names:
        ranks = describe_ranks(entries.lacking[names[0]])
        found.append(
            case.make(
                ErrorKind.NO_GRADIENT,
                names,
                f"no gradient of {names[0]} on {ranks}, while the reference has one"
                + (f"; so have {counted(len(names) - 1, 'more parameter')}" if len(names) > 1 else ""),
                "look at what keeps it out of the graph: detach, no_grad, requires_grad, a branch of one rank",
            )
        )
    names = case.order.sort_backward(list(entries.surplus))
    if names:
        ranks = describe_ranks(entries.surplus[names[0]])
        found.append(
            case.make(
                ErrorKind.NO_GRADIENT,
                names,
                f"a gradient of {names[0]} on {ranks}, while the reference has none",
                "look at what makes the parameter take part on several ranks only",
                "medium",
            )
        )
    return found


def describe_ranks(ranks: Sequence[int]) -> str:
    """Write which ranks: "rank 1", "ranks 0, 1, 2 and 5 more"."""
    numbers = sorted(set(ranks))
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    named = ", ".join(str(number) for number in numbers[:4])
    rest = len(numbers) - 4
    return f"ranks {named} and {rest} more" if rest > 0 else f"ranks {named}"


def _check_elsewhere(case: _Case) -> list[Difference]:
    names = case.select(Pattern.ELSEWHERE)
    if not names:
        return []
    rank, starts = case.shown[names[0]].elsewhere[0]
    return [
        case.make(
            ErrorKind.WRONG_SHARD,
            names,
            f"the gradient that rank {rank} has of {names[0]} is that of the block at {list(starts)} of the whole",
            "look at which block each rank takes: its offset must be its rank within the group times the length",
        )
    ]


def _check_unreduced(case: _Case) -> list[Difference]:
    names = case.select(Pattern.UNREDUCED)
    tied = [name for name in names if _is_tied(case, name)]
    rest = [name for name in names if name not in tied]
    found = []
    if tied:
        own = " and ".join(case.shown[tied[0]].own_names)
        if len(case.shown[tied[0]].own_names) == 1:
            own = f"copies of {own} on several stages"
        found.append(
            case.make(
                ErrorKind.TIED_NOT_SUMMED,
                tied,
                f"{own} are one weight in the reference; their gradients differ, and their sum over the reference's is "
                f"{write_ratio(case.shown[tied[0]].sum_ratio)}",
                "add up the gradients of both before the update, by all_reduce between the ranks that hold them",
            )
        )
    if rest:
        found.append(_describe_unreduced(case, rest))
    return found


def _is_tied(case: _Case, name: str) -> bool:
    """Whether ranks have a weight under several names, or on several stages of which all else is right."""
    shown = case.shown[name]
    return len(shown.own_names) > 1 or (bool(case.equal) and case.facts.spans_stages(shown.ratios))


def _describe_unreduced(case: _Case, names: list[str]) -> Difference:
    shown = case.shown[names[0]]
    count = shown.replicas
    how = ""
    remedy = "bring the gradients together between the ranks before the update"
    confidence = "high"
    if is_same_ratio(shown.sum_ratio, 1.0, NEAR_SUM):
        how = f"their sum over the {count} that differ is {case.facts.expected}"
        remedy = "all_reduce these gradients with SUM between the ranks that split the layers or the sequence"
    elif is_same_ratio(shown.sum_ratio, count, NEAR_SUM):
        how = f"their mean over the {count} that differ is {case.facts.expected}"
        remedy = "average these gradients between the data-parallel ranks, as DistributedDataParallel does"
    else:
        how = f"their sum is {write_ratio(shown.sum_ratio)} times {case.facts.expected}"
        confidence = "medium"
    scope = f"{counted(len(names), 'parameter')}, not of {case.equal[0]}," if case.equal else "all parameters"
    return case.make(
        ErrorKind.MISSING_REDUCTION, names, f"gradients of {scope} differ between ranks; {how}", remedy, confidence
    )


def write_ratio(value: float) -> str:
    """Write a ratio with the digits that tell it from 1."""
    return significant(value, 6)


def _check_scaled(case: _Case) -> list[Difference]:
    """Name factors: one of all parameters, of some, or one of each rank."""
    names = case.select(Pattern.SCALED, Pattern.SCALED_BY_RANK)
    telling = [name for name in names if case.shown[name].is_telling]
    if not names or (not telling and case.select(Pattern.UNREDUCED, Pattern.ELSEWHERE, Pattern.OTHER)):
        return []
    by_rank = _find_factors_of_ranks(case)
    if by_rank:
        return [_describe_local_norm(case, names, by_rank)]
    found = []
    groups = _group_by_ratio(case, case.select(Pattern.SCALED), bool(telling))
    others = case.select(Pattern.UNREDUCED, Pattern.SCALED_BY_RANK, Pattern.ELSEWHERE)
    if len(groups) == 1 and not others and not case.deny(groups[0]):
        found.append(_describe_factor(case, groups[0]))
    else:
        found += [_describe_partial_factor(case, group) for group in groups[:2]]
    by_rank_names = [name for name in case.select(Pattern.SCALED_BY_RANK) if name in telling or not telling]
    if by_rank_names:
        found.append(_describe_factor_by_rank(case, by_rank_names))
    return found


def _group_by_ratio(case: _Case, names: Sequence[str], needs_telling: bool) -> list[list[str]]:
    """Group parameters that have the same ratio; those of which it says nothing only join where telling ones exist."""
    groups: list[list[str]] = []
    for name in sorted(names, key=lambda name: not case.shown[name].is_telling):
        for group in groups:
            if is_same_ratio(case.shown[group[0]].ratio, case.shown[name].ratio, _tolerate(case, name)):
                group.append(name)
                break
        else:
            if case.shown[name].is_telling or not needs_telling:
                groups.append([name])
    return [case.order.sort_backward(group) for group in groups]


def _find_factors_of_ranks(case: _Case) -> dict[int, float]:
    """The factor of each rank, if all that differs is one of each; {} where something else does."""
    ratios: dict[int, list[float]] = {}
    for shown in case.shown.values():
        if shown.pattern not in (Pattern.EQUAL, Pattern.SCALED, Pattern.SCALED_BY_RANK):
            return {}
        if not shown.is_telling:
            continue
        for rank, ratio in shown.ratios.items():
            ratios.setdefault(rank, []).append(ratio)
    factors = {rank: float(np.median(values)) for rank, values in ratios.items()}
    tolerance = max((shown.ratio_tolerance for shown in case.shown.values() if shown.is_telling), default=EXACT)
    are_steady = all(
        is_same_ratio(value, factors[rank], tolerance) for rank, values in ratios.items() for value in values
    )
    largest = max(map(abs, factors.values()), default=0.0)
    apart = max(factors.values(), default=0.0) - min(factors.values(), default=0.0)
    are_one = apart <= 4 * tolerance * largest
    is_layout = any(
        case.facts.explain(value, EXACT) or (value and case.facts.explain(1 / value, EXACT))
        for value in factors.values()
    )
    has_right_one = any(is_same_ratio(value, 1.0) for value in factors.values())
    if not are_steady or are_one or (is_layout and has_right_one):
        return {}
    return factors


def _tolerate(case: _Case, name: str) -> float:
    return max(EXACT, 2 * case.shown[name].ratio_tolerance)


def _describe_factor(case: _Case, names: list[str]) -> Difference:
    """Say what a factor of all gradients comes from."""
    ratio = case.shown[names[0]].ratio
    tolerance = _tolerate(case, names[0])
    every = f"all parameters: every gradient is {write_ratio(ratio)} times {case.facts.expected}"
    if abs(ratio) <= tolerance:
        return case.make(
            ErrorKind.NO_GRADIENT,
            names,
            "every gradient is zero",
            "look at what sets gradients to zero before the update",
        )
    times = case.facts.explain(ratio, tolerance)
    if times:
        size = significant(ratio, 2)
        remedy = {
            "micro-batches of a step": f"divide the loss by the {size} micro-batches of a step",
        }.get(times[0], f"average instead of adding up: divide by {size} once")
        evidence = f"{every}; there are {case.facts.describe(ratio, tolerance)}"
        return case.make(ErrorKind.FACTOR, names, evidence, remedy)
    divided = case.facts.explain(1 / ratio, tolerance)
    if divided:
        size = significant(1 / ratio, 2)
        remedy = f"divide by {size} once: the loss, or the sum over ranks, is divided already"
        evidence = f"{every}; there are {case.facts.describe(1 / ratio, tolerance)}"
        return case.make(ErrorKind.FACTOR, names, evidence, remedy)
    return case.make(
        ErrorKind.FACTOR,
        names,
        f"{every}; no size of the layout makes this factor",
        "look at what the loss or the gradients are multiplied with",
    )


def _describe_partial_factor(case: _Case, names: list[str]) -> Difference:
    """Say what a factor of some gradients comes from."""
    ratio = case.shown[names[0]].ratio
    tolerance = _tolerate(case, names[0])
    right = case.deny(names)
    beside = f", that of {right[0]} is right" if right else ""
    times_expected = f"{write_ratio(ratio)} times {case.facts.expected}"
    evidence = f"the gradients of {counted(len(names), 'parameter')} are {times_expected}{beside}"
    if abs(ratio) <= tolerance:
        return case.make(
            ErrorKind.NO_GRADIENT,
            names,
            f"the gradients of {counted(len(names), 'parameter')} are zero{beside}",
            "look at what sets these gradients to zero or keeps the parameters out of the graph",
        )
    times = [name for name in case.facts.explain(ratio, tolerance) if "micro" not in name]
    if times and all(len(case.shown[name].ratios) == 1 for name in names):
        evidence += f"; there are {case.facts.describe(ratio, tolerance)}, of which one has each of them"
        return case.make(
            ErrorKind.FACTOR, names, evidence, "divide these gradients by the ranks that their sums are of"
        )
    if times:
        return case.make(
            ErrorKind.REDUCED_TWICE,
            names,
            f"{evidence}; there are {case.facts.describe(ratio, tolerance)}",
            "add up these gradients between ranks once: they are whole before the last reduction",
            "high" if right else "medium",
        )
    divided = case.facts.explain(1 / ratio, tolerance)
    if divided:
        evidence += f"; there are {case.facts.describe(1 / ratio, tolerance)}"
        return case.make(ErrorKind.FACTOR, names, evidence, "divide these gradients once, or add up what was averaged")
    return case.make(ErrorKind.FACTOR, names, evidence, "look at what these gradients are multiplied with")


def _describe_local_norm(case: _Case, names: Sequence[str], by_rank: Mapping[int, float]) -> Difference:
    return case.make(
        ErrorKind.LOCAL_NORM,
        names,
        f"each rank's gradients are {case.facts.expected} times a factor of its own: {_write_factors(by_rank)}",
        "clip by the norm over all ranks' parts: add up the squares between ranks before the root",
        "high" if all(factor > 0 for factor in by_rank.values()) else "medium",
    )


def _write_factors(by_rank: Mapping[int, float]) -> str:
    return ", ".join(f"rank {rank} {write_ratio(ratio)}" for rank, ratio in sorted(by_rank.items())[:4])


def _describe_factor_by_rank(case: _Case, names: Sequence[str]) -> Difference:
    figures = _write_factors(case.shown[names[0]].ratios)
    return case.make(
        ErrorKind.FACTOR,
        names,
        f"the gradient of {names[0]} is {case.facts.expected} times a factor of each rank: {figures}",
        "look at what each rank multiplies these gradients with",
        "medium",
    )


def _check_other(case: _Case) -> list[Difference]:
    """Report what no pattern explains."""
    names = case.select(Pattern.OTHER)
    if not names:
        return []
    worst = case.shown[names[0]].worst
    figures = f"by {significant(worst.error, 2)} of its norm (ratio {write_ratio(worst.ratio)})" if worst else ""
    return [
        case.make(
            ErrorKind.UNKNOWN,
            names,
            f"the gradient of {names[0]} differs {figures}; {len(case.equal)} others agree",
            "look at what backward does between this module and the ones behind it",
            "medium",
        )
    ]
