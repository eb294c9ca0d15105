"""The base class of instruments, which watch a run and never change it."""

import contextlib

INNERMOST_FIRST = ("end_phase", "end")


class Instrument:
    """Something that watches a run. Each method is called at one moment of it; override the ones you need."""

    def open(self):
        """Before the model is built."""

    def resume(self, iteration: int):
        """Once, before the first step: the iteration that training goes on from, 0 for a new run."""

    def begin(self, step: int):
        """Before a step's data is fetched. `step` counts this run's steps from 1."""

    def begin_phase(self, name: str):
        """A phase of a step begins. Others may lie inside it, but none of the same name."""

    def end_phase(self, name: str, failed: bool):
        """The phase ends. failed: an exception ended it."""

    def gradients_computed(self):
        """Within backward, on autograd's thread: this rank has its gradients,
        and waits for those of others from here on."""

    def wait_for_stage(self, rank: int, what: str):
        """The trainer begins to wait for another stage of the pipeline: 'the forward of micro-batch 3 from'.

        "": it no longer does.
        """

    def end(self, step: int):
        """After the step was logged."""

    def close(self, error: BaseException | None):
        """Once, at the end, also when the run failed."""


class Instruments:
    """Passes every moment of a run to its members. The last member is innermost around a step.

    A member that raises an error is reported and removed; the run goes on.
    """

    def __init__(self, members: list[Instrument], warn):
        self.members, self._warn = list(members), warn
        self._actions: dict[str, list] = {}  # {moment: methods of the members that override it}
        self._phases: dict[str, _Phase] = {}

    def __enter__(self):
        self.notify("open")
        return self

    def __exit__(self, kind, error, traceback):
        self.notify("close", error)

    def resume(self, iteration: int):
        """Tell all members which iteration training continues from."""
        self.notify("resume", iteration)

    @contextlib.contextmanager
    def step(self, step: int):
        """A context manager around one training step."""
        self.notify("begin", step)
        yield
        self.notify("end", step)

    def phase(self, name):
        """A context manager around one phase of a step, the same object each time a phase runs."""
        return self._phases.get(name) or self._phases.setdefault(name, _Phase(self, str(name)))

    def gradients_computed(self):
        """This rank begins to wait for others' gradients."""
        self.notify("gradients_computed")

    def wait_for_stage(self, rank: int, what: str):
        """This rank begins to wait for another stage of the pipeline; with an empty `what`, it no longer waits."""
        self.notify("wait_for_stage", rank, what)

    def notify(self, moment: str, *arguments):
        """Call the method `moment` of all members that override it."""
        # A step has dozens of these calls, and work on tensors drives the interpreter's memory out of the caches
        # between them: what is looked up and made anew here costs ten times what it costs in a loop of its own.
        actions = self._actions.get(moment)
        if actions is None:
            overridden = getattr(Instrument, moment)
            concerned = [member for member in self.members if getattr(type(member), moment) is not overridden]
            ordered = reversed(concerned) if moment in INNERMOST_FIRST else concerned
            actions = self._actions[moment] = [getattr(member, moment) for member in ordered]
        for action in actions:
            try:
                action(*arguments)
            # whatever an instrument dies of must not take the training with it
            except Exception as error:  # noqa: BLE001
                member = action.__self__
                self._warn(f"{type(member).__name__}.{moment} failed and was switched off; training goes on: {error}")
                self.switch_off(member, error, closed=moment == "close")

    def switch_off(self, member: Instrument, error: BaseException | None = None, closed: bool = False):
        """Do without a member from now on. closed: it has been closed."""
        self.members.remove(member)
        self._actions.clear()
        if not closed:
            # What it has switched on must not stay on: some of it crashes at exit. Its failure was told; a second one,
            # in a member that is half broken, would hide it and must not end the training.
            with contextlib.suppress(Exception):
                member.close(error)


class _Phase:
    """The context manager that `Instruments.phase` returns."""

    def __init__(self, instruments: Instruments, name: str):
        self._instruments, self._name = instruments, name

    def __enter__(self):
        self._instruments.notify("begin_phase", self._name)

    def __exit__(self, kind, error, traceback):
        self._instruments.notify("end_phase", self._name, kind is not None)


class Window:
    """The steps of a run that are profiled.

    All instruments share one window: a request to profile while the run goes on moves it for all of them.

    Args:
        steps: Counted from 1 at this run's start; a range leaves its end out.
        margin: Steps before and after the window that take longer too: profilers start and stop in them, and other
            ranks wait for the ranks that write.

    `started_at` is the iteration that a resumed run starts from, which is known once the checkpoint is loaded.
    """

    def __init__(self, steps: range = range(0), margin: int = 0, train_iters: int = 0):
        self.steps, self.margin, self.started_at, self._train_iters = steps, margin, 0, train_iters
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
        """'steps 110-111 of this run = iterations 210-211'; up to the step `done_to` if the run ended inside."""
        first, last, past = self.steps[0], self.steps[-1], self.started_at
        last = last if done_to is None else min(done_to, last)
        step, iteration = (
            f"{unit}s {first + more}-{last + more}" if last > first else f"{unit} {first + more}"
            for unit, more in (("step", 0), ("iteration", past))
        )
        return f"{step} of this run = {iteration}" if past else f"{step} of this run"
