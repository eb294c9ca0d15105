"""A server of the Model Context Protocol whose tools are commands of megatron-lite that only read."""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
from mcp.server import Server, ServerRequestContext
from mcp.server.stdio import stdio_server
from mcp_types import (
    CallToolRequestParams,
    CallToolResult,
    ListToolsResult,
    PaginatedRequestParams,
    TextContent,
    Tool,
    ToolAnnotations,
)

from megatron_lite.errors import UserError, first_line
from megatron_lite.mcp_server.answers import ToolAnswer, bound_answer
from megatron_lite.mcp_server.calls import CALLS, Call
from megatron_lite.mcp_server.folders import NamedFolders
from megatron_lite.mcp_server.run_command import Command, CommandResult, ReportProgress, run_command
from megatron_lite.terminal import describe_version, escape

NAME = "megatron-lite"
MAX_CALLS_AT_ONCE = 2
MAX_MISTAKE_CHARACTERS = 2000
MAX_PROGRESS_CHARACTERS = 200  # of what a command says last, which may be the text of a file
LOGGER = logging.getLogger(__name__)
Runner = Callable[[Command, tuple[Path, ...], float, ReportProgress], Awaitable[CommandResult]]


@dataclass(frozen=True)
class ServerOptions:
    """The options that a server was started with.

    Attributes:
        folders: What may be read.
        allow_running_scripts: Whether `fit` may run scripts in the folders.
        limit_s: Seconds that a call may take.
        max_characters: Characters of an answer, text and structured content together.
    """

    folders: NamedFolders
    allow_running_scripts: bool
    limit_s: float
    max_characters: int


def build_server(options: ServerOptions, run: Runner = run_command) -> Server[Any]:
    """Build the server; it answers once it is given streams to run on, or a client in the same process.

    Args:
        options: What it was started with.
        run: Runs a command to its end.
    """
    at_once = anyio.Semaphore(MAX_CALLS_AT_ONCE)

    async def list_tools(context: ServerRequestContext[Any], params: PaginatedRequestParams | None) -> ListToolsResult:
        return ListToolsResult(tools=[_describe_tool(name, call) for name, call in CALLS.items()])

    async def call_tool(context: ServerRequestContext[Any], params: CallToolRequestParams) -> CallToolResult:
        try:
            async with at_once:
                return await _answer(options, run, context, params)
        except UserError as error:
            return _describe_error(error.lines)
        # no file may end the server
        except Exception as error:
            LOGGER.exception("%s", params.name)
            return _describe_error([f"{params.name}: {first_line(error)}: a bug in megatron_lite; please report it."])

    return Server(
        NAME,
        version=describe_version().split()[1],
        instructions=_write_instructions(options),
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


def serve_on_stdio(options: ServerOptions) -> None:
    """Answer calls on standard input and output until the input ends.

    Args:
        options: What the server was started with.
    """

    async def serve() -> None:
        server = build_server(options)
        async with stdio_server() as (incoming, outgoing):
            await server.run(incoming, outgoing, server.create_initialization_options())

    anyio.run(serve)


def _write_instructions(options: ServerOptions) -> str:
    folders = escape(", ".join(map(str, options.folders.roots)))
    return (
        "Explains PyTorch training runs: why steps are slow, why memory peaks, why a job failed; predicts memory and "
        f"speed. Reads only files in {folders}; paths may be relative to them. Writes nothing. An answer has at most "
        f"{options.max_characters} characters; `cut` names what is left out, and `section` asks for it."
    )


def _describe_tool(name: str, call: type[Call]) -> Tool:
    return Tool(
        name=name,
        description=" ".join((call.__doc__ or "").split()),
        input_schema=_make_schema(call),
        output_schema=_make_schema(ToolAnswer),
        annotations=ToolAnnotations(
            read_only_hint=not call.runs_scripts,
            destructive_hint=call.runs_scripts,
            idempotent_hint=True,
            open_world_hint=False,
        ),
    )


def _make_schema(record: type[msgspec.Struct]) -> dict[str, Any]:
    """Make the JSON schema of a record, whose outermost type is an object, as the protocol wants it."""
    schema = msgspec.json.schema(record)
    definitions: dict[str, Any] = schema["$defs"]
    outermost: dict[str, Any] = definitions.pop(record.__name__)
    outermost.pop("title", None)
    # the tool's own description says it
    outermost.pop("description", None)
    return {**outermost, "$defs": definitions} if definitions else outermost


async def _answer(
    options: ServerOptions, run: Runner, context: ServerRequestContext[Any], params: CallToolRequestParams
) -> CallToolResult:
    """Answer a call.

    Args:
        options: What the server was started with.
        run: Runs a command to its end.
        context: The request's, to which progress is reported.
        params: Name and parameters of the tool.

    Raises:
        UserError: A mistake of the caller, or a command that failed.
    """
    call = _read_call(params)
    if call.runs_scripts and not options.allow_running_scripts:
        raise UserError(
            f"{params.name}: runs a script, which this server may not; start it with --allow-running-scripts."
        )
    command = call.build_command(options.folders)
    result = await run(command, options.folders.roots, options.limit_s, _make_reporter(context, options))
    bounded = await anyio.to_thread.run_sync(
        bound_answer, result, call.section, call.choose_finding(), options.max_characters
    )
    return CallToolResult(
        content=[TextContent(text=bounded.text)],
        structured_content=msgspec.to_builtins(bounded.answer),
    )


def _make_reporter(context: ServerRequestContext[Any], options: ServerOptions) -> ReportProgress:
    async def report(seconds: float, message: str) -> None:
        await context.session.report_progress(seconds, options.limit_s, message[:MAX_PROGRESS_CHARACTERS] or None)

    return report


def _read_call(params: CallToolRequestParams) -> Call:
    """Read the parameters of a call; UserError for a tool that is not there, or parameters that it does not take."""
    if params.name not in CALLS:
        raise UserError(f"{params.name}: no such tool; there are {', '.join(CALLS)}.")
    try:
        return msgspec.convert(params.arguments or {}, CALLS[params.name])
    except msgspec.ValidationError as error:
        raise UserError(f"{params.name}: {error}; see the tool's input schema.") from None


def _describe_error(lines: list[str]) -> CallToolResult:
    # names of files may hold what no message of the protocol can
    text = "\n".join(map(escape, lines))
    if len(text) > MAX_MISTAKE_CHARACTERS:
        text = f"{text[:MAX_MISTAKE_CHARACTERS]} ..."
    return CallToolResult(content=[TextContent(text=text)], is_error=True)
