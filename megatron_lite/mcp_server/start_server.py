"""`megatron-lite mcp` answers programs that help people, over the Model Context Protocol."""

import importlib.util
import os
from pathlib import Path

from megatron_lite.cli.parser import Parser
from megatron_lite.errors import UserError
from megatron_lite.mcp_server.folders import NamedFolders

PACKAGES = ("mcp", "mcp_types")
INSTALL = "pip install 'megatron_lite[mcp]'"
SECONDS_PER_CALL = 300.0
CHARACTERS_PER_ANSWER = 24_000
MIN_CHARACTERS = 4_000


def run(argv: list[str]) -> None:
    """Serve until standard input ends. UserError for a mistake."""
    parser = Parser(
        "mcp",
        "Serves report, compare, postmortem, plan, fit and explain as tools of the Model Context Protocol on standard "
        "input and output. Reads only what lies in the folders, and writes nothing.",
    )
    add = parser.add_argument
    add("folders", nargs="+", metavar="FOLDER", help="what may be read; links that lead out of it may not")
    add(
        "--allow-running-scripts",
        action="store_true",
        help="let `fit` run scripts in the folders, with your rights",
    )
    add(
        "--time-limit",
        type=float,
        default=SECONDS_PER_CALL,
        metavar="S",
        help="seconds that a call may take [%(default)g]",
    )
    add(
        "--max-characters",
        type=int,
        default=CHARACTERS_PER_ANSWER,
        metavar="N",
        help="characters of an answer, at most [%(default)s]",
    )
    options = parser.parse_args(argv)
    if not 0 < options.time_limit < float("inf"):
        raise UserError(f"--time-limit {options.time_limit:g}: must be more than 0 seconds.")
    if options.max_characters < MIN_CHARACTERS:
        raise UserError(f"--max-characters {options.max_characters}: must be at least {MIN_CHARACTERS}.")
    folders = NamedFolders(tuple(_find_folder(name) for name in options.folders))
    if any(importlib.util.find_spec(package) is None for package in PACKAGES):
        raise UserError(f"megatron-lite mcp: needs the package mcp, version 2 or newer; {INSTALL}")
    from megatron_lite.mcp_server.server import ServerOptions, serve_on_stdio

    serve_on_stdio(ServerOptions(folders, options.allow_running_scripts, options.time_limit, options.max_characters))


def _find_folder(name: str) -> Path:
    """A folder without links; UserError where there is none."""
    folder = Path(os.path.realpath(name))
    if not folder.is_dir():
        raise UserError(f"{name}: is no folder; name one that holds runs, traces or scripts.")
    return folder
