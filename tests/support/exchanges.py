"""What ranks exchange in a step: by formula, and as the walk of the real step counts it."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import replace

from megatron_lite.config.plan import Plan, plan_stages
from megatron_lite.formats.hardware import CUBLAS_WORKSPACE
from megatron_lite.planner.traffic import list_exchanges
from megatron_lite.planner.walk.walk_steps import walk_plan

# (dimension of the group, kind, bytes of the whole tensor, times) -> what is compared, by a key; {} of what is left out
CountCollective = Callable[[str, str, int, int], Mapping[Hashable, int]]


def count_exchanges(given: Plan, count: CountCollective) -> Iterator[tuple[Plan, Counter, Counter]]:
    """Count what one rank of each stage exchanges, in a step of as many micro-batches as are walked.

    Args:
        given: Of any rank.
        count: Says what one kind of collective adds.

    Yields:
        The stage's plan, the sums by formula, and those of the walk.
    """
    walked = replace(given, batch=replace(given.batch, final=2 * given.samples_per_pass))
    for one in plan_stages(walked):
        expected = Counter()
        for exchange in list_exchanges(one):
            expected.update(count(exchange.group, exchange.kind, exchange.num_bytes, exchange.times))
        found = Counter()
        # all steps exchange the same (test_planner_traffic)
        for call in walk_plan(one, 1, CUBLAS_WORKSPACE).collectives:
            found.update(count(*call))
        yield one, expected, found
