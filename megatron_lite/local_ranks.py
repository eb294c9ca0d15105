"""The variables by which scripts find the other ranks of a job that runs on this machine only."""

import socket

HOST = "127.0.0.1"


def describe_local_rank(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Make the variables that torchrun sets for a rank.

    Args:
        rank: Number of the rank, from 0.
        ranks: How many there are.
        port: Where they meet.
    """
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
    }


def find_free_port() -> int:
    """Find a port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        port: int = listener.getsockname()[1]
        return port
