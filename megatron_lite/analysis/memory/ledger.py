"""The ledger of a run: what formulas said before its first step that each category takes,
beside what a snapshot measured."""

from megatron_lite.analysis.memory.memory_results import LedgerRow, Snapshot
from megatron_lite.formats.run_record import CategoryBytes, RunRecord


def build_ledger(snapshot: Snapshot, record: RunRecord) -> tuple[LedgerRow, ...]:
    """Rows in the order of a report; () where the record predicts nothing, so that there is nothing to compare with."""
    measured = {held.category: held.requested_bytes for held in snapshot.highest}
    return tuple(
        LedgerRow(one.category, one.formula, one.num_bytes, measured.get(one.category, 0))
        for one in _find_formulas(record, snapshot.rank)
    )


def _find_formulas(record: RunRecord, rank: int | None) -> tuple[CategoryBytes, ...]:
    """The formulas of the stage of this rank or, if None, of the one that wrote the record."""
    plan, prediction = record.plan, record.prediction
    if plan is None or prediction is None or prediction.categories is None:
        return ()
    of_stages = prediction.categories.of_stages
    stage = plan.stage.number or 0
    if rank is not None and plan.stages_of_ranks:
        # the ranks of a snapshot that is from another job are not among them
        stage = plan.stages_of_ranks[rank] if rank < len(plan.stages_of_ranks) else len(of_stages)
    return of_stages[stage] if stage < len(of_stages) else ()
