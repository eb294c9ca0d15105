"""Reads the order in which modules are called, and so in which errors show."""

from dataclasses import dataclass

from megatron_lite.analysis.equality.proved_run import ProvedRun


@dataclass(frozen=True)
class CallOrder:
    """Order of the reference's modules and parameters."""

    # by module: number of its first and of its last call
    calls: dict[str, tuple[int, int]]
    # by parameter: its place in the model
    parameters: dict[str, int]

    @staticmethod
    def read(reference: ProvedRun) -> "CallOrder":
        """Read the order from what was recorded."""
        calls: dict[str, tuple[int, int]] = {}
        parameters: dict[str, int] = {}
        for number in sorted(reference.ranks):
            record = reference.ranks[number].record
            for output in record.outputs:
                module = output.module
                last = output.call
                first, _ = calls.get(module, (last, last))
                calls[module] = (first, last)
            for part in record.weights:
                parameters.setdefault(part.name, len(parameters))
        return CallOrder(
            calls=calls,
            parameters=parameters,
        )

    def sort_backward(self, names: list[str]) -> list[str]:
        """Sort parameters as backward reaches them: those of the module that is called last first."""
        return sorted(names, key=self._rank_backward)

    def _rank_backward(self, name: str) -> tuple[int, int]:
        module, _, _ = name.rpartition(".")
        number = self.parameters.get(name, 0)
        call = self.calls.get(module)
        # nothing but its place in the model tells of a module that was not seen
        if call is None:
            return 0, -number
        first, _ = call
        return -first, number
