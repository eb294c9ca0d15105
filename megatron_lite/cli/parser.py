"""An argument parser that speaks as the rest of the project does: a mistake is one line."""

import argparse

from megatron_lite.errors import UserError
from megatron_lite.terminal import describe_version, print_lines


class Parser(argparse.ArgumentParser):
    """Raises UserError where argparse would print its usage and exit. No abbreviations, as for the trainer."""

    def __init__(self, command: str, description: str):
        super().__init__(prog=f"megatron-lite {command}", description=description, allow_abbrev=False)
        self.add_argument(
            "--version", action=_Version, nargs=0, default=argparse.SUPPRESS, help="show the version, and end"
        )

    def error(self, message: str):
        raise UserError(f"{self.prog}: {message}; --help shows its options")


class _Version(argparse.Action):
    """Finds the versions out only where they are asked for."""

    def __call__(self, parser, namespace, values, option_string=None):
        print_lines([describe_version()])
        parser.exit()
