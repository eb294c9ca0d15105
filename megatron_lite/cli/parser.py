"""An argument parser that speaks as the rest of the project does: a mistake is one line."""

import argparse

from megatron_lite.errors import UserError


class Parser(argparse.ArgumentParser):
    """Raises UserError where argparse would print its usage and exit. No abbreviations, as for the trainer."""

    def __init__(self, command: str, description: str):
        super().__init__(prog=f"megatron-lite {command}", description=description, allow_abbrev=False)

    def error(self, message: str):
        raise UserError(f"{self.prog}: {message}; --help shows its options")
