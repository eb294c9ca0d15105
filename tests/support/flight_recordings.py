"""Flight recordings of jobs of any size, in the form that torch documents, with faults where a test wants them.

The form is that of torch's own reader (torch.distributed.flight_recorder.components) and recorder
(FlightRecorderDetail.hpp, ProcessGroupNCCL.cpp): NCCL's sees ends of calls, and starts where timing is on; operations
inside of a coalesced call stay "scheduled", and an entry "coalesced" behind them tells of the whole; gloo's sees neither,
retires what has ended, and counts messages without recording them.

    job = RecordedJob(4, {"1": ("TENSOR_MODEL_PARALLEL_GROUP", [0, 1])})
    job.call("all_reduce", shape=[1024])                  # all four complete it
    job.call("all_reduce", group="1", without=[1])        # rank 0 waits, rank 1 never enters
    job.write(folder)                                     # nccl_trace_rank_0 ... 3
"""

import json
import pickle
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

BEGIN_NS = 1_795_000_000_000_000_000
BETWEEN_NS = 1_000_000
LIBRARY = "/usr/lib/python3.11/site-packages/torch/distributed/"
TIMEOUT_MS = 600_000
Site = tuple[str, int, str]  # file, line, function
STEP: Site = ("/code/train.py", 88, "step")
Shape = Sequence[int]


class RecordedJob:
    """The recorders of all ranks of a job that is made up call by call."""

    def __init__(
        self,
        world_size: int,
        groups: Mapping[str, tuple[str, Sequence[int]]] | None = None,
        *,
        backend: str = "nccl",
        version: str = "2.10",
        timing: bool = True,
        buffer: int | None = None,
    ):
        """
        Args:
            world_size: Ranks of the job, which form group "0", default_pg.
            groups: Further groups by name: description, and ranks.
            backend: nccl or gloo.
            version: Of the form, 2.0 to 2.10.
            timing: Whether starts are recorded (TORCH_NCCL_ENABLE_TIMING); NCCL's alone.
            buffer: Calls that a recorder keeps; None for all.
        """
        self.backend = backend
        self.version = version
        self.timing = timing
        self.buffer = buffer
        self.groups = {"0": ("default_pg", list(range(world_size)))}
        self.groups.update({name: (text, list(ranks)) for name, (text, ranks) in (groups or {}).items()})
        self.ranks = range(world_size)
        self.entries: dict[int, list[dict[str, Any]]] = {rank: [] for rank in self.ranks}
        self._counts: dict[tuple[int, str, str], int] = {}
        self._now_ns = BEGIN_NS

    # --- what ranks do

    def call(
        self,
        name: str = "all_reduce",
        group: str = "0",
        *,
        shape: Shape = (1024,),
        output: Shape | None = None,
        kind: str = "Float",
        without: Iterable[int] = (),
        stuck: bool = False,
        failed: bool = False,
        ended: Iterable[int] = (),
        names: Mapping[int, str] | None = None,
        shapes: Mapping[int, Shape] | None = None,
        kinds: Mapping[int, str] | None = None,
        site: Site = STEP,
        sites: Mapping[int, Site] | None = None,
    ) -> None:
        """A collective of a group, which completes if all of its ranks enter it with the same arguments.

        Args:
            name: As the recorder has it, without the backend.
            group: Name of the group.
            shape: Shape of the input.
            output: Shape of the output; None for that of the input.
            kind: Data type, such as Float.
            without: Ranks that do not enter.
            stuck: All have entered, and it does not end.
            failed: It was given up, as NCCL's watchdog does.
            ended: Ranks that it ended for all the same.
            names: Ranks that call another collective.
            shapes: Ranks with another shape of input and output.
            kinds: Ranks with another data type.
            site: The line that calls it.
            sites: Ranks that call it from another line.
        """
        missing = set(without)
        agree = not (missing or names or shapes or kinds)
        self._now_ns += BETWEEN_NS
        for rank in self._members(group):
            if rank in missing:
                continue
            own_shape = list((shapes or {}).get(rank, shape))
            own_output = own_shape if output is None or rank in (shapes or {}) else list(output)
            own_kind = (kinds or {}).get(rank, kind)
            self._count(rank, group, "collective")
            self._count(rank, group, "operation")
            entry = self._enter(rank, group, (names or {}).get(rank, name), (sites or {}).get(rank, site))
            has_tensors = name != "barrier" or self.backend != "gloo"
            entry["input_sizes"] = [own_shape] if has_tensors else []
            entry["output_sizes"] = [own_output] if has_tensors else []
            entry["input_dtypes"] = entry["output_dtypes"] = [own_kind] if has_tensors else []
            self._advance(entry, has_ended=(agree and not stuck) or rank in set(ended), failed=failed)

    def send(
        self, sender: int, receiver: int, group: str = "0", *, shape: Shape = (64,), without: Iterable[int] = (),
        site: Site = STEP,
    ) -> None:  # fmt: skip
        """A message between two ranks, by both or by the one that is not in `without`; gloo counts it."""
        missing = set(without)
        self._now_ns += BETWEEN_NS
        for rank in (sender, receiver):
            if rank in missing:
                continue
            self._count(rank, group, "message")
            self._count(rank, group, "operation")
            if self.backend != "gloo":
                entry = self._enter_message(rank, sender, receiver, group, shape, site)
                self._advance(entry, has_ended=not missing, failed=False)

    def exchange(
        self, messages: Sequence[tuple[int, int]], group: str = "0", *, shape: Shape = (64,),
        without: Iterable[int] = (), stuck: bool = False, site: Site = STEP,
    ) -> None:  # fmt: skip
        """Messages (sender, receiver) of one batch_isend_irecv of each rank that has a part in them."""
        missing = set(without)
        self._now_ns += BETWEEN_NS
        for rank in sorted({rank for message in messages for rank in message} - missing):
            own = [message for message in messages if rank in message]
            self._count(rank, group, "message")
            for sender, receiver in own:
                self._count(rank, group, "operation")
                if self.backend != "gloo":
                    self._enter_message(rank, sender, receiver, group, shape, site)
            if self.backend != "gloo":
                whole = self._enter(rank, group, "coalesced", site, is_p2p=True)
                is_met = not stuck and missing.isdisjoint(other for message in own for other in message)
                self._advance(whole, has_ended=is_met, failed=False)

    def coalesce(
        self, names: Sequence[str], group: str = "0", *, closing: str = "coalesced", shape: Shape = (64,),
        without: Iterable[int] = (), shapes: Mapping[int, Shape] | None = None, site: Site = STEP,
    ) -> None:  # fmt: skip
        """Collectives inside of one coalesced call; NCCL records them singly since version 2.7 of the form, gloo one."""
        if self.backend == "gloo":
            self.call(names[0], group, shape=shape, without=without, shapes=shapes, site=site)
            return
        missing = set(without)
        self._now_ns += BETWEEN_NS
        for rank in self._members(group):
            if rank in missing:
                continue
            self._count(rank, group, "collective")
            for name in names:
                self._count(rank, group, "operation")
                if _parse_version(self.version) >= (2, 7):
                    part = self._enter(rank, group, name, site)
                    part["input_sizes"] = part["output_sizes"] = [list((shapes or {}).get(rank, shape))]
                    part["input_dtypes"] = part["output_dtypes"] = ["Float"]
            self._advance(self._enter(rank, group, closing, site), has_ended=not (missing or shapes), failed=False)

    def wait(self, seconds: float) -> None:
        """Nothing is called for so long."""
        self._now_ns += round(seconds * 1e9)

    # --- what recorders write

    def dump(self, rank: int, *, only_active: bool = False, frames: bool = True) -> dict[str, Any]:
        """The dump of a rank, as _dump_nccl_trace or _dump_fr_trace has it.

        Args:
            rank: Whose.
            only_active: Without calls that have completed.
            frames: With the stacks of calls.
        """
        kept = self.entries[rank][-self.buffer :] if self.buffer else self.entries[rank]
        entries = [
            {name: value for name, value in entry.items() if frames or name != "frames"}
            for entry in kept
            if not (only_active and entry["time_discovered_completed_ns"])
        ]
        made: dict[str, Any] = {"version": self.version, "pg_config": self._describe_groups(rank)}
        made["pg_status"] = self._describe_status(rank)
        if _parse_version(self.version) >= (2, 10):
            made["comm_lib_version"] = "" if self.backend == "gloo" else "2.27.5"
        return {**made, "entries": entries}

    def dump_json(self, rank: int, *, only_active: bool = False) -> dict[str, Any]:
        """The same as _dump_nccl_trace_json and torch.distributed.debug's handlers have it: no frames, 0 for None."""
        made = self.dump(rank, only_active=only_active, frames=False)
        for entry in made["entries"]:
            for name in ("time_discovered_started_ns", "time_discovered_completed_ns"):
                entry[name] = entry[name] or 0
        made["pg_status"] = {
            group: {name: str(value) for name, value in told.items()} for group, told in made["pg_status"].items()
        }
        if not made["entries"]:
            del made["entries"]
        return {**made, "nccl_comm_state": {}}

    def write(
        self, folder: Path, ranks: Iterable[int] | None = None, *, prefix: str = "nccl_trace_rank_", form: str = "pickle",
        **options: bool,
    ) -> list[Path]:  # fmt: skip
        """Files of some ranks, or of all, named as torch names them; options as of `dump`."""
        folder.mkdir(parents=True, exist_ok=True)
        paths = []
        for rank in self.ranks if ranks is None else ranks:
            paths.append(folder / f"{prefix}{rank}")
            if form == "json":
                paths[-1].write_text(json.dumps(self.dump_json(rank, **options)))
            else:
                paths[-1].write_bytes(pickle.dumps(self.dump(rank, **options), protocol=2))
        return paths

    # --- entries

    def _members(self, group: str) -> list[int]:
        return self.groups[group][1]

    def _count(self, rank: int, group: str, what: str) -> None:
        self._counts[rank, group, what] = self._counts.get((rank, group, what), 0) + 1

    def _enter_message(
        self, rank: int, sender: int, receiver: int, group: str, shape: Shape, site: Site
    ) -> dict[str, Any]:
        places = self._members(group)
        ends = (places.index(sender), places.index(receiver))
        name = f"send {ends[0]}->{ends[1]}" if rank == sender else f"recv {ends[1]}<-{ends[0]}"
        entry = self._enter(rank, group, name, site, is_p2p=True)
        entry["input_sizes"] = entry["output_sizes"] = [list(shape)]
        entry["input_dtypes"] = entry["output_dtypes"] = ["Float"]
        return entry

    def _enter(self, rank: int, group: str, name: str, site: Site, *, is_p2p: bool = False) -> dict[str, Any]:
        file, line, function = site
        gloo = self.backend == "gloo"
        made = {
            "frames": [
                {"name": name.partition(" ")[0], "filename": f"{LIBRARY}distributed_c10d.py", "line": 3245},
                {"name": "wrapper", "filename": f"{LIBRARY}c10d_logger.py", "line": 83},
                {"name": function, "filename": file, "line": line},
                {"name": "<module>", "filename": file, "line": 200},
            ],
            "record_id": len(self.entries[rank]),
            "pg_id": self._own_groups(rank).index(group),
            "process_group": (group, self.groups[group][0] or "undefined"),
            "collective_seq_id": self._counts.get((rank, group, "collective"), 0),
            "p2p_seq_id": 0 if gloo else self._counts.get((rank, group, "message"), 0),
            "op_id": self._counts.get((rank, group, "operation"), 0),
            "profiling_name": f"{self.backend}:{name}",
            "time_created_ns": self._now_ns + rank,
            "input_sizes": [],
            "input_dtypes": [],
            "output_sizes": [],
            "output_dtypes": [],
            "state": "scheduled",
            "time_discovered_started_ns": None,
            "time_discovered_completed_ns": None,
            "retired": False,
            "timeout_ms": TIMEOUT_MS,
            "is_p2p": is_p2p,
        }
        if _parse_version(self.version) >= (2, 10):
            made |= {"thread_name": "python", "thread_id": "139720592096128"}
        self.entries[rank].append(made)
        return made

    def _advance(self, entry: dict[str, Any], *, has_ended: bool, failed: bool) -> None:
        """What the recorder has seen of a call since it was made."""
        entry["retired"] = has_ended or failed
        if self.backend == "gloo":
            return
        if self.timing:
            entry["state"] = "started"
            entry["time_discovered_started_ns"] = entry["time_created_ns"] + 1000
        if has_ended:
            entry["state"] = "completed"
            entry["time_discovered_completed_ns"] = entry["time_created_ns"] + 2000

    def _own_groups(self, rank: int) -> list[str]:
        return [name for name, (_, ranks) in self.groups.items() if rank in ranks]

    def _describe_groups(self, rank: int) -> dict[str, Any]:
        if self.backend == "gloo":
            return {"": {"name": "", "desc": "", "ranks": "[]"}}
        return {
            name: {"name": name, "desc": self.groups[name][0] or "undefined", "ranks": str(self._members(name))}
            for name in self._own_groups(rank)
        }

    def _describe_status(self, rank: int) -> dict[str, Any]:
        """Numbers of the last calls of each group: of collectives or of messages, whichever came last; gloo: of both."""
        made = {}
        for number, name in enumerate(self._own_groups(rank)):
            of_group = [entry for entry in self.entries[rank] if entry["process_group"][0] == name]
            if not of_group:
                continue
            made[str(number)] = {
                "last_enqueued_collective": self._find_status(of_group),
                "last_started_collective": self._find_status(
                    [entry for entry in of_group if entry["time_discovered_started_ns"]]
                ),
                "last_completed_collective": self._find_status([entry for entry in of_group if entry["retired"]]),
            }
        return made

    def _find_status(self, entries: Sequence[Mapping[str, Any]]) -> int:
        if not entries:
            return -1
        if self.backend == "gloo":
            return entries[-1]["op_id"]
        return entries[-1]["p2p_seq_id" if entries[-1]["is_p2p"] else "collective_seq_id"]


def _parse_version(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
