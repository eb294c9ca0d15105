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
        for _, rank in sorted(reference.ranks.items()):
            for output in rank.record.outputs:
                first, _ = calls.get(output.module, (output.call, output.call))
                calls[output.module] = (first, output.call)
            for part in rank.record.weights:
                parameters.setdefault(part.name, len(parameters))
        return CallOrder(calls, parameters)

    def sort_backward(self, names: list[str]) -> list[str]:
        """Sort parameters as backward reaches them: those of the module that is called last first."""
        return sorted(names, key=self._rank_backward)

    def _rank_backward(self, name: str) -> tuple[int, int]:
        module, _, _ = name.rpartition(".")
        call = self.calls.get(module)
        number = self.parameters.get(name, 0)
        return (0 if call is None else -call[0], -number if call is None else number)
