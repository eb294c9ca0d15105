"""megatron-lite explain."""

import time

import pytest

from megatron_lite.analysis.findings.rules import RULES
from megatron_lite.cli.main import main


def said(argv: list[str], capsys) -> str:
    assert main(["explain", *argv]) == 0
    return capsys.readouterr().out


def test_alone_it_lists_every_code_whose_page_it_shows(capsys):
    text = said([], capsys)
    assert all(f"  {code} " in text and rule.title in text for code, rule in RULES.items())
    rule = next(iter(RULES.values()))
    text = said([rule.code], capsys)
    assert text.startswith(f"{rule.code}: {rule.title}\n")
    assert rule.page.splitlines()[0] in text


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["ampere_sgemm_128x64_tn"], "What it is for: a matrix product (by cuBLAS)."),
        (
            ["void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int> >(int)"],
            "What it is for: arithmetic element",
        ),
        (["Memcpy", "HtoD", "(Pageable", "->", "Device)"], "What it is for: a transfer to or from the host"),
        (["what is this"], "What it is for: unknown"),
    ],
)
def test_a_kernel_is_taken_apart(argv, line, capsys):
    assert line in said(argv, capsys)


def test_mistakes_are_one_line(capsys):
    code, mistake = next(iter(RULES)), "error: megatron-lite explain"
    like_a_kernel = f"{mistake} matmul-shape: no such code; did you mean matmul-shapes?\n"
    for word, said in (
        (f"{code}x", f"{mistake} {code}x: no such code; did you mean {code}?\n"),
        ("matmul-shape", like_a_kernel),
        ("--all", f"{mistake}: unrecognized arguments: --all; --help shows its options\n"),
    ):
        assert main(["explain", word]) == 2
        assert capsys.readouterr() == ("", said)


def test_long_names_are_quick(capsys):
    started = time.process_time()
    said(["gemm_" * 50_000], capsys)
    assert time.process_time() - started < 20
