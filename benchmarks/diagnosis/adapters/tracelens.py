"""TraceLens: its tables as claims.

TraceLens shows tables and leaves the conclusion to the reader. Read as a reader would who takes the largest row for the cause; shares
are of the first rank's total time (`gpu_timeline`):

- `idle_time` claims that the host does not issue (families host and input), `exposed_comm_time` names "exposed-communication",
  `exposed_memcpy_time` "host-device-copies".
- Rows that are marked `is_recompute` name "redundant-compute" by their busy time.
- The category "elementwise" (copies are in it) names "memory-bound-kernels", where an `Optimizer.step` of elementwise operations is
  most of it also "unfused-optimizer"; GEMMs of float or double operands name "low-throughput-products". Both from 20% on.
- `straggler_summary`: where others wait for 5% of the time, a rank that arrives last in 60% of the collectives is a "straggler", else
  the ranks are "late-in-turns".
- Where nothing of this is 10%: family "compute", of low confidence.

A row below 5% of the time is no claim, one of 20% and more is of high confidence. A run without kernels cannot be read.
"""

from benchmarks.diagnosis.claims import HIGH, LOW, Claim, NotReadError

MIN_SHARE = 0.05
MIN_HIGH = 0.20
MIN_SAID = 0.10
MIN_LAST = 60.0  # percent of collectives
UPDATES = {"aten::addcmul_", "aten::addcdiv_", "aten::lerp_", "aten::sqrt"}
SLOW_TYPES = ("'float'", "'double'")


def read_claims(found: dict) -> list[Claim]:
    """Read TraceLens' tables of a run.

    Args:
        found: What tracelens_tables.py wrote.

    Raises:
        NotReadError: TraceLens could not read the run.
    """
    if "error" in found:
        raise NotReadError(found["error"])
    timeline = {row["type"]: row for row in found["gpu_timeline"] if not row.get("is_recompute")}
    if not timeline or not timeline["total_time"]["time ms"]:
        raise NotReadError("no kernels")
    total_ms = timeline["total_time"]["time ms"]
    again_ms = sum(
        row["time ms"] for row in found["gpu_timeline"] if row.get("is_recompute") and row["type"] == "busy_time"
    )
    rows: list[tuple[float, Claim]] = []

    def add(
        ms: float,
        text: str,
        classes: tuple[str, ...] = (),
        families: tuple[str, ...] = (),
        culprit: str = "",
        least: float = MIN_SHARE,
    ) -> None:
        share = ms / total_ms
        if share >= least:
            confidence = HIGH if share >= MIN_HIGH else LOW
            rows.append((share, Claim(classes, families, culprit, confidence, f"{text} {share:.0%}")))

    # what is marked as recomputation is busy, and missing from the unmarked rows
    add(timeline["idle_time"]["time ms"] - again_ms, "idle", families=("host", "input"))
    add(timeline["exposed_comm_time"]["time ms"], "exposed communication", ("exposed-communication",))
    add(timeline["exposed_memcpy_time"]["time ms"], "exposed copies", ("host-device-copies",))
    add(again_ms, "recomputation", ("redundant-compute",))
    categories: dict[str, float] = {}
    for row in found.get("ops_summary_by_category", []):
        categories[row["op category"]] = categories.get(row["op category"], 0.0) + row["total_direct_kernel_time_ms"]
    elementwise = ("memory-bound-kernels", "unfused-optimizer") if has_updates(found) else ("memory-bound-kernels",)
    add(categories.get("elementwise", 0.0), "elementwise", elementwise, least=MIN_HIGH)
    add(sum_slow_products(found), "GEMMs of fp32 or fp64", ("low-throughput-products",), least=MIN_HIGH)
    stragglers = found.get("stragglers")
    if isinstance(stragglers, list) and stragglers:
        waited = max(row["total_wait_time_us"] for row in stragglers) / 1e3
        last = max(stragglers, key=lambda row: row["pct_arrived_last"])
        if last["pct_arrived_last"] >= MIN_LAST:
            add(waited, "others wait for a rank", ("straggler",), culprit=f"rank {last['rank']}")
        else:
            add(waited, "ranks wait for others in turns", ("late-in-turns",))
    rows.sort(key=lambda row: -row[0])
    claims = [claim for _, claim in rows]
    if not rows or rows[0][0] < MIN_SAID:
        claims.insert(0, Claim(families=("compute",), confidence=LOW, text="compute"))
    return claims


def has_updates(found: dict) -> bool:
    """Whether most elementwise time is in operations of an optimizer's loop."""
    elementwise = [row for row in found.get("ops_summary", []) if "elementwise" in str(row["Categories"])]
    updates = [row for row in elementwise if row["name"] in UPDATES]
    spent = sum(row["total_direct_kernel_time_ms"] for row in elementwise)
    return 2 * sum(row["total_direct_kernel_time_ms"] for row in updates) > spent


def sum_slow_products(found: dict) -> float:
    """Sum the milliseconds of products whose operands are fp32 or fp64."""
    total = 0.0
    for row in found.get("GEMM", []):
        dtype = next((value for name, value in row.items() if "dtype" in name.lower()), "")
        spent = next((value for name, value in row.items() if name.startswith("Kernel Time (µs)_sum")), "0")
        if any(kind in dtype for kind in SLOW_TYPES):
            total += float(spent) / 1e3
    return total
