"""Draws what `megatron-lite replay` found."""

from collections.abc import Iterator

from megatron_lite.formats.replay_report import ReplayDocument, ReplayFigures, ReplayReport, ReplaySequence
from megatron_lite.report.section import Block, Lines, Section, Table, section_lines
from megatron_lite.report.text import Style, wrapped
from megatron_lite.units import duration, significant

MAX_DOCUMENTS = 2  # of a sequence
MAX_ORDINARY = 1  # sequences whose text is shown where none stands out


def replay_lines(report: ReplayReport, style: Style) -> list[str]:
    """Draw the whole answer: the cause first, then what it rests on.

    Args:
        report: What was found.
        style: How the terminal may be written to.
    """
    lines = wrapped(style.bold(judge_replay(report)), "")
    for section in list_replay_sections(report):
        lines += ["", *section_lines(section, style)]
    return lines


def judge_replay(report: ReplayReport) -> str:
    """Say in a sentence what the step went wrong by."""
    return f"{report.cause.value.upper()} (confidence {report.confidence}): step {report.step}: {report.sentence}"


def list_replay_sections(report: ReplayReport) -> Iterator[Section]:
    """List the sections below the cause: figures of each way, evidence, places, sequences, what to do."""
    rows = [_write_figures(row) for row in report.figures]
    table = Table(rows, "lrrl", ("", "loss", "gradient norm", ""))
    yield Section("figures", "The step, run again", f"from {report.started_from}", [table])
    if report.evidence:
        yield Section("evidence", "What speaks for it", "", [Lines(report.evidence)])
    if report.alternatives:
        yield Section("alternatives", "What is not excluded", "", [Lines(report.alternatives)])
    if report.sequences:
        yield _build_sequences(report)
    if report.remedies:
        yield Section("remedies", "What to do", "", [Lines(report.remedies)])
    if report.not_tested:
        yield Section("left", "What was not found out", "", [Lines(report.not_tested)])
    notes = list(report.notes)
    if report.seconds:
        notes.append(f"took {duration(report.seconds)}")
    if notes:
        yield Section("notes", "What ran", "", [Lines(notes, quiet=True)])


def _write_figures(row: ReplayFigures) -> tuple[str, ...]:
    answer = "goes wrong" if row.failure else "passes"
    return row.name, _write_number(row.loss), _write_number(row.grad_norm), answer


def _write_number(value: float | None) -> str:
    if value is None:
        return "not finite"
    return significant(value, 6)


def _build_sequences(report: ReplayReport) -> Section:
    """Build the table of sequences, and the documents in them."""
    rows = [_write_sequence(one) for one in report.sequences]
    head = ("sample", "data rank", "micro-batch", "row", "loss", "gradient", "one token")
    has_suspects = any(one.is_suspect for one in report.sequences)
    subtitle = "those that stand out" if has_suspects else "none stands out; those with the largest losses"
    blocks: list[Block] = [Table(rows, "lrrrrrr", head)]
    texts = []
    shown = report.sequences
    if not has_suspects:
        shown = shown[:MAX_ORDINARY]
    for one in shown:
        for document in one.documents[:MAX_DOCUMENTS]:
            texts.append(_write_document(one, document))
    blocks.append(Lines(texts))
    return Section("sequences", f"Sequences of {report.batch}", subtitle, blocks)


def _write_document(sequence: ReplaySequence, document: ReplayDocument) -> str:
    """Write where a piece of a document is from, its loss, and its beginning."""
    parts = []
    if sequence.sample is not None:
        parts.append(f"sample {sequence.sample}")
    if document.where:
        parts.append(document.where)
    if document.loss is not None:
        loss = significant(document.loss, 3)
        parts.append(f"loss {loss}")
    where = ", ".join(parts)
    # repr: a text may hold control characters, which a terminal would obey
    return f"{where}: {document.text!r}"


def _write_sequence(one: ReplaySequence) -> tuple[str, ...]:
    sample = ""
    if one.sample is not None:
        sample = str(one.sample)
    gradient = ""
    if one.gradient is not None:
        times = significant(one.gradient, 3)
        gradient = f"{times} x"
    return (
        sample,
        str(one.data_rank),
        str(one.micro_batch),
        str(one.row),
        _write_number(one.loss),
        gradient,
        f"{one.top_share:.0%}",
    )
