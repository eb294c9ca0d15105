"""What --torch-compile comes to: decided once, with the reason."""

from dataclasses import dataclass

from megatron_lite.config.args import Args
from megatron_lite.config.world import World

AUTO, LAYERS, NONE = "auto", "layers", "none"


@dataclass(frozen=True)
class Compilation:
    """What torch.compile is to compile."""

    layers: bool  # each by itself
    why: str = ""  # of an automatic choice, with the remedy; empty: the flag says it
    loss: bool = (
        False  # too: on GPUs, where one kernel then does what several passes do; a CPU is slower with it compiled
    )

    @property
    def target(self) -> str:
        """In the flag's words."""
        return LAYERS if self.layers else NONE


def compilation_of(args: Args, world: World) -> Compilation:
    """The flag's word, or for auto: layers where there is a GPU that kernels can be compiled for."""
    asked = args.training.torch_compile
    if asked != AUTO:
        return Compilation(asked == LAYERS, loss=asked == LAYERS and world.gpus > 0)
    if not world.gpus:
        return Compilation(
            False, "on a CPU its start takes longer than a short run gains; --torch-compile layers compiles"
        )
    if args.training.deterministic_mode:
        return Compilation(
            False,
            "--deterministic-mode is given, and compiled kernels may be picked by timing them; "
            "--torch-compile layers compiles all the same",
        )
    if world.no_compiler and args.training.torch_compile_backend == "inductor":
        return Compilation(False, f"{world.no_compiler}; layers would be faster compiled")
    return Compilation(True, "automatic on a GPU; --torch-compile none trains without", loss=True)
