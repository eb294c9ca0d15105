"""The ledger of a run: what formulas said before its first step that each category takes,
beside what a snapshot measured."""

from megatron_lite.analysis.memory.memory_results import MeasuredCategory, Snapshot
from megatron_lite.formats.run_record import CategoryBytes, RunRecord


def build_ledger(snapshot: Snapshot, record: RunRecord) -> tuple[MeasuredCategory, ...]:
    """Rows in the order of a report; () where the record predicts nothing, so that there is nothing to compare with."""
    measured = {held.category: held.requested_bytes for held in snapshot.highest}
    rows = []
    for predicted in _find_formulas(record, snapshot.rank):
        row = MeasuredCategory(
            category=predicted.category,
            formula=predicted.formula,
            formula_bytes=predicted.num_bytes,
            measured_bytes=measured.get(predicted.category, 0),
        )
        rows.append(row)
    return tuple(rows)


def _find_formulas(record: RunRecord, rank: int | None) -> tuple[CategoryBytes, ...]:
    """The formulas of the stage of this rank or, if None, of the one that wrote the record."""
    plan = record.plan
    prediction = record.prediction
    if plan is None or prediction is None or prediction.categories is None:
        return ()
    of_stages = prediction.categories.of_stages
    stage = plan.stage.number or 0
    if rank is not None and plan.stages_of_ranks:
        if rank >= len(plan.stages_of_ranks):
            return ()  # a snapshot of another job
        stage = plan.stages_of_ranks[rank]
    return of_stages[stage] if stage < len(of_stages) else ()
