"""The command's own flags."""

import argparse
from pathlib import Path

from gpu_checks.parts import PARTS

MIN_MINUTES = 1


def read(argv: list[str], description: str) -> argparse.Namespace:
    """Ends the process with code 2 and one line for a mistake."""
    parser = argparse.ArgumentParser(
        prog="python tests/gpu", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--minutes", type=float, default=9, help="for all of it [%(default)s]")
    add(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="gets results.json, speed.json, log.txt and a trace, compressed: at "
        "most 8 files of 16 MiB; made if it is not there",
    )
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal at tiny sizes [%(default)s]")
    add(
        "--parts",
        nargs="+",
        metavar="PART",
        default=[part.name for part in PARTS],
        help="only these: " + "; ".join(f"{part.name} ({part.what})" for part in PARTS),
    )
    args = parser.parse_args(argv)
    if args.minutes < MIN_MINUTES:
        parser.error(f"--minutes {args.minutes:g}: must be at least {MIN_MINUTES}")
    known = [part.name for part in PARTS]
    if unknown := [name for name in args.parts if name not in known]:
        parser.error(f"--parts {unknown[0]}: no such part; there are {', '.join(known)}")
    if args.out is not None and args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        parser.error(f"--out {args.out}: is there already and not an empty folder; name another")
    return args
