"""What every instrument is: something that watches a run and never changes it."""

import contextlib

_NOTHING = contextlib.nullcontext()


class Instrument:
    """Override the moments you need."""

    same_contexts = False  # `phase` gives the same object for the same name all through the run, or None each time

    def open(self):
        """Before the model is built."""

    def resume(self, iteration: int):
        """Once, before the first step: the iteration that training goes on from, 0 for a new run."""

    def begin(self, step: int):
        """Before a step's data is fetched. `step` counts this run's steps from 1."""

    def end(self, step: int):
        """After the step was logged."""

    def close(self, error: BaseException | None):
        """Once, at the end, also when the run failed."""

    def phase(self, name):
        """A context manager around one phase of a step, or None."""

    def gradients_computed(self):
        """Within backward, on autograd's thread: this rank has its gradients, and waits for those of others from here on."""


class Instruments:
    """All instruments as one, the last of `members` innermost around a step. A failing one is reported and switched off; the run goes on."""

    def __init__(self, members: list[Instrument], warn):
        self.members, self._warn = list(members), warn
        self._concerned: dict[str, tuple[Instrument, ...]] = {}  # by moment: those who do anything then
        self._kept: dict[str, object] = {}  # contexts of phases, by name

    def __enter__(self):
        self._each("open")
        return self

    def __exit__(self, kind, error, traceback):
        self._each("close", error)

    def resume(self, iteration: int):
        """Tell everyone where training goes on from."""
        self._each("resume", iteration)

    @contextlib.contextmanager
    def step(self, step: int):
        """Around one training step."""
        self._each("begin", step)
        yield
        self._each("end", step, innermost_first=True)

    def phase(self, name):
        """Around one phase of a step: what every member wants to have there."""
        # A step has a dozen phases, and work on tensors drives the interpreter's memory out of the caches between them:
        # what is looked up and made anew here costs ten times what it costs in a loop of its own.
        return self._kept.get(name) or self._make_context(name)

    def gradients_computed(self):
        """This rank begins to wait for others' gradients."""
        self._each("gradients_computed")

    def switch_off(self, member: Instrument, moment: str, error: Exception):
        """It failed at `moment`, and watches no longer."""
        if member not in self.members:
            return
        self.members.remove(member)
        self._concerned.clear()
        self._kept.clear()
        self._warn(f"{type(member).__name__}.{moment} failed and was switched off; training goes on: {error}")
        if moment != "close":
            with contextlib.suppress(Exception):
                member.close(error)  # what it has switched on must not stay on: some of it crashes at exit

    def _make_context(self, name):
        contexts = [(member, context) for member, context in self._each("phase", name) if context is not None]
        made = _Phase(self, contexts) if contexts else _NOTHING
        if all(member.same_contexts for member in self._concerned.get("phase", self.members)):
            self._kept[name] = made
        return made

    def _each(self, moment: str, *arguments, innermost_first: bool = False) -> list[tuple]:
        """[(member, what it returns)] of those who override `moment` and do not fail at it."""
        members = self._concerned.get(moment)
        if members is None:
            overridden = getattr(Instrument, moment)
            members = tuple(member for member in self.members if getattr(type(member), moment) is not overridden)
            self._concerned[moment] = members
        done = []
        for member in reversed(members) if innermost_first else members:
            try:
                done.append((member, getattr(member, moment)(*arguments)))
            except Exception as error:  # noqa: BLE001 - whatever an instrument dies of must not take the training with it
                self.switch_off(member, moment, error)
        return done


class _Phase:
    """Every member's context around one phase, entered and left one by one, so that a failing one stops no other."""

    def __init__(self, instruments: Instruments, contexts: list[tuple]):
        self.instruments, self.contexts = instruments, contexts

    def __enter__(self):
        for member_context in tuple(self.contexts):
            try:
                member_context[1].__enter__()
            except Exception as error:  # noqa: BLE001 - as in Instruments._each
                self.contexts.remove(member_context)  # what was not entered must not be left
                self.instruments.switch_off(member_context[0], "phase", error)

    def __exit__(self, *error):
        for member, context in reversed(self.contexts):
            try:
                context.__exit__(*error)
            except Exception as failure:  # noqa: BLE001 - as in Instruments._each
                self.instruments.switch_off(member, "phase", failure)


class Window:
    """The profiled steps of a run: `first` to `last`, both inside, counted from 1 at this run's start; range(A, B) leaves B out.

    `started_at` is the iteration that a resumed run starts from. Instruments open before the checkpoint is loaded,
    so it is told them when training starts. `margin`: steps before and after the window whose time is no
    ordinary one either, since profilers get ready in them and other ranks wait for the ranks that write.
    """

    def __init__(self, steps: range = range(0), started_at: int = 0, margin: int = 0):
        self.started_at, self.margin = started_at, margin
        self.traced_on_demand = False  # a window that was asked for has left a trace
        self.move_to(steps)

    def move_to(self, steps: range, on_demand: bool = False):
        """Another window, for what is asked of a run while it goes on. Everyone who holds this object follows."""
        self.first, self.last, self.on_demand = steps.start, steps.stop - 1, on_demand

    def __len__(self):
        return max(self.last - self.first + 1, 0)

    def __contains__(self, step: int):
        return self.first <= step <= self.last

    def disturbs(self, step: int) -> bool:
        """Whether averages of time leave this step out: it is in the window, or beside it."""
        return bool(self) and self.first - self.margin <= step <= self.last + self.margin

    def opens(self, step: int) -> bool:
        """Whether the window begins before this step."""
        return bool(self) and step == self.first

    def closes(self, step: int) -> bool:
        """Whether the window is over after this step."""
        return bool(self) and step == self.last

    def words(self, done_to: int | None = None) -> str:
        """'steps 110-111 of this run = iterations 210-211'; up to the step `done_to` if the run ended inside."""

        def name(unit: str, first: int, last: int) -> str:
            return f"{unit}s {first}-{last}" if last > first else f"{unit} {first}"

        last, past = self.last if done_to is None else min(done_to, self.last), self.started_at
        text = f"{name('step', self.first, last)} of this run"
        return f"{text} = {name('iteration', self.first + past, last + past)}" if past else text
