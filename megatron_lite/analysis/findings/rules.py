"""All rules, and what they find."""

import math
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from megatron_lite.analysis.findings import (
    communication_rules,
    debug_rules,
    expert_rules,
    exposed_rules,
    hardware_rules,
    host_cause_rules,
    host_rules,
    imbalance_rules,
    input_rules,
    kernel_rules,
    machine_rules,
    memory_rules,
    needless_rules,
    pipeline_rules,
    product_rules,
    reserved_rules,
    step_length_rules,
    update_rules,
)
from megatron_lite.analysis.findings.base import CheckResult, Evidence, Finding, Observation, Rule, could_not_look, saw
from megatron_lite.analysis.findings.order import order_findings
from megatron_lite.analysis.findings.settings import WITHOUT
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.analysis.torch_words import in_torch_words, list_torch_words, names_flag

MODULES = (
    host_rules,
    host_cause_rules,
    input_rules,
    product_rules,
    kernel_rules,
    needless_rules,
    update_rules,
    communication_rules,
    imbalance_rules,
    expert_rules,
    exposed_rules,
    pipeline_rules,
    hardware_rules,
    machine_rules,
    step_length_rules,
    debug_rules,
    memory_rules,
    reserved_rules,
)
RULES = {one.code: one for module in MODULES for one in vars(module).values() if isinstance(one, Rule)}
PAGE_WIDTH = 100
MIN_COST_MS = 0.005  # per step; less is printed as 0.00 ms
OF_RECORDING = ("--pytorch-profiler-", "--profile-ranks", "--record-")  # flags that change no run, but show more of it
REPORT_BUG = "please report this: it is a bug in megatron_lite"
REFUSED_WITH_MODEL = ("--torch-compile", "--recompute-")  # beside --model, a model of the user's own


@dataclass(frozen=True)
class Judgement:
    """All rules' answers to a run."""

    findings: tuple[Finding, ...]  # most costly first
    looks: Mapping[str, Observation]  # by code: what each rule saw that found nothing, or why it could not look


def apply_rules(facts: Facts, gap: Callable[[str], object] | None = None) -> tuple[Finding, ...]:
    """Ask all rules and return their findings, most costly first; see judge."""
    return judge(facts, gap).findings


def judge(facts: Facts, gap: Callable[[str], object] | None = None) -> Judgement:
    """Ask all rules.

    Findings stand most costly first: by milliseconds per step, then by bytes, then what has neither; before them what
    makes the run itself fail. What is paid once counts as if the steps of the trace shared it.

    Args:
        facts: the run.
        gap: is told of a rule that failed, in one line; the others still answer.
    """
    findings = []
    looks: dict[str, Observation] = {}
    for code, rule in RULES.items():
        try:
            answer = rule.examine(facts)
        except Exception as error:  # noqa: BLE001  one rule that a foreign file confuses must not silence the others
            why = f"failed ({type(error).__name__}: {error})"
            looks[code] = could_not_look(Evidence(why), record=REPORT_BUG)
            if gap is not None:
                gap(f"rule {code}: {why}; its cause may be present but is not reported.")
            continue
        if isinstance(answer, Observation):
            looks[code] = answer
        elif not math.isfinite(answer.cost_ms or 0.0) or _rounds_to_nothing(answer):
            looks[code] = saw(*answer.evidence)
        else:
            looks[code] = Observation(CheckResult.FAILED, answer.evidence, answer.advice, code)
            findings.append(_adapt_words(answer, facts))
    return Judgement(order_findings(findings, facts), looks)


def _adapt_words(found: Finding, facts: Facts) -> Finding:
    """Word a finding without the flags that the job does not take."""
    own_model = facts.run is not None and facts.run.record.model is not None
    is_refused = own_model and any(flag.startswith(REFUSED_WITH_MODEL) for flag in found.flags)
    if facts.is_foreign or is_refused:
        return _say_without_flags(found, facts.is_watched)
    return found


def _rounds_to_nothing(one: Finding) -> bool:
    """Whether its cost is a time that a report would print as 0.

    A finding whose cost is not known, or is of bytes, stays.
    """
    return one.cost_ms is not None and one.cost_ms < MIN_COST_MS and not one.cost_bytes


def _say_without_flags(found: Finding, watched: bool) -> Finding:
    """Word a finding in PyTorch's terms, for a script or a model that does not take these flags.

    Where a flag has none, the finding says what the rule's page says to do. Settings of the environment stay among the
    flags.
    """
    advice = in_torch_words(found.advice, watched)
    of_trainer = [flag for flag in found.flags if flag.startswith(("--", f"{WITHOUT}--"))]
    others = {flag: in_torch_words(flag, watched) for flag in of_trainer if flag not in found.advice}
    # "torch.compile(model)" adds nothing to an advice that names torch.compile
    more = {flag: words for flag, words in others.items() if words and words.partition("(")[0] not in advice}
    shown = [words for flag, words in more.items() if flag.startswith(OF_RECORDING)]
    changed = [words for flag, words in more.items() if not flag.startswith(OF_RECORDING)]
    advice += f": {', '.join(changed)}" if changed else ""
    advice += f"; {', '.join(shown)} shows more" if shown else ""
    if names_flag(advice):
        to_do = RULES[found.code].page.partition("\nDo: ")[2].partition("\nFlags:")[0]
        advice = in_torch_words(" ".join(to_do.split()).rstrip("."), watched)
    return replace(
        found,
        advice=advice,
        flags=tuple(flag for flag in found.flags if flag not in of_trainer),
        evidence=tuple(replace(one, text=in_torch_words(one.text, watched)) for one in found.evidence),
    )


@dataclass(frozen=True)
class RulePage:
    """The page of a rule, whatever it found in this run."""

    subjects: tuple[str, ...]  # keys of the sections that show what it looks at
    text: str  # what `megatron-lite explain` prints of it


def get_page(code: str) -> str | None:
    """Build the text that `explain CODE` prints; None for no rule's code."""
    if code not in RULES:
        return None
    first, parts = RULES[code].page.split("\n\n", 1)
    lines = [first, ""]
    for part in parts.replace("\n    ", " ").split("\n"):
        named = part.replace("Flags:", "Flags of this trainer:", 1) if part.startswith("Flags: ") else part
        pairs = list_torch_words(part) if part.startswith("Flags: ") else []
        own = f"In a script of your own: {'; '.join(f'{flag} is {words}' for flag, words in pairs)}."
        for text in (named, own) if pairs else (named,):
            lines += textwrap.wrap(text, PAGE_WIDTH, subsequent_indent="    ", break_on_hyphens=False)
    return "\n".join(lines)


def find_page(code: str) -> RulePage | None:
    """Find the page of a rule, for a report on what it found; None for no rule's code."""
    text = get_page(code)
    return None if text is None else RulePage(RULES[code].subjects, text)
