"""HolisticTraceAnalysis: its tables as claims.

HTA shows tables and leaves the conclusion to the reader. Read as a reader would who takes the largest row for the cause:

- Temporal breakdown, mean over ranks. Idle time counts as a claim that the host does not issue (families host and input; transfers,
  too, where the idle time breakdown's largest reason of the compute stream is not "host_wait"). Where more than half of the first
  rank's kernels are shorter than their launches ("Short GPU kernels"), it names "launch-bound".
- The kernel breakdown's COMMUNICATION row (without overlap) names "exposed-communication", its MEMORY row "host-device-copies".
- Where neither is 10%, and computation is 80% and more: family "compute", of low confidence.
- The potential straggler is a claim of low confidence behind the others: HTA names one in each run of several ranks.

A row below 5% of the time is no claim, one of 20% and more is of high confidence. A run without kernels cannot be read.
"""

from benchmarks.diagnosis.claims import HIGH, LOW, Claim, NotReadError

MIN_SHARE = 5.0  # percent
MIN_HIGH = 20.0
MIN_SAID = 10.0
MIN_COMPUTE = 80.0


def read_claims(found: dict) -> list[Claim]:
    """Read HTA's tables of a run.

    Args:
        found: What hta_tables.py wrote.

    Raises:
        NotReadError: HTA could not read the run.
    """
    if "error" in found:
        raise NotReadError(found["error"])
    temporal = found["temporal"]
    if isinstance(temporal, dict) or not temporal:
        raise NotReadError(temporal["error"] if temporal else "no kernels")
    idle = sum(row["idle_time_pctg"] for row in temporal) / len(temporal)
    compute = sum(row["compute_time_pctg"] for row in temporal) / len(temporal)
    rest = 100.0 - idle - compute
    rows = [(idle, *describe_idle(found, idle))]
    kernels = {row["kernel_type"]: row["sum"] for row in list_rows(found["kernels"])}
    named = {
        "exposed-communication": ("communication", kernels.get("COMMUNICATION", 0)),
        "host-device-copies": ("memory kernels", kernels.get("MEMORY", 0)),
    }
    whole = max(sum(spent for _, spent in named.values()), 1)
    for name, (what, spent) in named.items():
        share = rest * spent / whole
        rows.append((share, (name,), (), f"{what} without overlap {share:.0f}%"))
    claims = []
    for share, classes, families, text in sorted(rows, key=lambda row: -row[0]):
        if share >= MIN_SHARE:
            claims.append(Claim(classes, families, confidence=HIGH if share >= MIN_HIGH else LOW, text=text))
    if max(idle, rest) < MIN_SAID and compute >= MIN_COMPUTE:
        claims.insert(0, Claim(families=("compute",), confidence=LOW, text=f"compute {compute:.0f}%"))
    stragglers = found.get("stragglers")
    if isinstance(stragglers, list) and stragglers:
        culprit = f"rank {stragglers[0]}"
        claims.append(Claim(("straggler",), culprit=culprit, confidence=LOW, text=f"potential straggler {culprit}"))
    return claims


def describe_idle(found: dict, idle: float) -> tuple[tuple[str, ...], tuple[str, ...], str]:
    """Write what idle time may mean: classes, families, text."""
    launches = list_rows(found["launches"])
    if launches and 2 * launches[0]["short"] > launches[0]["kernels"]:
        return ("launch-bound",), (), f"idle {idle:.0f}%, kernels shorter than their launches"
    reasons: dict[str, float] = {}
    for row in list_rows(found["idle"]):
        reasons[row["idle_category"]] = reasons.get(row["idle_category"], 0.0) + row["idle_time"]
    largest = max(reasons, key=lambda name: reasons[name], default="unknown")
    families = ("host", "input") if largest == "host_wait" else ("host", "input", "transfers")
    return (), families, f"idle {idle:.0f}%, {largest}"


def list_rows(table: object) -> list[dict]:
    """The rows of a table that HTA could make."""
    return table if isinstance(table, list) else []
