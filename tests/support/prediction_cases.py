"""Predictions made by hand, as run.json holds them, and reports that hold them against a measurement."""

import dataclasses

import msgspec

from megatron_lite.analysis.memory.memory_results import Held, Snapshot
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.formats.run_record import LedgerRow, MemoryPrediction, Moment, Prediction, TimePrediction, TimeRow
from megatron_lite.planner.run_prediction import Forecast, record_forecast
from megatron_lite.units import GIB
from support import report_cases as cases

STATES = {"parameters": 2, "gradients": 2, "master weights": 4, "moments": 8}


def moment(phase: str, where: str, **gib: float) -> Moment:
    held = STATES | {name.replace("_", " "): value for name, value in gib.items()}
    rows = (LedgerRow(name, f"{name} of the model", int(value * GIB), "by hand") for name, value in held.items())
    return Moment(phase, where, tuple(rows))


def memory() -> MemoryPrediction:
    """31 GiB at its peak; `cases.snapshot()` has 32."""
    return MemoryPrediction(
        (
            moment("forward", "last layer", activations=12),
            moment("backward", "cross entropy", activations=12, logits_and_loss=3),
            moment("optimizer_step", "update of the weights"),
        )
    )


def time() -> TimePrediction:
    """50 ms; the made run's steps take 95.5, the made trace's 100."""
    rows = (
        TimeRow("matrix products", 25.0, "compute", "by hand"),
        TimeRow("attention", 5.0, "compute", "by hand"),
        TimeRow("loss", 10.0, "memory", "by hand"),
        TimeRow("all-reduce, not overlapped", 10.0, "link", "by hand"),
    )
    notes = ("2 nodes: the network is not known",)
    return TimePrediction("H100 SXM 80 GB", rows, 16384, 10**12, 2 * 10**12, 989.5, notes)


def record(memory: MemoryPrediction | None = None, time: TimePrediction | None = None) -> Prediction:
    """What run.json says was predicted."""
    return record_forecast(Forecast(memory, time, 80 * GIB, 1))


def measured(snapshot: Snapshot | None = None) -> Snapshot:
    """The made snapshot with the bytes that tensors asked for, as real ones have."""
    snapshot = snapshot or cases.snapshot()
    held = tuple(dataclasses.replace(one, requested_bytes=one.num_bytes) for one in snapshot.held)
    return dataclasses.replace(snapshot, held=held)


def facts(predicted: Prediction | None, device: str = "cuda", snapshots=(), ranks_seen=(), **of_run) -> Facts:
    plan = cases.PLAN | {"device": device, "world": {"rank": 1, "size": 2}}
    record = msgspec.structs.replace(cases.record_of(plan), prediction=predicted)
    run = dataclasses.replace(cases.run_of(), record=record, **of_run)
    return Facts(ranks_seen=ranks_seen, ranks=None, snapshots=snapshots, run=run, gaps=())


def held(**gib: float) -> tuple[Held, ...]:
    return tuple(Held(name.replace("_", " "), int(value * GIB), 1, int(value * GIB)) for name, value in gib.items())
