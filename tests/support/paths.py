"""Where the project lies, and beside it what some tests read if it is there."""

from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
REPO = TESTS.parent
PACKAGE = REPO / "megatron_lite"
DOCS = REPO / "docs"
SHARED = REPO.parent / "shared"  # traces, snapshots and vocabularies of other people, which are not part of the project
TRACES = SHARED / "traces"
SNAPSHOTS = SHARED / "snapshots"
GPT2 = SHARED / "data" / "gpt2"
