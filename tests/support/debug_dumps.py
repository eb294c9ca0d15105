"""Dumps and pages of torch.distributed.debug, as torch 2.13 writes them of two to many ranks."""

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

PAGE_HEAD = """
<!doctype html>
<head>
    <title>FlightRecorder - PyTorch Distributed</title>
</head>

<nav>
    <h1>Torch Distributed Debug Server</h1>
</nav>

<section class="content">
"""
HOST = "node"
REFUSED = "ClientConnectorError: Cannot connect to host node1:5001 ssl:default [Connect call failed ('10.0.0.1', 5001)]"
TIMED_OUT = "TimeoutError: "
NO_HANDLER = "Handler torchcomms_health_check not found: Failed to find handler torchcomms_health_check"


def make_address(rank: int, handler: str) -> str:
    return f"http://{HOST}{rank}:{5000 + rank}/handler/{handler}?"


def make_dump(answers: Sequence[str], handler: str, failures: Mapping[int, tuple[int, str]] | None = None) -> str:
    """A periodic dump.

    Args:
        answers: By rank.
        handler: What was asked for: dump_traceback, pyspy_dump, wait_counter_values.
        failures: Status and text of ranks that did not answer.
    """
    failed = failures or {}
    parts = []
    if failed:
        parts.append(f"PARTIAL DATA: {len(answers) - len(failed)}/{len(answers)} workers responded")
        parts += [f"  Rank {rank}: {text}" for rank, (_, text) in failed.items()]
        parts.append("")
    for rank, answer in enumerate(answers):
        parts.append(f"=== Rank {rank}: {make_address(rank, handler)} ===")
        parts.append(f"Error: {failed[rank][0]}" if rank in failed else answer)
    return "\n".join(parts)


def make_page(answers: Sequence[str], handler: str, failures: Mapping[int, int] | None = None) -> str:
    """A page as a browser saves it; `failures` has the status of ranks that did not answer."""
    parts = [PAGE_HEAD]
    for rank, answer in enumerate(answers):
        parts.append(f"        <h2>Rank {rank}: {make_address(rank, handler)}</h2>\n        ")
        if rank in (failures or {}):
            parts.append(f"            <p>Failed to fetch: status={failures[rank]}</p>\n            <pre></pre>")
        else:
            parts.append(f"            <pre>{answer}</pre>")
        parts.append("        ")
    return "\n".join([*parts, "</section>"])


def make_tables_page(rows: Sequence[Mapping[str, str]], summary: str = "") -> str:
    """The page of torch's analysis, with a table of collectives."""
    heads = "".join(f'<th style="text-align: right;">{name}  </th>' for name in rows[0])
    lines = ["".join(f"<td>{html.escape(value)}   </td>" for value in row.values()) for row in rows]
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return (
        f"{PAGE_HEAD}\n    {f'<pre>{summary}</pre>' if summary else ''}\n    <h2>Groups</h2>\n    <table>\n</table>\n"
        f"    <h2>Collectives</h2>\n    <table>\n<thead>\n<tr>{heads}</tr>\n</thead>\n<tbody>\n{body}\n</tbody>\n</table>\n"
        "    <h2>NCCL Calls</h2>\n</section>"
    )


def make_traceback(file: str, line: int, function: str) -> str:
    """What faulthandler tells of a process: the thread of the server, and the main one."""
    return (
        "Current thread 0x00007f2a5ffff6c0 (most recent call first):\n  <no Python frame>\n\n"
        "Thread 0x00007f2a90e3fb80 (most recent call first):\n"
        f'  File "{file}", line {line} in {function}\n  File "{file}", line 200 in <module>\n'
    )


def make_counters(**active: int) -> str:
    """Wait counters as a handler answers them, with the number of threads in each."""
    counters: dict[str, Any] = {
        f"pytorch.wait_counter.{name}": {
            "active_count": count,
            "max_time_us": 92,
            "total_calls": 6,
            "total_time_us": 273,
        }
        for name, count in active.items()
    }
    return json.dumps(counters, indent=2)


def make_store(world_size: int) -> str:
    """A dump of the store."""
    lines = [f"debug_server/rank{rank}: b'http://{HOST}{rank}:{5000 + rank}'" for rank in range(world_size)]
    return "\n".join([*lines, r"default_pg/0//cpu//0/0: b'\x02\x00vm\x88'"])


# torch.distributed.flight_recorder's tables of three ranks: 2 did not enter the third collective, 1 calls another fourth
TABLES = """=== FR Trace ===
--- Groups ---
id                     desc          size
0-4850097147344926394  default_pg       3
19000494312501845833   TP               2
--- Memberships ---
group_id                 global_rank
0-4850097147344926394              0
0-4850097147344926394              1
0-4850097147344926394              2
19000494312501845833               0
19000494312501845833               1
--- Collectives ---
  id    group_id  pass_check      collective_seq_id    p2p_seq_id    record_id  pg_desc       collective_name        input_sizes    output_sizes    expected_ranks    collective_state    collective_frames    input_numel    output_numel    missing_ranks    mismatch_collectives                                                                                                                                                                                                                                                                                                                                                                                                                                                   type_of_mismatch
   0           0  True                            1             0            0  0:default_pg  nccl:all_reduce        [[4, 2]]       [[4, 2]]        {0, 1, 2}         completed           []
   1           1  True                            1             0            1  1:TP          nccl:_all_gather_base  [[8]]          [[16]]          {0, 1}            completed           []
   2           0  True                            2             0            2  0:default_pg  nccl:all_reduce        [[1024]]       [[1024]]        {0, 1, 2}         started             []                                                  {2}
   3           1  False                           2             0            3  1:TP          nccl:all_reduce        [[8]]          [[8]]           {0, 1}            started             []                                                                   {1: Collective(id=3, group_id='1', pass_check=False, collective_seq_id=2, p2p_seq_id=0, record_id=3, pg_desc='1:TP', collective_name='nccl:broadcast', input_sizes=[[9]], output_sizes=[[9]], expected_ranks={0, 1}, collective_state='started', collective_frames=[], input_numel=None, output_numel=None, missing_ranks=None, mismatch_collectives=None, type_of_mismatch=<torch.distributed.flight_recorder.components.types.MatchInfo object at 0x7f378b75ad10>)}
--- NCCL Calls ---
  id    collective_id    group_id    global_rank    traceback_id  collective_type        sizes
   0                0           0              0               0  nccl:all_reduce        [[4, 2]]
   1                0           0              1               0  nccl:all_reduce        [[4, 2]]
   2                0           0              2               0  nccl:all_reduce        [[4, 2]]
   3                1           1              0               0  nccl:_all_gather_base  [[8]]
   4                1           1              1               0  nccl:_all_gather_base  [[8]]
   5                            0              0               0  nccl:all_reduce        [[1024]]
   6                            0              1               0  nccl:all_reduce        [[1024]]
   7                            1              0               0  nccl:all_reduce        [[8]]
   8                            1              1               0  nccl:all_reduce        [[8]]

=== FR Trace NCCL ===
Failed to fetch NCCL trace"""
