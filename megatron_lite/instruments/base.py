"""What every instrument is: something that watches a run and never changes it."""

import contextlib

_NOTHING = contextlib.nullcontext()


class Instrument:
    """Override the moments you need."""

    def open(self):
        """Before the model is built."""

    def begin(self, step: int):
        """Before a step's data is fetched. `step` counts this run's steps from 1."""

    def end(self, step: int):
        """After the step was logged."""

    def close(self, error: BaseException | None):
        """Once, at the end, also when the run failed."""

    def phase(self, name):
        """A context manager around one phase of a step, or None."""


class Instruments:
    """All instruments as one. A failing one is reported and switched off; the run goes on."""

    def __init__(self, members: list[Instrument], warn):
        self.members, self._warn = list(members), warn

    def __enter__(self):
        self._each("open")
        return self

    def __exit__(self, kind, error, traceback):
        self._each("close", error)

    @contextlib.contextmanager
    def step(self, step: int):
        """Around one training step."""
        self._each("begin", step)
        yield
        self._each("end", step)

    def phase(self, name):
        """Around one phase of a step: what every member wants to have there."""
        contexts = [context for context in self._each("phase", name) if context is not None]
        if len(contexts) < 2:
            return contexts[0] if contexts else _NOTHING
        stack = contextlib.ExitStack()
        for context in contexts:
            stack.enter_context(context)
        return stack

    def _each(self, moment: str, *arguments) -> list:
        results = []
        for member in list(self.members):
            try:
                results.append(getattr(member, moment)(*arguments))
            except Exception as error:  # whatever an instrument dies of must not take the training with it
                self.members.remove(member)
                self._warn(f"{type(member).__name__}.{moment} failed and was switched off; training goes on: {error}")
        return results
