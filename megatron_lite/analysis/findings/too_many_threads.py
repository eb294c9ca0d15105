"""More computing threads than cores.

Meaning: every rank computes with as many threads as it sees cores, unless told otherwise. Several ranks on one
    machine then run several threads per core, which wait for each other at the end of every operator.
Measured: threads per rank times the ranks of this machine against its cores, as the run wrote them down (CPU runs).
Cost: not measured: often more than half of the speed.
Do: cores divided by ranks, a thread left for the loader.
Flags: OMP_NUM_THREADS=N before the command (torchrun sets 1 by itself with several ranks).
False alarm: cores that the run does not see because others use them: then even fewer threads are right.
"""

from megatron_lite.analysis.findings.base import Evidence, Finding
from megatron_lite.analysis.findings.run_settings import hardware, local_ranks, on_gpu, whole
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.variables import THREADS, fitting_threads

CODE, TITLE = "too-many-threads", "more computing threads than cores"


def find(facts: Facts) -> Finding | None:
    threads, cpus = whole(hardware(facts, "threads")), whole(hardware(facts, "cpus"))
    ranks = local_ranks(facts)
    if on_gpu(facts) is not False or not (threads and cpus and ranks):
        return None
    fewer = fitting_threads(threads, ranks, cpus)
    if fewer is None:
        return None
    seen = Evidence(f"{threads} threads x {ranks} ranks of this machine on {cpus} cores", "run.json")
    advice = f"share the cores out: {THREADS}={fewer}"
    return Finding(evidence=(seen,), advice=advice, flags=(f"{THREADS}={fewer}",), certain=False)
