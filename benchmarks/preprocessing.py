"""Speed and memory of preprocessing, beside Megatron-LM's tools/preprocess_data.py with its Hugging Face tokenizer.

    python benchmarks/preprocessing.py                                   # a vocabulary of its own, Python's own sources
    python benchmarks/preprocessing.py --vocab-file V --merge-file M --text T --megatron CHECKOUT

Both read the same jsonl and write the same bytes (checked), in turn, each as a command of its own. Seconds are medians;
"ratio" leaves out what each takes for a file of one document, its start-up, which for Megatron's is mostly importing
torch. CPU seconds are those of all processes of a command: on a machine that does other things they say more.

Without --megatron its loop is rebuilt here from Megatron-core's own parts: multiprocessing.Pool over the lines, its
HuggingFaceTokenizer on a fast tokenizer, its IndexedDatasetBuilder. The table says which of the two it was.
"""

import argparse
import hashlib
import itertools
import json
import multiprocessing
import random
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.training.process import children_of, environment_of, peak_bytes_of
from megatron_lite.cli.corpus import library_sources
from megatron_lite.data.byte_pairs import train_bpe, write_bpe

REPO = Path(__file__).resolve().parent.parent
MB = 1_000_000
OWN_VOCABULARY = 16_000
LINES_AT_A_TIME = 32  # Megatron's


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--megabytes", type=float, default=100, help="of the input")
    add("--memory-megabytes", type=float, nargs="*", default=[50, 400], help="inputs whose peak memory is measured")
    add("--workers", type=int, nargs="+", default=[1, 2])
    add("--repeats", type=int, default=5, help="0: only the memory")
    add("--vocab-file"), add("--merge-file"), add("--text", help="more text, its paragraphs documents")
    add("--megatron", help="a checkout of Megatron-LM")
    add("--folder", help="where temporary files go")
    add("--stand-in", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stand_in:
        stand_in(*args.stand_in)
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        documents = list(library_sources(Path(sysconfig.get_paths()["stdlib"]), 30 * MB))
        if args.text:
            documents += Path(args.text).read_text(encoding="utf-8").split("\n\n")
        vocabulary = (args.vocab_file, args.merge_file)
        if not args.vocab_file:
            write_bpe(folder, *train_bpe(documents[:500], OWN_VOCABULARY))
            vocabulary = (str(folder / "vocab.json"), str(folder / "merges.txt"))
        import transformers

        hugging_face = str(folder / "hugging_face")
        transformers.GPT2TokenizerFast(*vocabulary).save_pretrained(hugging_face)
        if args.repeats:
            compare(args, folder, documents, vocabulary, hugging_face)
        for number_of_workers in args.workers if args.memory_megabytes else ():
            memory(args, folder, documents, vocabulary, number_of_workers)


def write_jsonl(path: Path, documents: list[str], megabytes: float) -> None:
    """Lines of one to eight documents each, drawn at random."""
    rng, written = random.Random(1), 0
    with open(path, "w", encoding="utf-8") as file:
        for number in itertools.count():
            text = "\n\n".join(rng.choices(documents, k=rng.choice((1, 2, 4, 8))))
            written += file.write(json.dumps({"id": number, "text": text}) + "\n")
            if written >= megabytes * MB:
                return


def compare(args, folder: Path, documents: list[str], vocabulary: tuple[str, str], hugging_face: str) -> None:
    whole, one = folder / "whole.jsonl", folder / "one.jsonl"
    write_jsonl(whole, documents, args.megabytes)
    write_jsonl(one, documents, 0)
    megabytes = whole.stat().st_size / MB
    theirs = "its tools/preprocess_data.py" if args.megatron else "a stand-in of Megatron-core's parts"
    print(f"input: {megabytes:.0f} MB; Megatron's: {theirs}; {args.repeats} runs each")
    print(
        f"{'workers':>7} {'ours s':>8} {'start':>6} {'MB/s':>6} {'Megatron s':>11} {'start':>6} {'MB/s':>6} {'ratio':>6} "
        f"{'ratio of CPU s':>15}  same bytes"
    )
    for workers in args.workers:
        start, total = [], []  # [run, command, wall or CPU]
        for path, repeats, into in ((one, 3, start), (whole, args.repeats, total)):
            ours = our_command(path, folder / "ours", vocabulary, workers)
            megatrons = megatrons_command(args.megatron, path, folder / "theirs", hugging_face, workers)
            into += [[seconds(ours), seconds(megatrons)] for _ in range(repeats)]
        start, total = np.median(start, axis=0), np.median(total, axis=0)
        net = total - start
        same = digest(folder / "ours") == digest(folder / "theirs")
        cells = [f"{total[c, 0]:{8 + 3 * c}.1f} {start[c, 0]:6.1f} {megabytes / net[c, 0]:6.1f}" for c in range(2)]
        wall, cpu = net[1] / net[0]
        print(f"{workers:>7} {cells[0]} {cells[1]} {wall:6.2f} {cpu:15.2f}  {same}", flush=True)


def our_command(path: Path, prefix: Path, vocabulary: tuple[str, str], workers: int) -> list[str]:
    files = ["--input", path, "--output-prefix", prefix, "--vocab-file", vocabulary[0], "--merge-file", vocabulary[1]]
    command = [
        sys.executable,
        "-m",
        "megatron_lite.cli.main",
        "preprocess",
        *files,
        "--append-eod",
        "--workers",
        workers,
    ]
    return list(map(str, command))


def megatrons_command(checkout: str | None, path: Path, prefix: Path, hugging_face: str, workers: int) -> list[str]:
    if not checkout:
        words = [sys.executable, __file__, "--stand-in", path, f"{prefix}_text_document", hugging_face, workers]
        return list(map(str, words))
    tokenizer = [
        "--tokenizer-type",
        "HuggingFaceTokenizer",
        "--tokenizer-model",
        hugging_face,
        "--tokenizer-hf-use-fast",
    ]
    words = [
        sys.executable,
        f"{checkout}/tools/preprocess_data.py",
        "--input",
        path,
        "--output-prefix",
        prefix,
        *tokenizer,
    ]
    return list(map(str, [*words, "--append-eod", "--workers", workers, "--log-interval", 1_000_000]))


def seconds(command: list[str]) -> tuple[float, float]:
    """Wall and CPU, the latter of all processes."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(
        command,
        check=True,
        cwd=REPO,
        env=environment_of("cpu", threads=1),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def digest(prefix: Path) -> list[str]:
    return [hashlib.sha256(Path(f"{prefix}_text_document{end}").read_bytes()).hexdigest() for end in (".bin", ".idx")]


def memory(args, folder: Path, documents: list[str], vocabulary: tuple[str, str], workers: int) -> None:
    """Ours: the most memory of each process, summed over the processes of the command."""
    for megabytes in args.memory_megabytes:
        path = folder / "memory.jsonl"
        write_jsonl(path, documents, megabytes)
        command = our_command(path, folder / "ours", vocabulary, workers)
        process = subprocess.Popen(command, cwd=REPO, env=environment_of("cpu", threads=1), stdout=subprocess.DEVNULL)
        peaks: dict[int, int] = {}
        while process.poll() is None:
            for pid in family(process.pid):
                peaks[pid] = peak_bytes_of(pid) or peaks.get(pid, 0)  # the last: before exec it is that of the parent
            time.sleep(0.02)
        print(
            f"{workers} workers, {path.stat().st_size / MB:4.0f} MB: peak memory {sum(peaks.values()) / MB:.0f} MB in "
            f"{len(peaks)} processes",
            flush=True,
        )


def family(pid: int) -> list[int]:
    return [pid, *(member for child in children_of(pid) for member in family(child))]


class LineEncoder:
    """What a worker of the stand-in does. The tokenizer belongs to the class, so that it is made in the worker."""

    tokenizer = None

    def __init__(self, folder: str):
        self.folder = folder

    def open(self) -> None:
        from megatron.core.tokenizers import MegatronTokenizer

        LineEncoder.tokenizer = MegatronTokenizer.from_pretrained(
            self.folder, {"library": "huggingface"}, use_fast=True
        )

    def ids(self, line: str) -> list[int]:
        found = LineEncoder.tokenizer.tokenize(json.loads(line)["text"])
        return [*found, LineEncoder.tokenizer.eod] if found else found


def stand_in(path: str, prefix: str, folder: str, workers: str) -> None:
    """Megatron's loop: lines go to a pool in portions of 32, lists of ids come back and are written one by one."""
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    encoder = LineEncoder(folder)
    encoder.open()
    dtype = DType.optimal_dtype(LineEncoder.tokenizer.vocab_size)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    with open(path, encoding="utf-8") as lines, multiprocessing.Pool(int(workers), initializer=encoder.open) as pool:
        for ids in pool.imap(encoder.ids, lines, LINES_AT_A_TIME):
            builder.add_document(ids, [len(ids)])
    builder.finalize(f"{prefix}.idx")


if __name__ == "__main__":
    main()
