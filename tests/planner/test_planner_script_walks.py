"""The search for the largest batch: few walks, and it ends at the largest that fits."""

import pytest

from megatron_lite.planner.script_walks import MAX_TRIES, choose_next_batch

ROOM = 1000
CURVES = {
    "activations": lambda batch: 100 + 7 * batch,
    "the optimizer, then activations": lambda batch: max(700, 50 + 7 * batch),
    "nothing of the batch": lambda batch: 300,
    "almost nothing fits": lambda batch: 400 + 300 * batch,
    "with jumps of an allocator": lambda batch: 100 + 20 * -(-7 * batch // 20),
}


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("begin", [1, 8, 64, 1000])
def test_the_largest_batch_is_found_in_a_few_walks(name, begin):
    measure = CURVES[name]
    walked = {begin: measure(begin)}
    for _ in range(MAX_TRIES):
        batch = choose_next_batch(walked, ROOM)
        if batch in walked:
            break
        walked[batch] = measure(batch)
    found = max((batch for batch, peak in walked.items() if peak <= ROOM), default=0)
    best = max((batch for batch in range(1, 4096) if measure(batch) <= ROOM), default=0)
    assert found >= min(best, 4 * begin) * 0.9
