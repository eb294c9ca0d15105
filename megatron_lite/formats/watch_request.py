"""What `megatron-lite watch` asks of the processes of a command: JSON in an environment variable of theirs."""

import json

import msgspec


class WatchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The recording that is asked for."""

    # for what is recorded
    folder: str
    # [first, end) of the steps that are profiled, counted from 1
    steps: tuple[int, int]
    # record a memory snapshot of these steps, too
    memory: bool
    # the words of the command
    command: list[str]


def encode_request(request: WatchRequest) -> str:
    """The text of the environment variable."""
    # not msgspec's encoder, which refuses half a character, as paths may hold
    return json.dumps(msgspec.to_builtins(request))


def decode_request(text: str) -> WatchRequest:
    """The request that a process finds in its environment."""
    return msgspec.convert(json.loads(text), WatchRequest)
