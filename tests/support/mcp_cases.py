"""A server of tools and its client in this process, and commands that are run in it rather than in one of their own."""

import contextlib
import json
import tempfile
from pathlib import Path

import anyio
from mcp import Client
from mcp_types import CallToolResult

from megatron_lite.cli.main import main
from megatron_lite.mcp_server.folders import NamedFolders
from megatron_lite.mcp_server.run_command import ANSWER_FILE, PRINTED_FILE, read_result, run_command
from megatron_lite.mcp_server.server import ServerOptions, build_server

MAX_CHARACTERS = 24_000


def make_options(*folders: Path, **changed) -> ServerOptions:
    """Options as of a server that was started with these folders."""
    given = {"allow_running_scripts": False, "limit_s": 300, "max_characters": MAX_CHARACTERS} | changed
    return ServerOptions(NamedFolders(tuple(folder.resolve() for folder in folders)), **given)


async def run_here(command, roots, limit_s, report):
    """Run a command in this process, without confinement: what a process of its own costs is half a second."""
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        errors = scratch / "errors.txt"
        with contextlib.ExitStack() as stack:
            printed = stack.enter_context((scratch / PRINTED_FILE).open("w"))
            said = stack.enter_context(errors.open("w"))
            stack.enter_context(contextlib.redirect_stdout(printed))
            stack.enter_context(contextlib.redirect_stderr(said))
            code = main(command.list_words(scratch / ANSWER_FILE))
        return read_result(command, code, errors.read_text(), scratch)


def ask(options: ServerOptions, name: str, run=run_here, progress=None, **arguments) -> CallToolResult:
    """Call a tool, by the package's own client."""

    async def call():
        async with Client(build_server(options, run)) as client:
            return await client.call_tool(name, arguments, progress_callback=progress)

    return anyio.run(call)


def ask_process(options: ServerOptions, name: str, **arguments) -> CallToolResult:
    """Call a tool whose command runs in a confined process of its own, as it does for users."""
    return ask(options, name, run=run_command, **arguments)


def read_text(result: CallToolResult) -> str:
    """The text of an answer or error."""
    [content] = result.content
    return content.text


def count_characters(result: CallToolResult) -> int:
    """Characters of both forms of an answer, as they are sent."""
    return len(json.dumps(read_text(result), ensure_ascii=False)) + len(
        json.dumps(result.structured_content, ensure_ascii=False)
    )
