"""Every check that needs a GPU, in one command of at most nine minutes. docs/gpu.md says what it looks at.

    python tests/gpu --out FOLDER [--minutes 9]
    python tests/gpu --device cpu           # a rehearsal without a GPU, of what can run there

To be started with the Python that has torch; the project need not be installed.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

try:
    import msgspec  # noqa: F401, the records that every run writes
    import numpy  # noqa: F401, every part's process needs it
    from gpu_checks.main import main
except ModuleNotFoundError as missing:
    print(
        f"error: {sys.executable} has no {missing.name}, without which nothing can be trained; install it there",
        file=sys.stderr,
    )
    sys.exit(3)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], __doc__))
