"""Evidence of jobs that are made up call by call, without files: what conclusions are drawn from."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from megatron_lite.postmortem.evidence import (
    CallState,
    EventKind,
    FlightRecording,
    JobEvidence,
    LogEvent,
    ProcessEnd,
    ProcessStacks,
    RankProgress,
    RecordedCall,
    RecordedGroup,
    StackFrame,
    ThreadStack,
)

BEGIN_S = 1_795_000_000.0
NS = 1_000_000_000
TORCH = "/usr/lib/python3.11/site-packages/torch/"
WAIT = StackFrame("all_reduce", f"{TORCH}distributed/distributed_c10d.py", 2806)
LOADER = StackFrame("_try_get_data", f"{TORCH}utils/data/dataloader.py", 1285)
Site = tuple[int, str]  # line and function of train.py
STEP: Site = (88, "step")


def frame(line: int, function: str, file: str = "/home/u/train.py") -> StackFrame:
    return StackFrame(function, file, line)


@dataclass
class MadeJob:
    """A job of some ranks that call collectives; `now` advances with each."""

    world_size: int
    backend: str = "gloo"
    step_s: float = 0.1
    now: float = BEGIN_S
    calls: dict[int, list[RecordedCall]] = field(default_factory=dict)
    groups: dict[str, RecordedGroup] = field(default_factory=dict)
    numbers: dict[tuple[str, int], int] = field(default_factory=dict)
    stacks: list[ProcessStacks] = field(default_factory=list)
    ends: list[ProcessEnd] = field(default_factory=list)
    events: list[LogEvent] = field(default_factory=list)
    progress: list[RankProgress] = field(default_factory=list)

    def group(self, name: str, ranks: Iterable[int], description: str = "undefined", *, told: bool = True) -> None:
        self.groups[name] = RecordedGroup(name, description, tuple(ranks) if told else ())

    def call(
        self,
        name: str = "all_reduce",
        ranks: Iterable[int] | None = None,
        *,
        group: str = "0",
        shape: tuple[int, ...] = (10,),
        shapes: Mapping[int, tuple[int, ...]] | None = None,
        names: Mapping[int, str] | None = None,
        types: Mapping[int, str] | None = None,
        sites: Mapping[int, Site] | None = None,
        site: Site = STEP,
        ended: bool = True,
        started: Iterable[int] = (),
        late: Mapping[int, float] | None = None,
        timeout_s: float = 1800.0,
    ) -> None:
        """Have ranks, all unless named, enter the next call of a group."""
        self.now += self.step_s
        for rank in range(self.world_size) if ranks is None else ranks:
            number = self.numbers[group, rank] = self.numbers.get((group, rank), 0) + 1
            mine = self.calls.setdefault(rank, [])
            state = CallState.STARTED if rank in started else CallState.SCHEDULED
            if ended and self.backend != "gloo":
                state = CallState.COMPLETED
            sizes = ((shapes or {}).get(rank, shape),)
            kinds = ((types or {}).get(rank, "Float"),)
            created_s = self.now + (late or {}).get(rank, 0.0)
            called = RecordedCall(
                group=group,
                number=number,
                name=(names or {}).get(rank, name),
                state=state,
                record=len(mine),
                input_shapes=sizes,
                output_shapes=sizes,
                input_types=kinds,
                output_types=kinds,
                is_retired=ended,
                created_ns=int(created_s * NS),
                timeout_ms=timeout_s * 1000,
                frames=(WAIT, frame(*(sites or {}).get(rank, site))),
            )
            mine.append(called)

    def message(self, rank: int, sender: int, receiver: int, *, ended: bool = False, line: int = 50) -> None:
        """Have a rank send or take a message."""
        self.now += self.step_s
        mine = self.calls.setdefault(rank, [])
        called = RecordedCall(
            group="0",
            number=len(mine) + 1,
            name="send" if rank == sender else "recv",
            state=CallState.COMPLETED if ended else CallState.SCHEDULED,
            record=len(mine),
            is_message=True,
            sender=sender,
            receiver=receiver,
            created_ns=int(self.now * NS),
            frames=(WAIT, frame(line, "hand_over")),
        )
        mine.append(called)

    def stack(self, rank: int, *frames: StackFrame, after_s: float = 60.0) -> None:
        """Look where the main thread of a rank is."""
        thread = ThreadStack("MainThread", frames, is_main=True)
        self.stacks.append(ProcessStacks(f"stacks_{rank}.txt", (thread,), rank=rank, taken_at=self.now + after_s))

    def end(self, rank: int | None, *, after_s: float | None = 1.0, **fields: object) -> None:
        """Have a rank end."""
        at = None if after_s is None else self.now + after_s
        end = ProcessEnd(f"rank{rank}.log:9", rank=rank, ended_at=at)
        self.ends.append(replace(end, **fields))  # type: ignore[arg-type]

    def event(self, kind: EventKind, text: str = "a line", after_s: float | None = 1.0, **fields: object) -> None:
        """Have a log say something."""
        at = None if after_s is None else self.now + after_s
        event = LogEvent(kind, "job.log:7", text, at=at)
        self.events.append(replace(event, **fields))  # type: ignore[arg-type]

    def state(self, rank: int, process_state: str, **fields: object) -> None:
        """Note the state of a rank's process."""
        one = RankProgress(f"last_{rank}.json", rank, pid=100 + rank, process_state=process_state, seen_at=self.now)
        self.progress.append(replace(one, **fields))  # type: ignore[arg-type]

    def evidence(self, *, without: Iterable[int] = (), size: bool = True, read: str = "console logs") -> JobEvidence:
        """All evidence; `without` the recordings of some ranks."""
        recordings = []
        for rank, calls in sorted(self.calls.items()):
            if rank not in set(without):
                known = dict(self.groups)
                recordings.append(FlightRecording(f"fr_{rank}", rank, self.backend, tuple(calls), known))
        return JobEvidence(
            recordings=tuple(recordings),
            stacks=tuple(self.stacks),
            ends=tuple(self.ends),
            events=tuple(self.events),
            progress=tuple(self.progress),
            world_size=self.world_size if size else None,
            read={read: 1},
        )
