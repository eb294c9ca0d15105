"""Points about shapes and padding, and about what throughput counts."""

import numpy as np

from megatron_lite.analysis.audit.audit_results import Case, Outcome, blamed, failed, not_seen, passed
from megatron_lite.analysis.audit.recording import RUN_FOLDER, SHAPES
from megatron_lite.analysis.findings.base import Evidence
from megatron_lite.analysis.findings.overflow_storm import TOO_MANY
from megatron_lite.analysis.findings.seen.planned import argument, part, whole
from megatron_lite.analysis.findings.seen.steady import rows_named, steady_steps, where
from megatron_lite.analysis.run.learning import learning_of
from megatron_lite.analysis.run_facts import Facts, RankFacts
from megatron_lite.analysis.trace.columns import Kind
from megatron_lite.units import count

PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear", "aten::matmul")
MIN_TRACED = 2


def constant_shapes(case: Case) -> Outcome:
    """The same shapes in every step (nothing to compile anew), and no position without a token."""
    if found := case.found("recompilation", "vocabulary-padding"):
        return blamed(found)
    facts = case.facts
    seen = [*_shapes(facts.critical), *_sequence(facts)]
    if any(changes for _, changes in seen):
        return not_seen(f"how much of it is padding and what it compiles: {RUN_FOLDER}", *(text for text, _ in seen))
    if not seen or not _packed(facts):
        way = (
            _more_shapes(facts.critical)
            if not seen
            else f"how many positions are padding: {RUN_FOLDER}, with its own data set"
        )
        return not_seen(way, *(text for text, _ in seen))
    return passed(*(text for text, _ in seen), _packing())


def effective_tokens(case: Case) -> Outcome:
    """Tokens per second, counting only positions that train."""
    facts, run = case.facts, case.facts.run
    if run is None or run.tokens_per_second is None:
        return not_seen(RUN_FOLDER)
    skipped, lost = sum(run.skipped), sum(run.not_finite)
    text = f"{count(run.tokens_per_second)} tokens/s over {sum(run.ordinary)} ordinary steps, all ranks"
    seen = Evidence(text, "steps.jsonl")
    if skipped >= TOO_MANY * run.steps and skipped:
        return failed(
            "count only steps that update the weights; see why they are skipped",
            Evidence(f"{text}, with {skipped} of {run.steps} steps skipped: their tokens train nothing", "steps.jsonl"),
            code="overflow-storm",
        )
    if lost:
        return failed(
            "go back to the last checkpoint before the first loss that is not finite, and lower --lr",
            Evidence(f"{text}, but {learning_of(run).losses}", "steps.jsonl"),
            code="no-learning",
        )
    if argument(facts, "eod_mask_loss"):
        return not_seen("how many positions have a loss is not recorded: without --eod-mask-loss all have one", seen)
    if not _packed(facts):
        return not_seen("how many positions are padding is not recorded: a .bin/.idx data set has none", seen)
    return passed(seen, _packing(), Evidence(f"{skipped} of {run.steps} steps skipped", "steps.jsonl"))


def _shapes(one: RankFacts | None) -> list[tuple[Evidence, bool]]:
    """(shapes of products over the steady steps, whether they change)."""
    if one is None or not one.trace.with_shapes or steady_steps(one) < MIN_TRACED:
        return []
    rows = rows_named(one, PRODUCTS.__contains__, Kind.OP)
    events, steps = one.trace.events, one.placing.step
    rows = rows[events.shapes[rows] >= 0]
    each = [frozenset(np.unique(events.shapes[rows[steps[rows] == step]]).tolist()) for step in np.unique(steps[rows])]
    if len(each) < MIN_TRACED:
        return []
    changes = len(set(each)) > 1
    same = "not the same" if changes else "the same"
    text = f"{len(frozenset().union(*each))} shapes of products, {same} in each of {len(each)} steady steps"
    return [(Evidence(text, where(one)), changes)]


def _more_shapes(one: RankFacts | None) -> str:
    if one is not None and one.trace.with_shapes:
        return "a window with two steady steps or more: --profile-step-end"
    return SHAPES


def _sequence(facts: Facts) -> list[tuple[Evidence, bool]]:
    length, run = whole(part(facts, "shape", "seq_length")), facts.run
    if not length or not run.steps:
        return []
    late = sum(compiles and not evaluates for compiles, evaluates in list(zip(run.compiling, run.evaluating))[1:])
    return [
        (
            Evidence(
                f"every sequence has {length:,} positions; {late} of {run.steps} steps compiled after the first",
                "run.json",
            ),
            False,
        )
    ]


def _packed(facts: Facts) -> bool:
    """This trainer's own data sets cut one stream of tokens: nothing is padded. Other loaders are not known."""
    return argument(facts, "dataloader_type") in ("single", "cyclic")


def _packing() -> Evidence:
    return Evidence(
        "every position holds a token: the data set cuts a stream of tokens, without padding (--dataloader-type)",
        "run.json",
    )
