"""Profiles a training loop that it does not know: any that computes gradients with torch and steps one of its
optimizers.

A step ends when the optimizer that stepped first has stepped again, or where the loop says so. Its phases: waiting for
a DataLoader, backward, the optimizer's step and torch.save are seen as they are; what lies before backward, from the
data on, is called forward. Nothing is changed: what is called is called as before, with a few microseconds around it.
"""

import contextlib
import functools
import multiprocessing
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.util import Finalize
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, TypeVar

import msgspec
import torch
from msgspec import UNSET
from torch.optim import Optimizer
from torch.utils.data import dataloader

from megatron_lite.config.args import ProfileArgs
from megatron_lite.formats.file_names import STEPS_FILE
from megatron_lite.formats.run_record import Process, RunRecord, Updated, Watched
from megatron_lite.formats.step_records import StepRecord, append_record
from megatron_lite.instruments.base import Instrument, Instruments, Window
from megatron_lite.instruments.hardware_sampler import HardwareLines, HardwareSampler, open_sensors
from megatron_lite.instruments.host_counters import HostCounters
from megatron_lite.instruments.memory_history import CpuRecorder, CudaRecorder, MemoryHistory, MemoryRecorder
from megatron_lite.instruments.memory_oom import EXPANDABLE, OutOfMemoryWatch
from megatron_lite.instruments.snapshot_format import extend_name
from megatron_lite.instruments.step_time import StepTime
from megatron_lite.instruments.timeline import MemoryNow, Timeline
from megatron_lite.instruments.torch_profiler import TorchProfiler
from megatron_lite.instruments.training_calls import TrainingCalls
from megatron_lite.machine import read_machine
from megatron_lite.phases import Phase
from megatron_lite.process_folder import choose_process_folder, release_process_folder
from megatron_lite.process_state import identity, read_peak_bytes
from megatron_lite.run_folder import keep_previous_run, write_run
from megatron_lite.train.run_record import describe_device, describe_versions, format_now, read_environment
from megatron_lite.train.step_metrics import LAG
from megatron_lite.watch.hand_updates import HandUpdates, describe_counting
from megatron_lite.watch.stand_ins import add_calls, list_subclasses, stand_in
from megatron_lite.watch.step_losses import StepLosses
from megatron_lite.watch.step_norms import StepNorms
from megatron_lite.watch.step_position import FIRST_ORDINARY_STEP, StepPosition, compute_usual_s

SNAPSHOT_FILE = "memory.pickle"
PROFILED_STEPS = range(10, 16)
STEPS_OF_USUAL = 31  # whose median is the usual duration
MAX_SILENCE_S = 2.0  # after which steps are written to the disk
REMEDIES = (
    "a smaller batch, with more batches per step",
    "activations computed again in backward (torch.utils.checkpoint)",
    "bf16 or fp16 instead of fp32 (torch.autocast)",
)
DATA_PHASE = Phase.DATA.value
FORWARD_PHASE = Phase.FORWARD.value
BACKWARD_PHASE = Phase.BACKWARD.value
UPDATE_PHASE = Phase.OPTIMIZER_STEP.value
HOOKED = "hooked"  # the attribute of a method that torch, or a profiler, has wrapped already

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Step = Callable[..., object]  # an optimizer's step, whose arguments are its class' own


def _do_nothing() -> None:
    """Stand where nothing is to be called."""


def _keep(step: Step) -> Step:
    """Wrap a step in nothing: the method that it is made of was wrapped by torch."""
    return step


class Profiler:
    """Around a training loop: times every step by phase, and profiles some of them.

        with Profiler("runs/mine", steps=range(10, 16)):
            for batch in loader:
                model(batch).backward()
                optimizer.step()
                optimizer.zero_grad()

    `megatron_lite.analyze("runs/mine")` and `megatron-lite report runs/mine` say then where the steps went. Steps and
    phases are found without a call; `step` and `phase` are for loops whose steps or phases are others.

    Args:
        folder: for what is recorded.
        steps: to profile with torch.profiler, counted from 1; the first step is none of them.
        memory: record a memory snapshot of these steps, too.
        command: of the script, for run.json; None: this process's.
    """

    def __init__(
        self,
        folder: str | Path,
        steps: range = PROFILED_STEPS,
        memory: bool = False,
        command: list[str] | None = None,
    ) -> None:
        if steps.step != 1 or not 1 < steps.start < steps.stop:
            raise ValueError(f"steps={steps}: give a range of steps that follow each other; the first is at least 2")
        self.folder = Path(folder)
        self._given_folder = self.folder
        self.window = Window(steps)
        self._memory = memory
        self._command = command or sys.argv
        self.rank = 0
        self._has_others = False  # other ranks train beside this one
        self._instruments: Instruments | None = None  # from the first step on
        self._recorder: CudaRecorder | None = None  # one that records before the first step
        self._torch_profiler: TorchProfiler | None = None  # from the first step on, until it is over or makes way
        self._makes_way = False  # the script uses torch.profiler itself
        self._replaced: list[tuple[object, str, object]] = []  # of torch: where, the name, what stood there
        self._saving = contextlib.ExitStack()  # while torch.save runs
        self._has_loader = False
        self._finds_steps = True  # until the loop says itself where a step ends
        self._losses = StepLosses()
        self._norms = StepNorms()
        self._watched = Watched()  # what run.json says of it
        self._record = RunRecord()  # run.json, from the first step on
        # of the last steps, in seconds
        self._durations_s: deque[float] = deque(maxlen=STEPS_OF_USUAL)
        # called when the first step is recorded: this process trains
        self.when_training: Callable[[], object] = _do_nothing
        self._gave_up = ""  # why a script that goes on is not watched any more
        self._written_at = time.monotonic()
        self._set_to_start()
        own = weakref.ref(self)

        def begin_anew() -> None:
            profiler = own()
            if profiler is not None:
                profiler._begin_anew()

        os.register_at_fork(after_in_child=begin_anew)

    def _set_to_start(self) -> None:
        """Set what changes with the steps of the loop to what it is before the first one."""
        self._thread = threading.get_ident()  # that trains; 0: closed, or never to be watched
        self._timeline = Timeline()
        self._step = 0
        self._phase = ""
        self._named = ""  # the phase of the loop's own that is open: what happens in it is a part of it
        self._first_sign = 0.0  # of training, by time.perf_counter()
        # calls that are open: one may call another
        self._in_optimizer = 0
        self._in_gradients = 0  # torch.autograd.grad
        self._calls = TrainingCalls()
        self._updates = HandUpdates()  # asked until an optimizer of torch steps
        self._passes = 0  # of backward, each within a step
        self._steps_by_hand = 0
        self._unwritten: list[StepTime] = []
        self._hardware: HardwareSampler | None = None  # from the first step on
        self._hardware_lines: HardwareLines | None = None

    def _begin_anew(self) -> None:
        """Forget what the parent process recorded, in a process that was forked from it."""
        if self._thread == 0:  # closed, or never to be watched
            return
        if self._instruments is not None:
            self._instruments = None
            self._torch_profiler = None
            self._recorder = None
        self._set_to_start()
        # the same ones: what stands in the place of torch's functions writes into them
        self._losses.forget()
        self._norms.forget()
        self.folder = self._given_folder

    def __enter__(self) -> "Profiler":  # noqa: PYI034 - Self came with Python 3.11
        self._see_calls(torch.autograd, "backward", self._begin_backward, self._end_backward)
        self._see_calls(torch.autograd, "grad", self._begin_gradients, self._end_gradients)
        self._see_calls(dataloader._BaseDataLoaderIter, "__next__", self._begin_data, self._end_data)
        self._see_calls(torch, "save", self._begin_save, self._end_save)
        # the first marks steps as ours are marked, from its start on, recording or not;
        # the others have the second in common
        self._see_calls(torch.profiler.profile, "start", self._make_way)
        self._see_calls(torch.autograd.profiler.profile, "_prepare_trace", self._make_way)
        self._see_clipping()
        self._see_scaling()
        self._see_optimizers()
        if self._memory and torch.cuda.is_available():
            # weights are known by the code that made them if all is recorded from the first use of the GPU on
            self._recorder = CudaRecorder(ProfileArgs().memory_history_events)
            torch.cuda._lazy_call(self._recorder.open)
        return self

    @property
    def position(self) -> StepPosition:
        """Step and phase of the loop, for another thread: nothing is added to the steps for it."""
        if self._instruments is None:
            return StepPosition()
        began = self._timeline.phases_began
        step_since = self._timeline.step_began
        phase = self._phase or None
        moved_at = max([step_since, *began.values()])
        finished = [one.seconds for one in self._timeline.so_far() if one.step >= FIRST_ORDINARY_STEP]
        last_s = [*self._durations_s.copy(), *finished][-STEPS_OF_USUAL:]
        return StepPosition(
            step=self._step,
            phase=phase,
            step_since=step_since,
            phase_since=began.get(phase, moved_at) if phase else moved_at,
            moved_at=moved_at,
            usual_step_s=compute_usual_s(last_s),
        )

    @property
    def is_recording(self) -> bool:
        """Whether the first step has begun, and the profiler is not closed."""
        return self._instruments is not None and self._thread != 0

    def step(self) -> None:
        """A step ends here. From the first call on, steps end nowhere else: call it in every step."""
        found = self._finds_steps
        self._finds_steps = False
        self._first_sign = self._first_sign or time.perf_counter()
        # the first step has already ended where its optimizer stepped
        if self._is_open() and not (found and self._calls.has_leader):
            self._end_step()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Around a part of the loop that is to be timed as `name`, with all that happens in it. "eval" and "save" are
        no part of a step's time."""
        outer = self._named
        before = self._phase
        self._named = ""
        self._move(name)
        self._named = name
        try:
            yield
        finally:
            self._named = ""
            self._move(before)
            self._named = outer

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(error)

    def close(self, error: BaseException | None = None) -> None:
        """Write what is left, and let go of torch.

        Args:
            error: the one that ended the script.
        """
        while self._replaced:
            place, name, original = self._replaced.pop()
            setattr(place, name, original)
        is_ours = self._thread != 0
        self._thread = 0  # optimizers that were made meanwhile still call
        if self._instruments is None or not is_ours:
            return
        self._change_phase("", error is not None)
        first = self.window.steps.start
        if self._step <= first and self.rank == 0:
            _tell(f"Nothing was profiled: the run ended before step {first} ({self._step - 1} steps seen).")
        self._instruments.notify("close", error)
        self._write_steps(wait=True)
        if self.rank == 0:
            self._end_record(error)
        if self.folder == self._given_folder:
            release_process_folder(self.folder)

    def _end_record(self, error: BaseException | None) -> None:
        """Write run.json as it is at the end, and report how steps were counted where that needs to be said."""
        if self._norms.limit is not None:
            self._watched.clip_grad = self._norms.limit
        self._watched.peak_host_bytes = read_peak_bytes()
        ended = msgspec.structs.replace(
            self._record,
            status=self._describe_end(error),
            ended=format_now(),
            steps_by_hand=self._steps_by_hand > 0,
        )
        write_run(self.folder, ended)
        if not self._calls.has_leader and self._finds_steps:
            counting = describe_counting(self._passes, self._steps_by_hand)
            if counting:
                _tell(counting)

    def _describe_end(self, error: BaseException | None) -> str:
        """Describe how the script ended, or why it is no longer watched: the status of run.json."""
        if isinstance(error, KeyboardInterrupt):
            return "interrupted"
        if self._gave_up:
            return self._gave_up
        return "finished" if error is None else f"failed: {type(error).__name__}: {error}"

    def _guard(self, work: Callable[Parameters, Result]) -> Callable[Parameters, Result | None]:
        """Wrap a function so that a failure of it ends the watching and not the script."""

        def call(*arguments: Parameters.args, **named: Parameters.kwargs) -> Result | None:
            try:
                return work(*arguments, **named)
            except Exception as error:  # noqa: BLE001 - the script goes on, watched or not
                self._give_up(error)
                return None

        return call

    def _give_up(self, error: Exception) -> None:
        """Stop watching, and report why."""
        if self._thread == 0:
            return
        self._gave_up = f"no longer watched: {type(error).__name__}: {error}"
        _tell(f"the script goes on and is {self._gave_up}; please report it")
        with contextlib.suppress(Exception):
            self.close()

    # --- what is put in the place of torch's functions

    def _see_calls(
        self,
        place: object,
        name: str,
        before: Callable[..., object],
        after: Callable[[], object] = _do_nothing,
    ) -> None:
        """Have `before` and `after` called around each call of what stands there."""
        function: Callable[..., object] = getattr(place, name)
        self._replace(place, name, add_calls(function, self._guard(before), self._guard(after)))

    def _replace(self, place: object, name: str, by: object) -> None:
        """Put something in the place of an attribute, until the profiler is closed."""
        self._replaced.append((place, name, vars(place)[name]))
        setattr(place, name, by)

    def _see_clipping(self) -> None:
        """Note what clipping of gradients returns, under both names that it has."""
        clip = torch.nn.utils.clip_grad_norm_
        counted_clip = stand_in(self._norms.wrap(clip, self._find_step, self._guard), clip)
        for place in (torch.nn.utils, torch.nn.utils.clip_grad):
            self._replace(place, "clip_grad_norm_", counted_clip)

    def _see_scaling(self) -> None:
        """Note the losses that GradScalers scale."""
        scaler = torch.amp.GradScaler
        kinds: list[type[torch.amp.GradScaler]] = [scaler, *list_subclasses(scaler)]
        for kind in kinds:
            self._see_scale(kind)
        # those of FSDP are not imported yet
        self._see_calls(scaler, "__init__", self._see_new_scaler)

    def _see_new_scaler(self, scaler: torch.amp.GradScaler, *arguments: object, **named: object) -> None:
        self._see_scale(type(scaler))

    def _see_scale(self, kind: type[torch.amp.GradScaler]) -> None:
        """Let a GradScaler's class report the losses that it scales."""
        if "scale" in vars(kind) and not hasattr(kind.scale, HOOKED):
            scale = stand_in(self._losses.wrap_scale(kind.scale), kind.scale)
            setattr(scale, HOOKED, True)
            self._replace(kind, "scale", scale)

    def _see_optimizers(self) -> None:
        """Note the steps of all optimizers, those that are made from now on and those that torch has wrapped."""
        hook_step = Optimizer.profile_hook_step
        self._replace(Optimizer, "profile_hook_step", staticmethod(lambda step: self._wrap_step(step, hook_step)))
        for known in list_subclasses(Optimizer):
            if getattr(vars(known).get("step"), HOOKED, False):
                self._replace(known, "step", self._wrap_step(known.step))

    def _wrap_step(self, step: Step, hook: Callable[[Step], Step] = _keep) -> Step:
        """Wrap the method `step` of an optimizer, so that its phases and its end are seen.

        Args:
            step: the method.
            hook: torch's own wrapping, with a range in the trace: phases lie inside, steps outside.
        """
        move = self._guard(self._move)
        end = self._guard(self._end_optimizer)

        @functools.wraps(step)
        def compute(optimizer: Optimizer, *arguments: object, **named: object) -> object:
            # a closure computes loss and gradients inside of the step
            closure = named.get("closure") or next(iter(arguments), None)
            move(UPDATE_PHASE if closure is None else FORWARD_PHASE)
            try:
                return step(optimizer, *arguments, **named)
            finally:
                move("")

        hooked = hook(stand_in(compute, step))

        @functools.wraps(step)
        def call(optimizer: Optimizer, *arguments: object, **named: object) -> object:
            move("")
            self._in_optimizer += 1
            try:
                return hooked(optimizer, *arguments, **named)
            finally:
                self._in_optimizer -= 1
                end(optimizer)

        setattr(call, HOOKED, True)  # as torch marks what it has made of a step
        return stand_in(call, step)

    # --- what the script does

    def _begin_data(self, iterator: object) -> None:
        if not self._has_loader and threading.get_ident() == self._thread:
            self._watched.loader_workers = getattr(iterator, "_num_workers", 0)
        self._has_loader = True
        self._end_step_by_hand()
        self._move(DATA_PHASE)

    def _end_data(self) -> None:
        self._move(FORWARD_PHASE)

    def _begin_backward(
        self,
        tensors: object = (),
        grad_tensors: object = None,
        *others: object,
        inputs: object = None,
        **named: object,
    ) -> None:
        if not self._calls.begin_backward() or not self._is_open():
            return
        self._end_step_by_hand()
        self._passes += 1
        if self._finds_hand_updates():
            self._updates.begin_pass(tensors, inputs)
        if self.rank == 0:
            is_plain = grad_tensors is None and inputs is None
            self._losses.add(self._step, tensors if is_plain else None, self._in_optimizer > 0)
        self._move(BACKWARD_PHASE)

    def _end_backward(self) -> None:
        if not self._calls.end_backward():
            return
        if self._finds_hand_updates():
            self._updates.end_pass()
        if self._in_optimizer:
            self._move(UPDATE_PHASE)
        else:
            self._move(self._find_phase_after_backward())

    def _find_phase_after_backward(self) -> str:
        """Tell the phase after backward: beside a loader, only what follows the data is forward, not what a script logs
        and evaluates."""
        return "" if self._has_loader else FORWARD_PHASE

    def _begin_gradients(
        self,
        outputs: object,
        inputs: object,
        grad_outputs: object = None,
        *others: object,
        create_graph: bool = False,
        **named: object,
    ) -> None:
        """Count torch.autograd.grad as backward, in a loop that calls no other and steps no optimizer of torch."""
        self._in_gradients += 1
        is_within = self._calls.in_backward or self._in_optimizer or self._in_gradients > 1
        if create_graph or self._passes or is_within or self._calls.has_leader or not self._is_open():
            return
        self._end_step_by_hand()
        self._updates.begin_pass(outputs, inputs)
        if self.rank == 0:
            self._losses.add(self._step, outputs if grad_outputs is None else None, False)
        self._move(BACKWARD_PHASE)

    def _end_gradients(self) -> None:
        self._in_gradients -= 1
        if self._in_gradients == 0 and self._phase == BACKWARD_PHASE and not self._calls.in_backward:
            self._updates.end_pass(gives_gradients=True)
            self._move(self._find_phase_after_backward())

    def _finds_hand_updates(self) -> bool:
        """Whether steps end with updates by hand: as long as no optimizer of torch has stepped and the loop has not
        said where a step ends."""
        return not self._calls.has_leader and self._finds_steps and not self._in_optimizer

    def _end_step_by_hand(self) -> None:
        """End the step where the script has updated weights without an optimizer of torch."""
        is_open = self._instruments is not None and threading.get_ident() == self._thread
        if is_open and self._finds_hand_updates() and self._updates.is_updated():
            self._steps_by_hand += 1
            self._updates.begin_step()
            self._end_step()

    def _end_optimizer(self, optimizer: Optimizer) -> None:
        if self._in_optimizer or not self._is_open():
            return
        if self._calls.begin_leading(optimizer):
            self._note_parameters(optimizer)
        if self._finds_steps and self._calls.leads(optimizer):
            self._end_step()
        else:
            self._losses.part(self._step)
        if not self._has_loader:
            self._move(FORWARD_PHASE)

    def _note_parameters(self, optimizer: Optimizer) -> None:
        """Record the parameters that the first optimizer updates: they tell runs of different models apart."""
        weights = {id(weight): weight.numel() for group in optimizer.param_groups for weight in group["params"]}
        size = torch.distributed.get_world_size() if self._has_others and torch.distributed.is_initialized() else 1
        updated = Updated(parameters=sum(weights.values()), ranks=size)
        self._record = msgspec.structs.replace(self._record, updated=updated)
        if self.rank == 0:
            write_run(self.folder, self._record)

    def _begin_save(self, *arguments: object, **named: object) -> None:
        """Open the phase of torch.save, which is no part of a step's training unless the loop names its phases
        itself."""
        is_recorded = self._instruments is not None and threading.get_ident() == self._thread
        if is_recorded and not self._named and not self._calls.in_backward and not self._in_optimizer:
            self._saving.enter_context(self.phase(Phase.SAVE.value))

    def _end_save(self) -> None:
        if threading.get_ident() == self._thread:
            self._saving.close()

    def _make_way(self, profile: object) -> None:
        """Let go of torch.profiler, since the script begins one of its own. Two at a time crash the process."""
        ours = self._torch_profiler
        is_ours = ours is not None and ours.owns(profile)
        if self._makes_way or is_ours or threading.get_ident() != self._thread:
            return
        self._makes_way = True
        if ours is not None and self._instruments is not None:
            self._instruments.switch_off(ours)
        if self._step < self.window.steps.stop:
            _tell("the script uses torch.profiler itself, so watch does not profile: torch runs one profiler at a time")

    def _move(self, phase: str) -> None:
        """Be in a phase from now on; "": in none."""
        if self._named or phase == self._phase or threading.get_ident() != self._thread:
            return
        if self._instruments is None:
            self._first_sign = self._first_sign or time.perf_counter()
        else:
            self._change_phase(phase)

    def _change_phase(self, phase: str, failed: bool = False) -> None:
        """End the phase that is open, and begin another; "": none. Nothing before the first step."""
        instruments = self._instruments
        if instruments is None:
            return
        if self._phase:
            instruments.notify("end_phase", self._phase, failed)
        self._phase = phase
        if phase:
            instruments.notify("begin_phase", phase)

    # --- what is made of it

    def _is_open(self) -> bool:
        """Whether this thread's steps are recorded: from its first backward on.

        Before, neither the device nor the rank is certain.
        """
        if threading.get_ident() != self._thread:
            return False
        if self._instruments is None:
            try:
                self._open()
            except Exception as error:  # noqa: BLE001 - the script goes on, watched or not
                _tell(f"this process is not watched: {error}")
                self._thread = 0
                return False
        return True

    def _open(self) -> None:
        """Begin to record, with the first step."""
        cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        size = self._find_place()
        self.folder.mkdir(parents=True, exist_ok=True)
        if multiprocessing.parent_process() is not None:
            # such a process ends without asking atexit
            Finalize(None, lambda: self.close(sys.exc_info()[1]), exitpriority=0)
        self.window.margin = 1 if cuda or size > 1 else 0
        self._timeline.window = self.window
        self._timeline.set_up(detailed=True, cuda=cuda)
        self._timeline.memory.close()
        # the one of a GPU sets the allocator's peaks back, which the script may read
        self._timeline.memory = MemoryNow(cuda=False)
        self._hardware = HardwareSampler(open_sensors(torch.cuda.current_device() if cuda else None), HostCounters())
        self._hardware_lines = HardwareLines(self._hardware, self.rank)
        members = [self._hardware, *self._build_members(cuda, size)]
        self._begin_record(cuda, size)
        instruments = Instruments(members, _tell)
        self._instruments = instruments.__enter__()
        instruments.resume(0)
        self._begin_step(instruments)
        self._timeline.begin_earlier(self._first_sign)
        self._change_phase(self._named)
        self.when_training()

    def _find_place(self) -> int:
        """Find this process's rank, and the folder that it writes to; returns the number of ranks."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self.rank = torch.distributed.get_rank()
            size = torch.distributed.get_world_size()
        else:
            self.rank = int(os.environ.get("RANK", "0"))
            size = int(os.environ.get("WORLD_SIZE", "1"))
            if "RANK" not in os.environ:
                self.folder = choose_process_folder(self._given_folder)
        self._has_others = size > 1
        return size

    def _build_members(self, cuda: bool, size: int) -> list[Instrument]:
        """Build the instruments of this process, outermost first.

        Args:
            cuda: whether the script computes on a GPU.
            size: ranks of the job.
        """
        options = ProfileArgs(use_pytorch_profiler=True, pytorch_profiler_collect_shapes=True)
        # the first rank has lines in steps.jsonl
        take_hardware = self._hardware.take if self.rank and self._hardware else None
        self._torch_profiler = TorchProfiler(self.window, options, self.rank, cuda, self.folder, _tell, take_hardware)
        members = self._build_memory_instruments(cuda, size)
        if not self._makes_way:
            members.append(self._torch_profiler)
        members.append(self._timeline)
        return members

    def _build_memory_instruments(self, cuda: bool, size: int) -> list[Instrument]:
        """Build the instruments that record memory, outermost first.

        Args:
            cuda: whether the script computes on a GPU.
            size: ranks of the job.
        """
        if not (cuda or self._memory):
            return []
        recorder = self._recorder or _make_recorder(cuda)
        path = self.folder / SNAPSHOT_FILE
        own = path if size == 1 else extend_name(path, f"_rank{self.rank}")
        histories = [MemoryHistory(self.window, own, recorder, _tell)] if self._memory else []
        remedies = functools.partial(_list_remedies, cuda)
        shortage = OutOfMemoryWatch(self.rank, path if self._memory else None, recorder, remedies, _tell)
        return [shortage, *histories, recorder.place]

    def _begin_record(self, cuda: bool, size: int) -> None:
        """Write run.json as it is at the start.

        Args:
            cuda: whether the script computes on a GPU.
            size: ranks of the job.
        """
        self._record = RunRecord(
            status="running",
            started=format_now(),
            process=Process(**identity()),
            command=self._command,
            versions=describe_versions(),
            hardware=describe_device(
                torch.cuda.current_device() if cuda else None,
                sampled=self._hardware.describe() if self._hardware else None,
            ),
            environment=read_environment(),
            artefacts={"steps": STEPS_FILE},
            watched=self._watched,
        )
        self._watched.local_ranks = count_local_ranks(size)
        self._watched.host_memory_bytes = read_machine().memory_bytes
        if self.rank == 0:
            keep_previous_run(self.folder)
            (self.folder / STEPS_FILE).unlink(missing_ok=True)
            write_run(self.folder, self._record)

    def _find_step(self) -> int | None:
        """The running step of the rank that writes, on the thread that trains; None elsewhere."""
        is_recorded = self._instruments is not None and threading.get_ident() == self._thread and self.rank == 0
        return self._step if is_recorded else None

    def _begin_step(self, instruments: Instruments) -> None:
        self._step += 1
        instruments.notify("begin", self._step)

    def _end_step(self) -> None:
        """End the step, and begin the next one. Nothing before the first step."""
        instruments = self._instruments
        if instruments is None:
            return
        self._change_phase("")
        instruments.notify("end", self._step)
        self._write_steps()
        self._begin_step(instruments)
        self._change_phase(self._named)

    def _write_steps(self, wait: bool = False) -> None:
        """Write the steps that are complete.

        Args:
            wait: whether to wait for times that the GPU has not reported yet.
        """
        if not (wait or time.monotonic() - self._written_at > MAX_SILENCE_S):
            return
        self._written_at = time.monotonic()
        taken = self._timeline.take(wait)
        self._durations_s.extend(one.seconds for one in taken if one.step >= FIRST_ORDINARY_STEP)
        self._unwritten += taken
        known = [one for one in self._unwritten if wait or one.step < self._step - LAG]
        self._unwritten = self._unwritten[len(known) :]
        if self.rank:
            return
        records = [self._complete_record(one, wait) for one in known]
        with contextlib.suppress(OSError), open(self.folder / STEPS_FILE, "ab") as file:
            for record in records:
                append_record(file, record)
            samples = self._hardware_lines.take(self._step, wait) if self._hardware_lines else None
            if samples is not None:
                append_record(file, samples)

    def _complete_record(self, one: StepTime, wait: bool) -> StepRecord:
        """Build the line of a step in steps.jsonl."""
        record = one.build_record(one.step)
        record.loss = self._losses.take(one.step, wait)
        record.grad_norm = self._norms.take(one.step, wait)
        record.local = self._has_others and record.loss is not UNSET
        return record


def count_local_ranks(size: int) -> int | None:
    """Ranks of this machine, as the launcher says it; None where it does not. size: all ranks."""
    given = os.environ.get("LOCAL_WORLD_SIZE", "")
    if given.isdecimal() and 0 < int(given) <= size:
        return int(given)
    return 1 if size == 1 else None


def _make_recorder(cuda: bool) -> MemoryRecorder:
    events = ProfileArgs().memory_history_events
    return CudaRecorder(events) if cuda else CpuRecorder(events)


def _list_remedies(cuda: bool, held: dict[str, int], asked: int, unused: int) -> list[str]:
    """List what would help a script whose memory ran out, best first.

    Args:
        cuda: whether the script computes on a GPU.
        held: bytes by category.
        asked: bytes that did not fit.
        unused: bytes that the allocator reserved and no tensor holds.
    """
    remedies = list(REMEDIES)
    if cuda and unused >= max(asked, 1):
        remedies.insert(
            0, f"set {EXPANDABLE} in the environment: the memory that is reserved but unused would have been enough"
        )
    return remedies


def _tell(text: str) -> None:
    print(f"megatron-lite: {text}", file=sys.stderr, flush=True)
