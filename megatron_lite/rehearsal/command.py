"""python -m megatron_lite.rehearsal.command < REQUEST: the rehearsal for a program that does without torch.

REQUEST is JSON: flags of the trainer, world (fields of World), vocab_size, snapshot (a path to write), workspace (bytes of one of cuBLAS'). Prints the figures
as JSON, without the snapshot. Exit code 2 and one line for each mistake of the user.
"""

import json
import sys
from dataclasses import fields
from pathlib import Path

from megatron_lite.config.command_line import read_command_line
from megatron_lite.config.plan import resolve
from megatron_lite.config.world import World
from megatron_lite.errors import UserError
from megatron_lite.rehearsal.rehearse import rehearse, write_snapshot


def main() -> int:
    """Rehearse what standard input asks for; returns the exit code."""
    request = json.load(sys.stdin)
    plan = resolve(read_command_line(request["flags"]).args, World(**request["world"]), request["vocab_size"])
    try:
        found = rehearse(plan, workspace=request["workspace"])
    except UserError as error:
        print("\n".join(error.lines), file=sys.stderr)
        return error.exit_code
    write_snapshot(found, Path(request["snapshot"]))
    print(json.dumps({field.name: getattr(found, field.name) for field in fields(found) if field.name != "snapshot"}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
