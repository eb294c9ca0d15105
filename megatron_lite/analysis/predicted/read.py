"""What a run's record says was predicted of it."""

from megatron_lite.estimate.prediction import LedgerRow, MemoryPrediction, Moment, TimePrediction, TimeRow


def predicted_memory(record: dict) -> MemoryPrediction | None:
    """From run.json without its plan; None where it has none, or none that can be read."""
    try:
        moments = record["prediction"]["memory"]["moments"]
        read = tuple(_moment(moment) for moment in moments)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None
    return MemoryPrediction(read) if read else None


def predicted_time(record: dict) -> TimePrediction | None:
    """Likewise; None too where no row bounds the step."""
    try:
        given = record["prediction"]["time"]
        rows = tuple(
            TimeRow(str(row["name"]), float(row["ms"]), str(row["bound"]), str(row["formula"])) for row in given["rows"]
        )
        read = TimePrediction(
            gpu=str(given["gpu"]),
            rows=rows,
            tokens=int(given["tokens"]),
            flops_causal=int(given["flops_causal"]),
            flops_full=int(given["flops_full"]),
            peak_tflops=float(given["peak_tflops"]),
            notes=tuple(map(str, given["notes"])),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None
    return read if 0 < read.step_ms < float("inf") else None


def _moment(given: dict) -> Moment:
    rows = (
        LedgerRow(str(row["category"]), str(row["name"]), int(row["num_bytes"]), str(row["formula"]))
        for row in given["rows"]
    )
    return Moment(str(given["phase"]), str(given["where"]), tuple(rows))
