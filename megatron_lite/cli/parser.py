"""An argument parser that speaks as the rest of the project does: a mistake is one line."""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from megatron_lite.errors import UserError
from megatron_lite.terminal import describe_version, print_lines

END = "--"  # of options: what follows is a command, or arguments


class Parser(argparse.ArgumentParser):
    """Raises UserError where argparse would print its usage and exit. No abbreviations, as for the trainer."""

    def __init__(self, command: str, description: str):
        super().__init__(prog=f"megatron-lite {command}", description=description, allow_abbrev=False)
        self.add_argument(
            "--version",
            action=_Version,
            nargs=0,
            default=argparse.SUPPRESS,
            help="show the version and exit",
        )

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.prog}: {message}; --help shows its options")

    def split_command(self, argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
        """Read the options that stand before a command of somebody else's.

        They end at --, or at the first word that is neither an option nor its value.

        Args:
            argv: The words, "--steps 3:5 -- python train.py".

        Returns:
            The options, and the command without the --; never empty.

        Raises:
            UserError: An option is wrong, or there is no command.
        """
        actions = {name: action for action in self._actions for name in action.option_strings}
        at = 0
        while at < len(argv) and argv[at].startswith("-") and argv[at] != END:
            name, equals, _ = argv[at].partition("=")
            has_value = name in actions and actions[name].nargs is None and not equals
            at += 2 if has_value else 1
        options = self.parse_args(argv[:at])
        command = argv[at:]
        if command[:1] == [END]:
            command = command[1:]
        if not command:
            raise UserError(f"{self.prog}: no command; {self.prog} -- python train.py runs one.")
        return options, command


class _Version(argparse.Action):
    """Finds the versions out only where they are asked for."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[str] | None,
        option_string: str | None = None,
    ) -> None:
        print_lines([describe_version()])
        parser.exit()


def write_text(flag: str, path: str | Path, text: str) -> str:
    """Write a file that a flag asks for.

    Args:
        flag: the flag, for the message where the file cannot be written.
        path: the file.
        text: its content.

    Returns:
        The line that names the file.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{flag} {path}: cannot be written ({error.strerror or error}); name another file.") from error
    return f"written: {path}"


def write_json(path: str | None, content: Mapping[str, object]) -> list[str]:
    """Write the file that --json asks for. Returns an empty line and the line that names it; nothing where it was not
    given."""
    return ["", write_text("--json", path, json.dumps(content, indent=1, allow_nan=False) + "\n")] if path else []
