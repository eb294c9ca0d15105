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
        self._concerned: dict[str, tuple[Instrument, ...]] = {}  # by moment
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
        return self._kept.get(name) or self._context_of(name)

    def gradients_computed(self):
        """This rank begins to wait for others' gradients."""
        self._each("gradients_computed")

    def attempt(self, member: Instrument, moment: str, action, *arguments):
        """(member, what `action` returns), or None if it fails: then the member watches no longer."""
        try:
            return member, action(*arguments)
        except Exception as error:  # noqa: BLE001 - whatever an instrument dies of must not take the training with it
            self.switch_off(member, moment, error)
            return None

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

    def _context_of(self, name):
        contexts = [(member, context) for member, context in self._each("phase", name) if context is not None]
        made = _Phase(self, contexts) if contexts else _NOTHING
        if all(member.same_contexts for member in self._who("phase")):
            self._kept[name] = made
        return made

    def _each(self, moment: str, *arguments, innermost_first: bool = False) -> list[tuple]:
        members = self._who(moment)
        if innermost_first:
            members = members[::-1]
        done = [self.attempt(member, moment, getattr(member, moment), *arguments) for member in members]
        return [result for result in done if result is not None]

    def _who(self, moment: str) -> tuple[Instrument, ...]:
        """Those who do anything then."""
        members = self._concerned.get(moment)
        if members is None:
            overridden = getattr(Instrument, moment)
            members = tuple(member for member in self.members if getattr(type(member), moment) is not overridden)
            self._concerned[moment] = members
        return members


class _Phase:
    """Every member's context around one phase, entered and left one by one, so that a failing one stops no other."""

    def __init__(self, instruments: Instruments, contexts: list[tuple]):
        self.instruments, self.contexts = instruments, contexts

    def __enter__(self):
        for member_context in tuple(self.contexts):
            try:
                member_context[1].__enter__()
            except Exception as error:  # noqa: BLE001 - as in Instruments.attempt
                self.contexts.remove(member_context)  # what was not entered must not be left
                self.instruments.switch_off(member_context[0], "phase", error)

    def __exit__(self, *error):
        for member, context in reversed(self.contexts):
            try:
                context.__exit__(*error)
            except Exception as failure:  # noqa: BLE001 - as in Instruments.attempt
                self.instruments.switch_off(member, "phase", failure)
