"""What the start scripts ask about the packages of pyproject.toml, under any Python from 3.10 on, with the standard library only.

python examples/packages.py missing     prints what this environment lacks, and exits with 1 if it lacks anything
python examples/packages.py cpu-torch   prints the requirement of torch's newest CPU build that this pip can see, or nothing
"""

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def read_requirements() -> dict[str, str]:
    """{package: bounds of its version}. Python 3.10 has no reader of TOML; the list is one quoted requirement after another."""
    listed = re.search(r"^dependencies = \[(.*?)\]", PYPROJECT.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)[1]
    return dict(re.match(r"([\w.-]+)\s*(.*)", each).groups() for each in re.findall(r'"([^"]+)"', listed))


def release_of(version: str) -> tuple[int, ...]:
    """'2.13.0a0+cu126' -> (2, 13, 0)."""
    return tuple(map(int, re.match(r"[\d.]*\d", version)[0].split(".")))


def find_missing() -> list[str]:
    """Requirements that are not installed, or older than they may be; a newer one may work."""
    missing = []
    for name, bounds in read_requirements().items():
        least = re.search(r">=\s*([\d.]+)", bounds)
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            missing.append(name)
            continue
        if least and release_of(version) < release_of(least[1]):
            missing.append(f"{name}{least[0]} (has {version})")
    return missing


def find_cpu_torch() -> str:
    """Among the indices and folders that the user's pip is set up for. Asks for their lists, downloads no package."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "index",
        "versions",
        "torch",
        "--disable-pip-version-check",
        "--retries",
        "1",
    ]
    listed = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL).stdout
    bounds = read_requirements()["torch"]
    least, limit = (release_of(re.search(rf"{sign}\s*([\d.]+)", bounds)[1]) for sign in (">=", "<"))
    builds = {version for version in re.findall(r"[\d.]+\+cpu\b", listed) if least <= release_of(version) < limit}
    return f"torch=={max(builds, key=release_of)}" if builds else ""


if __name__ == "__main__":
    if sys.argv[1] == "missing":
        missing = find_missing()
        print(", ".join(missing))
        sys.exit(bool(missing))
    print(find_cpu_torch())
