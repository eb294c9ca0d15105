"""Two runs or traces beside each other: what changed, what did not, and what cannot be told."""

from megatron_lite.analysis.compare.figures import Change, Comparison, Pair, Total
from megatron_lite.analysis.compare.kernels import kernels_of
from megatron_lite.analysis.compare.noise import exact
from megatron_lite.analysis.compare.sentence import sentence_of
from megatron_lite.analysis.compare.settings import flags_that_differ, objections
from megatron_lite.analysis.compare.times import STEP, TRACED_STEP, phases_of_runs, totals_of
from megatron_lite.analysis.compare.traced import phases_of, roles_of, rows_of, side_of
from megatron_lite.analysis.contradictions import contradictions_of
from megatron_lite.analysis.facts import Facts
from megatron_lite.errors import ConfigError, UserError
from megatron_lite.estimate.memory_categories import CATEGORIES

ONE_START = (
    "one start of each: what differs from start to start (clock speeds, neighbours, placement) is not in the noise bands; "
    "repeat both, alternating, before a small difference is believed"
)


def compare(a: Facts, b: Facts, force: bool = False, titles: tuple[str, str] = ("A", "B")) -> Comparison:
    """B against A. ConfigError, a line for each reason, where they are of another model or batch and `force` is not given;
    UserError where they have nothing in common."""
    reasons = objections(a, b)
    if reasons and not force:
        raise ConfigError([f"{reason}; --force compares all the same." for reason in reasons])
    totals = tuple(totals_of(a, b))
    if not totals:
        raise UserError(
            f"{titles[0]}, {titles[1]}: they have nothing in common to compare; both need steps.jsonl with ordinary "
            "steps, a trace with a steady step, or a memory snapshot."
        )
    parts = _traced(a, b) if any(total.name == TRACED_STEP for total in totals) else _told_by_runs(a, b)
    return Comparison(
        title_a=titles[0],
        title_b=titles[1],
        sentence=_sentence(a, b, totals, parts),
        flags=flags_that_differ(a, b),
        totals=totals,
        memory=_memory(a, b),
        notes=tuple(_notes(a, b, totals)),
        forced=tuple(reasons),
        **parts,
    )


def _sentence(a: Facts, b: Facts, totals: tuple[Total, ...], parts: dict) -> str:
    """A profiler slows its steps down: differences of its phases are no parts of an ordinary step's difference."""
    if any(total.name == STEP for total in totals):
        return sentence_of(totals, {}, phases_of_runs(a.run, b.run))
    return sentence_of(totals, parts["rows"], parts["phases"])


def _traced(a: Facts, b: Facts) -> dict:
    """The fields of Comparison that come from traces."""
    one, other = side_of(a.critical), side_of(b.critical)
    alike = one.time.on_gpu == other.time.on_gpu  # kernels of a GPU and operators of a CPU are no pairs
    return {
        "rows": rows_of(one, other),
        "phases": phases_of(one, other),
        "phases_of": "traces of the profiled steps",
        "roles": roles_of(one, other) if alike else {},
        "kernels": kernels_of(one.work, other.work) if alike else (),
    }


def _told_by_runs(a: Facts, b: Facts) -> dict:
    """The same fields, as far as steps.jsonl has them."""
    phases = phases_of_runs(a.run, b.run) if a.run and b.run else ()
    return {
        "rows": {},
        "phases": phases,
        "phases_of": "steps.jsonl, ordinary steps" if phases else "",
        "roles": {},
        "kernels": (),
    }


def _memory(a: Facts, b: Facts) -> dict[str, Pair]:
    """Bytes by category at the highest peak of either, in the order of a report; {} without two snapshots."""
    if not a.snapshots or not b.snapshots:
        return {}
    mine, theirs = (
        {held.category: held.num_bytes for held in max(facts.snapshots, key=lambda one: one.peak_bytes).held}
        for facts in (a, b)
    )
    return {
        name: exact(mine.get(name, 0), theirs.get(name, 0)) for name in CATEGORIES if mine.get(name) or theirs.get(name)
    }


def _notes(a: Facts, b: Facts, totals: tuple[Total, ...]) -> list[str]:
    notes = []
    if not (a.plan and b.plan):
        notes.append(
            "model and batch are known of runs of this trainer only: whether both did the same work is for you to say"
        )
    devices = [facts.critical.time.device or "CPU" for facts in (a, b) if facts.critical]
    if len(set(devices)) > 1:
        notes.append(f"the devices differ: {devices[0]} against {devices[1]}")
    for name, facts in (("A", a), ("B", b)):
        notes += [f"{name}: {doubt}" for doubt in contradictions_of(facts)]
        slower = facts.run.profiler_slowdown if facts.run else None
        if slower and slower > 1.1 and facts.critical:
            notes.append(
                f"{name}'s profiled steps took {slower:.2f} times as long as those before: compare traced times among themselves only"
            )
    if any(facts.snapshots and facts.snapshots[0].simulated for facts in (a, b)):
        notes.append("memory is what tensors on the CPU took, not a GPU's allocator")
    unclear = [total for total in totals if total.pair.change is Change.UNCLEAR]
    if any(total.unit == "ms" and total.pair.band for total in unclear):
        notes.append(
            "steps vary so much that whole runs cannot be told apart: what seems to change in single rows may be the machine"
        )
    elif unclear:
        notes.append("few steps were seen: a longer run or a longer window would tell more")
    return [*notes, ONE_START] if any(total.unit == "ms" for total in totals) else notes
