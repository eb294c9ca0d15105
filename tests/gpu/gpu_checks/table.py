"""The results as text."""

from gpu_checks.outcome import Outcome


def line_of(outcome: Outcome) -> str:
    """'equal      passed       5 passed                    43 s of 60'."""
    limit = "" if outcome.limit_s is None else f"{outcome.seconds:5.0f} s of {outcome.limit_s:.0f}"
    return f"{outcome.part:<9} {outcome.result:<12} {outcome.words:<42} {limit}".rstrip()


def lines_of(outcomes: list[Outcome], seconds: float) -> list[str]:
    """The table, what stands under it, and a line for the whole."""
    bad = [outcome.part for outcome in outcomes if not outcome.is_good]
    remarks = [f"  {outcome.part}: {remark}" for outcome in outcomes for remark in outcome.remarks]
    verdict = f"not good: {', '.join(bad)}" if bad else "all that could run here passed"
    return ["", *map(line_of, outcomes), *(["", *remarks] if remarks else []), "", f"{verdict}; {seconds:.0f} s in all"]
