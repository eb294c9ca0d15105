"""The base class of instruments, which watch a run and never change it, and the group that calls them."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Literal, Protocol, overload

Moment = Literal[
    "open",
    "resume",
    "begin",
    "begin_phase",
    "end_phase",
    "gradients_computed",
    "wait_for_stage",
    "end",
    "close",
]
INNERMOST_FIRST = ("end_phase", "end")


class Tell(Protocol):
    """Brings a line to whoever follows the run, as to the console."""

    def __call__(self, text: str, /) -> object:
        """Called where an instrument has something to report."""


class Instrument:
    """Something that watches a run. Each method is called at one moment of it; override the ones you need."""

    def open(self) -> None:
        """Called once, before the model is built."""

    def resume(self, iteration: int) -> None:
        """Called once, before the first step, with the iteration that training goes on from: 0 for a new run."""

    def begin(self, step: int) -> None:
        """Called before a step's data is fetched. `step` counts this run's steps from 1."""

    def begin_phase(self, name: str) -> None:
        """Called when a phase of a step begins. Others may lie inside it, but none of the same name."""

    def end_phase(self, name: str, failed: bool) -> None:
        """Called when a phase of a step ends. `failed` says that an exception ended it."""

    def gradients_computed(self) -> None:
        """Called within backward, on autograd's thread, when this rank has its gradients and begins to wait for those
        of other ranks."""

    def wait_for_stage(self, rank: int, what: str) -> None:
        """Called when the trainer begins to wait for another stage of the pipeline, and when it has stopped waiting.

        Args:
            rank: The rank that it waits for.
            what: Words such as "the forward of micro-batch 3 from"; "" when it no longer waits.
        """

    def end(self, step: int) -> None:
        """Called after the step was logged."""

    def close(self, error: BaseException | None) -> None:
        """Called once, at the end, also when the run failed: then with the error."""


class Instruments:
    """Passes every moment of a run to its members. The last member is innermost around a step.

    A member that raises an error is reported and removed; the run goes on.
    """

    def __init__(self, members: Sequence[Instrument], warn: Tell) -> None:
        self.members = list(members)
        self._warn = warn
        # by moment: the members that override its method, and the method
        self._actions: dict[str, list[tuple[Instrument, Callable[..., None]]]] = {}
        self._phases: dict[str, _Phase] = {}

    def __enter__(self) -> "Instruments":  # noqa: PYI034 - Self came with Python 3.11
        self.notify("open")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.notify("close", error)

    def resume(self, iteration: int) -> None:
        """Tell all members which iteration training continues from."""
        self.notify("resume", iteration)

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Make a context manager around one training step."""
        self.notify("begin", step)
        yield
        self.notify("end", step)

    def phase(self, name: str) -> "_Phase":
        """Return the context manager around one phase of a step, the same object each time the phase runs."""
        return self._phases.get(name) or self._phases.setdefault(name, _Phase(self, str(name)))

    def gradients_computed(self) -> None:
        """Tell all members that this rank begins to wait for the gradients of others."""
        self.notify("gradients_computed")

    def wait_for_stage(self, rank: int, what: str) -> None:
        """Tell all members that this rank begins to wait for another stage of the pipeline; with an empty `what`, that
        it no longer waits."""
        self.notify("wait_for_stage", rank, what)

    @overload
    def notify(self, moment: Literal["open", "gradients_computed"], /) -> None: ...
    @overload
    def notify(self, moment: Literal["resume", "begin", "end"], number: int, /) -> None: ...
    @overload
    def notify(self, moment: Literal["begin_phase"], name: str, /) -> None: ...
    @overload
    def notify(self, moment: Literal["end_phase"], name: str, failed: bool, /) -> None: ...
    @overload
    def notify(self, moment: Literal["wait_for_stage"], rank: int, what: str, /) -> None: ...
    @overload
    def notify(self, moment: Literal["close"], error: BaseException | None, /) -> None: ...
    def notify(self, moment: Moment, *arguments: object) -> None:
        """Call the method `moment` of all members that override it, with the arguments that Instrument names."""
        # A step has dozens of these calls, and work on tensors drives the interpreter's memory out of the caches
        # between them: what is looked up and made anew here costs ten times what it costs in a loop of its own.
        actions = self._actions.get(moment)
        if actions is None:
            actions = self._actions[moment] = self._find_actions(moment)
        for member, action in actions:
            try:
                action(*arguments)
            # whatever an instrument dies of must not take the training with it
            except Exception as error:  # noqa: BLE001
                self._warn(f"{type(member).__name__}.{moment} failed and was switched off; training goes on: {error}")
                self.switch_off(member, error, closed=moment == "close")

    def switch_off(self, member: Instrument, error: BaseException | None = None, closed: bool = False) -> None:
        """Do without a member from now on.

        Args:
            member: One of the members.
            error: What it failed of; None where nothing failed.
            closed: Whether it has been closed.
        """
        self.members.remove(member)
        self._actions.clear()
        if not closed:
            # What it has switched on must not stay on: some of it crashes at exit. Its failure was told; a second one,
            # in a member that is half broken, would hide it and must not end the training.
            with contextlib.suppress(Exception):
                member.close(error)

    def _find_actions(self, moment: Moment) -> list[tuple[Instrument, Callable[..., None]]]:
        """Find the members that a moment concerns, in the order in which they are called, and their methods."""
        not_overridden = getattr(Instrument, moment)
        concerned = [member for member in self.members if getattr(type(member), moment) is not not_overridden]
        if moment in INNERMOST_FIRST:
            concerned.reverse()
        return [(member, getattr(member, moment)) for member in concerned]


class _Phase:
    """The context manager that `Instruments.phase` returns."""

    def __init__(self, instruments: Instruments, name: str) -> None:
        self._instruments = instruments
        self._name = name

    def __enter__(self) -> None:
        self._instruments.notify("begin_phase", self._name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._instruments.notify("end_phase", self._name, kind is not None)


class Window:
    """The steps of a run that are profiled.

    All instruments share one window: a request to profile while the run goes on moves it for all of them.

    Args:
        steps: Counted from 1 at this run's start; a range leaves its end out.
        margin: Steps before and after the window that take longer too: profilers start and stop in them, and other
            ranks wait for the ranks that write.
        train_iters: Iterations of the whole training.

    `started_at` is the iteration that a resumed run starts from, which is known once the checkpoint is loaded.
    """

    def __init__(self, steps: range = range(0), margin: int = 0, train_iters: int = 0) -> None:
        self.steps = steps
        self.margin = margin
        self.started_at = 0
        self._train_iters = train_iters
        self.on_demand = False  # the window was requested while the run went on
        self.traced_on_demand = False  # a window on demand has written a trace

    @property
    def last_step(self) -> int:
        """The run's last step, by its flags."""
        return self._train_iters - self.started_at

    def disturbs(self, step: int) -> bool:
        """Whether averages of time leave this step out, which is in the window or within its margin."""
        return bool(self.steps) and self.steps.start - self.margin <= step < self.steps.stop + self.margin

    def opens(self, step: int) -> bool:
        """Whether the window begins before this step."""
        return bool(self.steps) and step == self.steps[0]

    def closes(self, step: int) -> bool:
        """Whether the window is over after this step."""
        return bool(self.steps) and step == self.steps[-1]

    def words(self, done_to: int | None = None) -> str:
        """Describe the window, as in 'steps 110-111 of this run = iterations 210-211'.

        Args:
            done_to: The last step that was done, where the run may have ended inside the window.
        """
        first = self.steps[0]
        last = self.steps[-1]
        if done_to is not None:
            last = min(done_to, last)
        steps = _describe_span("step", first, last)
        if not self.started_at:
            return f"{steps} of this run"
        iterations = _describe_span("iteration", first + self.started_at, last + self.started_at)
        return f"{steps} of this run = {iterations}"


def _describe_span(unit: str, first: int, last: int) -> str:
    """Describe a span as in 'steps 110-111', or 'step 110' where it has one."""
    return f"{unit}s {first}-{last}" if last > first else f"{unit} {first}"
