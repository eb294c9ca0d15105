"""Lines of logs become events with rank, host and numbers; near misses do not; any size is read in bounded memory."""

import os
import random
import tracemalloc
from pathlib import Path

import pytest

from megatron_lite.postmortem.call_sites import find_program_frame
from megatron_lite.postmortem.collect import collect_evidence
from megatron_lite.postmortem.console_logs import KEPT_EVENTS, is_console_log, parse_lines, read_console_log
from megatron_lite.postmortem.evidence import EventKind, GroupProgress, StackFrame
from megatron_lite.postmortem.log_patterns import LINE_PATTERNS, LINE_SEEDS, match_line

TABLE = Path(__file__).parent / "log_lines.tsv"
ROWS = [line.split("\t") for line in TABLE.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
LOST = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:598] Connection closed by peer [10.25.6.31]:28049"
WATCHDOG = (
    "[rank{rank}]:[E321 02:07:09.4 ProcessGroupNCCL.cpp:607] [Rank {rank}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum={number}, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600067 milliseconds"
)


def read_facts(text):
    facts = {}
    for word in text.split():
        name, _, value = word.partition("=")
        number = value.lstrip("-").replace(".", "", 1).isdecimal()
        facts[name] = float(value) if number and name not in ("device", "group") else value
    return facts


def test_the_table_is_large_enough():
    kinds = [kind for _, kind, _, _ in ROWS]
    assert len(kinds) - kinds.count("NONE") >= 60 and kinds.count("NONE") >= 10
    assert all(source for *_, source in ROWS)


@pytest.mark.parametrize(("line", "kind", "facts", "source"), ROWS, ids=[f"{n} {row[1]}" for n, row in enumerate(ROWS)])
def test_each_line_is_its_event(line, kind, facts, source):
    events = parse_lines([line]).events
    assert [event.kind.name for event in events] == ([] if kind == "NONE" else [kind])
    for name, value in read_facts(facts).items():
        found = getattr(events[0], name)
        expected = value.replace("_", " ") if name == "device" and value.startswith("GPU") else value
        assert found == expected, name


def test_what_a_line_does_not_name_is_unknown():
    (event,) = parse_lines([LOST]).events
    assert (event.rank, event.host, event.pid, event.code, event.at) == (None, None, None, None, None)


def test_each_pattern_finds_its_word_and_says_what_it_means():
    for row in LINE_PATTERNS:
        assert row.word and row.source, row.pattern.pattern
        assert not row.pattern.search(""), row.pattern.pattern
        assert bool(row.pattern.groupindex) == bool(row.meaning), row.pattern.pattern


def test_each_pattern_holds_a_text_by_which_its_lines_are_found():
    for row in LINE_PATTERNS:
        assert any(seed in row.word or seed in row.pattern.pattern for seed in LINE_SEEDS), row.pattern.pattern


# ----- who wrote a line


@pytest.mark.parametrize(
    ("prefix", "rank", "host"),
    [
        ("[rank3]: ", 3, None),
        ("[default1]:[rank3]: ", 3, None),
        ("[default3]:", 3, None),
        ("\x1b[36m(RayTrainWorker pid=7, ip=10.0.0.2)\x1b[0m [rank3]: ", 3, "10.0.0.2"),
        ("[1,3]<stderr>:", 3, None),
        ("[rank: 3] ", 3, None),
        ("10.0.0.7: [rank3]: ", 3, "10.0.0.7"),
        ("node7: [rank3]: ", 3, "node7"),
        ("[pod/job-worker-0/pytorch] [rank3]: ", 3, "job-worker-0"),
        ("2024-05-01T12:00:00.123456789Z stderr F [rank3]: ", 3, None),
        ("job-worker-0 pytorch › [rank3]: ", 3, "job-worker-0"),
        ("", None, None),
    ],
)
def test_prefixes_tell_rank_and_host(prefix, rank, host):
    (event,) = parse_lines([prefix + LOST]).events
    assert (event.rank, event.host) == (rank, host)


def test_labels_of_srun_are_ranks_where_each_task_is_one():
    lines = [f"{task}: iteration {number}" for number in range(5) for task in range(4)]
    (event,) = parse_lines([*lines, f"2: {LOST}"]).events
    assert event.rank == 2


def test_labels_of_srun_are_no_ranks_where_tasks_are_launchers():
    lines = [f"{task}: [default{local}]: iteration" for task in range(2) for local in range(4)]
    found = parse_lines([*lines, f"1: [default2]:{LOST}", "srun: error: n1: task 1: Killed"])
    assert [event.rank for event in found.events] == [None, None]


def test_local_numbers_are_ranks_on_one_node_only():
    one = [f"[default{local}]: x" for local in range(2)]
    assert parse_lines([*one, f"[default1]:{LOST}"]).events[0].rank == 1
    other = "[default0]:[rank8]:[W1 00:00:00.0 x.cpp:1] destroy"
    lines = [other, f"[default0]:[rank8]:{LOST}", f"[default1]:{LOST}"]
    assert [event.rank for event in parse_lines(lines).events] == [8, None]


def test_a_rank_within_a_group_is_no_rank_of_the_job():
    line = (
        "[PG ID 3 PG GUID 17(TENSOR_MODEL_PARALLEL_GROUP) Rank 1] ProcessGroupNCCL's watchdog got stuck for 480 seconds"
    )
    assert parse_lines([line]).events[0].rank is None
    assert parse_lines([f"[rank5]: {line}"]).events[0].rank == 5
    assert parse_lines([line.replace("GUID 17(TENSOR_MODEL_PARALLEL_GROUP)", "GUID 0(default_pg)")]).events[0].rank == 1


def test_the_folder_of_torchrun_tells_the_rank(tmp_path):
    path = tmp_path / "none_x1" / "attempt_0" / "3" / "stderr.log"
    path.parent.mkdir(parents=True)
    path.write_text(f"{LOST}\n")
    assert read_console_log(path).events[0].rank == 3
    # torch names the rank in front of its own lines
    path.write_text(f"[rank11]:[W1 00:00:00.0 x.cpp:1] Traceback (most recent call last):\n{LOST}\n")
    assert read_console_log(path).events[0].rank == 11


def test_prefixes_of_several_ranks_are_those_of_their_launcher():
    lines = [f"{task}: [rank{rank}]: x" for task in range(2) for rank in (2 * task, 2 * task + 1) for _ in range(3)]
    lines += [f"0: [rank{rank}]: {LOST}" for rank in (0, 1)]
    lines += [
        "0: W1 00:00:00.0 1 torch/distributed/elastic/agent/server/api.py:719] Received 15 death signal, shutting down workers"
    ]
    assert [event.rank for event in parse_lines(lines).events] == [0, 1, None]


@pytest.mark.parametrize(
    ("line", "size"),
    [
        ("using world size: 16, data-parallel size: 8", 16),
        ("Initializing distributed: GLOBAL_RANK: 0, MEMBER: 1/4", 4),
        ("n1:1:2 [0] NCCL INFO ncclCommInitRank comm 0x55d9607ee240 rank 1 nranks 32 cudaDev 0", 32),
        ("key: store_based_barrier_key:1 (world_size=8, worker_count=16, timeout=0:30:00)", 8),
        ("hello world", None),
    ],
)
def test_logs_may_tell_the_number_of_ranks(line, size):
    assert parse_lines(["first", line, "rank 0 nranks 2"]).world_size == size


def test_processes_of_nccl_have_the_rank_of_the_communicator_of_all():
    said = "node{node}:{pid}:9 [0] NCCL INFO ncclCommInitRank comm 0x55 rank {rank} nranks {size} cudaDev 0 nvmlDev 0"
    lines = [said.format(node=rank // 2, pid=100 + rank, rank=rank, size=4) for rank in range(4)]
    # groups of two
    lines += [said.format(node=rank // 2, pid=100 + rank, rank=rank % 2, size=2) for rank in range(4)]
    lost = "node1:103:20 [1] misc/socket.cc:71 NCCL WARN socketProgress: Connection closed by remote peer node0<42831>"
    assert parse_lines([*lines, lost]).events[0].rank == 3
    # which of two groups of this size has all ranks is not known
    assert parse_lines([*lines[4:], lost]).events[0].rank is None


def test_lines_in_json_of_a_container_are_unwrapped(tmp_path):
    path = tmp_path / "abc-json.log"
    line = '{"log":"[rank3]: LINE\\n","stream":"stderr","time":"2024-05-01T12:00:00.5Z"}\n'
    path.write_text(line.replace("LINE", LOST))
    found = collect_evidence([path])
    (event,) = found.events
    assert (event.rank, event.at, found.unread) == (3, 1714564800.5, ())


# ----- when


@pytest.mark.parametrize(
    ("prefix", "at"),
    [
        ("2024-05-01T12:00:00.500000Z ", 1714564800.5),
        ("2024-05-01T12:00:00+0200 ", 1714557600.0),
        ("[2024-05-01 12:00:00,250 UTC] ", 1714564800.25),
        ("12:00:00.123 ", None),
        ("[ 1843.308145] ", None),
        ("2024-13-41 12:00:00 ", None),
        ("", None),
    ],
)
def test_times_are_seconds_since_1970(prefix, at):
    assert parse_lines([prefix + LOST]).events[0].at == at


def test_days_without_a_year_are_before_the_log_ended(tmp_path):
    path = tmp_path / "log"
    path.write_text(
        f"[E1231 12:00:00.0 x.cpp:1] {LOST}\n[E0101 12:00:00.0 x.cpp:1] DataLoader timed out after 3 seconds\n"
    )
    # the 2nd of January 2025
    os.utime(path, (1735819200, 1735819200))
    first, second = read_console_log(path).events
    assert round((second.at - first.at) / 86400) == 1


# ----- texts of several lines

TRACEBACK = [
    "Traceback (most recent call last):",
    '  File "/home/user/job/train.py", line 88, in step',
    "    loss = model(batch)  # CUDA out of memory. Tried to allocate 1 GiB",
    '  File "/opt/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line 17, in _call_impl',
    "    return forward_call(*args, **kwargs)",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 79 GiB",
]


def test_tracebacks_of_ranks_are_told_apart_where_their_lines_mix():
    lines = [f"[rank{rank}]: {line}" for line in TRACEBACK for rank in (0, 1)]
    found = parse_lines(["start", *lines, "end"])
    assert [(end.rank, end.error) for end in found.ends] == [
        (0, "torch.OutOfMemoryError"),
        (1, "torch.OutOfMemoryError"),
    ]
    for end in found.ends:
        assert find_program_frame(end.frames) == StackFrame("step", "/home/user/job/train.py", 88)
    # the text of the program is no event
    assert [(event.kind, event.rank) for event in found.events] == [
        (EventKind.DEVICE_OUT_OF_MEMORY, 0),
        (EventKind.DEVICE_OUT_OF_MEMORY, 1),
    ]


def test_an_exception_that_followed_another_rank_says_so():
    lines = [*TRACEBACK[:2], LOST]
    (end,) = parse_lines(lines).ends
    assert end.is_consequence is True
    (other,) = parse_lines([*TRACEBACK[:2], "ValueError: bad"]).ends
    assert other.is_consequence is None


FAILURES = """W1128 17:07:48.7 1 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 19 closing signal SIGTERM
E1128 17:07:48.8 1 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) local_rank: 1 (pid: 20)
Traceback (most recent call last):
  File "/opt/venv/bin/torchrun", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[0]:
  time      : 2026-11-28_17:07:48
  host      : node1
  rank      : 8 (local_rank: 0)
  exitcode  : -15 (pid: 19) (SIGTERM)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 19
------------------------------------------------------------
Root Cause (first observed failure):
[1]:
  time      : 2026-11-28_17:07:47
  host      : node1
  rank      : 9 (local_rank: 1)
  exitcode  : 1 (pid: 20)
  error_file: /tmp/torchelastic_x/none_y/attempt_0/1/error.json
  traceback : Traceback (most recent call last):
    File "/opt/venv/lib/python3.11/site-packages/torch/distributed/elastic/multiprocessing/errors/__init__.py", line 367, in wrapper
      return f(*args, **kwargs)
    File "/home/user/job/train.py", line 20, in main
      raise ValueError("bad batch")
  ValueError: bad batch
============================================================
""".splitlines()


@pytest.mark.parametrize("prefix", ["", "0: "])
def test_the_table_of_torchrun_tells_who_failed_first(prefix):
    found = parse_lines([prefix + line for line in FAILURES])
    last, first = found.ends
    assert (first.rank, first.local_rank, first.host, first.pid, first.exit_code) == (9, 1, "node1", 20, 1)
    assert (first.error, first.message, first.is_consequence) == ("ValueError", "bad batch", None)
    assert find_program_frame(first.frames) == StackFrame("main", "/home/user/job/train.py", 20)
    assert (last.rank, last.exit_code, last.is_consequence) == (8, -15, True)
    assert last.ended_at - first.ended_at == 1.0
    root = found.events[-1]
    assert (root.kind, root.rank, root.code) == (EventKind.LAUNCHER_SAW_FAILURE, 9, 1)
    # a number on its node is no rank here
    assert [event.rank for event in found.events[:-1]] == [None, None]


def test_dumps_of_stacks_within_a_log_are_found():
    stacks = (Path(__file__).parent / "stacks" / "faulthandler_segv.txt").read_text().splitlines()
    found = parse_lines([f"iteration {number}" for number in range(50)] + [f"[rank2]: {line}" for line in stacks])
    assert [(end.rank, end.exit_code) for end in found.ends] == [(2, -11)]
    assert [stacks.rank for stacks in found.stacks] == [2]
    dump = (Path(__file__).parent / "stacks" / "pyspy.txt").read_text().splitlines()
    assert [stacks.pid for stacks in parse_lines(["before", *dump, "after"]).stacks] == [16898]


PLAIN_FAILURE = [
    "Root Cause (first observed failure):",
    "[0]:",
    "  time      : 2026-11-28_17:07:47",
    "  host      : node1",
    "  rank      : 3 (local_rank: 3)",
    "  exitcode  : 1 (pid: 20)",
    "  error_file: <N/A>",
    "  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html",
    "============================================================",
]


def test_an_exception_without_a_prefix_is_of_the_only_rank_that_failed():
    found = parse_lines([*TRACEBACK, *PLAIN_FAILURE])
    assert [(end.rank, end.pid, bool(end.error)) for end in found.ends] == [(3, 20, False), (3, 20, True)]
    # two different ones cannot be told apart
    other = [*TRACEBACK[:2], "ValueError: bad"]
    assert [end.rank for end in parse_lines([*TRACEBACK, *other, *PLAIN_FAILURE]).ends] == [3, None, None]
    # a killed process did not end by its exception
    killed = [line.replace("exitcode  : 1 ", "exitcode  : -9 ") for line in PLAIN_FAILURE]
    assert [end.rank for end in parse_lines([*TRACEBACK, *killed]).ends] == [3, None]


def test_srun_tells_how_tasks_ended_and_which_it_ended_itself():
    lines = [
        "srun: error: n1: task 3: Out Of Memory",
        "srun: Terminating StepId=440576.0",
        "slurmstepd: error: *** STEP 440576.0 ON n1 CANCELLED AT 2023-12-05T07:16:02 ***",
        "srun: error: n0: tasks 0-1: Killed",
    ]
    ends = parse_lines(lines).ends
    assert [(end.rank, end.exit_code, end.is_consequence) for end in ends] == [
        (3, -9, None),
        (0, -9, True),
        (1, -9, True),
    ]


def test_processes_of_spawn_have_their_number():
    lines = [
        "torch.multiprocessing.spawn.ProcessRaisedException:",
        "",
        "-- Process 1 terminated with the following error:",
    ]
    (end,) = parse_lines([*lines, *TRACEBACK]).ends
    assert (end.rank, end.local_rank) == (1, 1)


def test_the_watchdog_tells_how_far_a_group_is():
    line = (
        "[rank{rank}]:[E1 00:00:00.0 ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID 17(dp) Rank 0] failure detected by watchdog at "
        "work sequence id: 808 PG status: last enqueued work: {last}, last completed work: 807"
    )
    found = parse_lines([line.format(rank=4, last=811), line.format(rank=5, last=807)])
    numbers = {recording.rank: recording.progress for recording in found.recordings}
    assert numbers == {4: {"17": GroupProgress(811, None, 807)}, 5: {"17": GroupProgress(807, None, 807)}}
    assert found.recordings[0].groups["17"].description == "dp"


def test_several_ranks_in_a_line_are_an_event_each():
    found = parse_lines(["RuntimeError: [Rank 0]: Ranks 4, 5, 6 failed to pass monitoredBarrier in 2000 ms"])
    assert [event.rank for event in found.events] == [4, 5, 6]
    killed = parse_lines(["srun: error: n1: tasks 1-3,7: Out Of Memory"])
    assert [event.rank for event in killed.events] == [1, 2, 3, 7]


# ----- much, or anything


def test_repeats_are_one_event_that_counts_them():
    (event,) = parse_lines([LOST] * 1000).events
    assert event.count == 1000 and event.source.endswith(":1")


def test_of_very_many_events_the_first_and_last_stay():
    lines = [WATCHDOG.format(rank=rank, number=number) for number in range(500) for rank in range(2)]
    events = [event for event in parse_lines(lines).events if event.rank == 1]
    assert len(events) == 2 * KEPT_EVENTS
    assert (events[0].number, events[-1].number) == (0, 499)
    assert sum(event.count for event in events) == 500


def test_a_large_log_takes_little_memory(tmp_path):
    path = tmp_path / "log"
    noise = b"".join(
        b"iteration %d | lm loss: 1.0 | number of nan iterations: 0 |\n" % number for number in range(20_000)
    )
    with open(path, "wb") as file:
        file.writelines(noise for _ in range(4))
        file.write(b"x" * 2**20 + b"\n")
        file.write(LOST.encode() + b"\n")
    lines = 4 * 20_000 + 2
    tracemalloc.start()
    found = read_console_log(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [event.source for event in found.events] == [f"{path}:{lines}"]
    assert peak < 32 * 2**20


def test_lines_are_the_same_wherever_the_file_is_cut_into_blocks(monkeypatch, tmp_path):
    path = tmp_path / "log"
    lines = [line for line, *_ in ROWS] + TRACEBACK + FAILURES
    path.write_text("\n".join(lines), encoding="utf-8")
    whole = read_console_log(path)
    for size in (257, 4099):
        monkeypatch.setattr("megatron_lite.postmortem.console_logs.LOG_BLOCK_BYTES", size)
        assert read_console_log(path) == whole


def test_any_bytes_are_read(tmp_path):
    source = random.Random(11)
    lines = [line.encode() for line, *_ in ROWS] + [line.encode() for line in TRACEBACK + FAILURES]
    path = tmp_path / "log"
    for _ in range(60):
        chosen = [source.choice(lines) for _ in range(60)]
        content = bytearray(b"\n".join(chosen))
        for _ in range(source.randrange(200)):
            content[source.randrange(len(content))] = source.randrange(256)
        path.write_bytes(content)
        read_console_log(path)


@pytest.mark.parametrize(
    "line",
    [
        "[" * 60_000,
        "1: " * 20_000,
        "a" * 60_000 + ": NCCL WARN",
        "NCCL WARN " * 6_000,
        "[PG ID 1 PG GUID " * 3_000 + "watchdog got stuck for",
        "iteration 1" * 5_000 + " nan",
        "gloo " * 10_000 + "op.preamble.length",
        'File "' * 10_000 + "Traceback (most recent call last):",
        "1," * 30_000 + "] finished collective #1, but didn't join collective #",
    ],
    ids=range(9),
)
def test_no_line_takes_long(line):
    """A pattern that tries all ways to split a line would not come to an end within the limit of the whole suite."""
    for text in (line, f"[rank1]: {line}"):
        parse_lines([text] * 3)


def test_text_is_a_log_and_data_is_not(tmp_path):
    assert is_console_log(b"hello\nNCCL WARN\n", Path("a"))
    assert is_console_log("│ ünïcode\n".encode(), Path("log.txt"))
    assert not is_console_log(b'{"a": 1}', Path("a"))
    assert not is_console_log(b"\x80\x04\x95\0\0", Path("a"))
    assert is_console_log(
        b"ERROR: Unexpected bus error encountered in worker.\n" * 3 + b"\0[rank0]: Traceback\n", Path("a")
    )
    assert not is_console_log(b"import torch\n", Path("train.py"))
    assert not is_console_log(b"", Path("a"))
    assert not is_console_log(b"torch\n", Path("requirements-dev.txt"))
    (tmp_path / "job.out").write_text(f"{LOST}\n")
    (tmp_path / "dmesg").write_text("[   12.345678] usb 1-1: new device\n[   13.345678] eth0: up\n")
    assert collect_evidence([tmp_path]).read == {"console logs": 1, "kernel logs": 1}


def test_the_first_row_that_matches_decides():
    pattern, _ = match_line("slurmstepd: error: *** JOB 1 ON n1 CANCELLED AT 2024-04-20T09:09:38 DUE TO TIME LIMIT ***")
    assert pattern.kind is EventKind.JOB_TIME_LIMIT
    assert match_line("all is well") is None


def test_of_attempts_in_one_log_the_last_one_is_read():
    error = ["[default3]:Traceback (most recent call last):", '[default3]:  File "/home/u/train.py", line 5, in step']
    agent = "torch/distributed/elastic/agent/server/api.py:900] [default] Worker group FAILED. "
    again = f"I1128 19:00:00.100000 1234 {agent}1/1 attempts left; will restart worker group"
    lines = [*error, "[default3]:ValueError: bad shard", again, *error, "[default3]:KeyError: 'x'"]
    evidence = parse_lines(lines)
    assert [end.error for end in evidence.ends] == ["KeyError"]
    (note,) = evidence.unread
    assert note.startswith("log:4: ")
    assert not parse_lines(lines[:4]).ends
