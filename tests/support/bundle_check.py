"""Bundles of a run, made in a folder and looked through."""

import bz2
import gzip
import json
import zipfile
from contextlib import suppress
from pathlib import Path

from megatron_lite.analysis.analyze import analyze
from megatron_lite.cli.bundle import Bundle, find_differences
from megatron_lite.report.json_file import as_json


def make_bundle(paths: list[Path], folder: Path) -> tuple[Path, list[str]]:
    """A bundle's folder, and the lines of what was taken out. Fails where a report on it differs."""
    folder.mkdir()
    report = analyze(paths)
    bundle = Bundle(paths, report, folder)
    lines = bundle.add_report()
    again = analyze([bundle.folder])
    assert list(find_differences(report, again)) == []
    assert as_json(report)["verdict"]["word"] == as_json(again)["verdict"]["word"]
    return bundle.folder, lines


def read_everything(folder: Path) -> str:
    """All texts of the files, those of packed ones and of strings in JSON, too."""
    texts = []
    for path in sorted(folder.rglob("*")):
        content = path.read_bytes()
        texts.append(path.name)
        texts.append(content.decode("latin-1"))
        for unpack in (gzip.decompress, bz2.decompress):
            with suppress(OSError, EOFError):
                texts.append(unpack(content).decode("latin-1"))
        with suppress(ValueError, UnicodeDecodeError):
            texts.append(json.dumps(json.loads(content), ensure_ascii=False))
    return "\n".join(texts)


def find_secrets(folder: Path, secrets: list[str]) -> list[str]:
    """Those that stand in any file, in whatever case."""
    text = read_everything(folder).lower()
    return [secret for secret in secrets if secret.lower() in text]


def unzip(path: Path, folder: Path) -> Path:
    """The folder that an archive holds."""
    with zipfile.ZipFile(path) as archive:
        archive.extractall(folder)
    return folder / "run"
