"""How many rows of logits the loss holds in fp32 at a time. Without torch: the planner asks, too."""

MAX_LOGITS = 2**24  # enough to fill a GPU


def count_rows(vocabulary: int, max_logits: int = MAX_LOGITS) -> int:
    """How many tokens' logits are held in fp32 at a time, where there may be so many logits."""
    return max(1, max_logits // vocabulary)
