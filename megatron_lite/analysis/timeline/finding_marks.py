"""Marks of a report's findings: where their evidence stands, and what to change."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_lite.analysis.findings.base import Finding
from megatron_lite.analysis.rank_facts import EventPlace
from megatron_lite.analysis.report import Report
from megatron_lite.analysis.timeline.rank_tracks import Order, RankTracks
from megatron_lite.analysis.timeline.timeline_results import Slices, TimelineProcess
from megatron_lite.analysis.timeline.tracks import SingleSlice, TrackMaker, lay_stretches

FINDING = "finding"  # category of its slices
EVIDENCE = "evidence"  # category of its instants
MAX_EVIDENCE_CARRIED = 4  # pieces of one finding that its slice carries


@dataclass(frozen=True)
class FindingMarks:
    """Makes what the report's findings put on the tracks."""

    report: Report
    ranks: Sequence[RankTracks]
    run: TimelineProcess
    maker: TrackMaker

    def list_contents(self) -> Iterator[Slices]:
        """Make slices over the steady steps of the ranks concerned, and instants where evidence stands."""
        verdict = self.report.verdict
        start_ns, end_ns = self._find_whole_window()
        arguments: dict[str, str | int] = {
            "verdict": verdict.headline,
            "confidence": verdict.confidence,
            "why": verdict.why,
        }
        stretches = [SingleSlice(start_ns, end_ns, verdict.headline, arguments)]
        for finding in self.report.findings:
            if self._find_rank(finding) is None:
                stretch = self._mark(finding, start_ns, end_ns)
                stretches.append(stretch)
        track = self.maker.make_track(self.run, "verdict and findings", Order.FINDINGS)
        yield lay_stretches(track, stretches, FINDING)
        for rank in self.ranks:
            yield from self._mark_rank(rank)

    def _find_rank(self, finding: Finding) -> RankTracks | None:
        """Find the rank on which a finding stands: the one that it names, else that of its first piece of evidence."""
        if finding.rank is not None:
            named = [rank for rank in self.ranks if rank.one.time.rank == finding.rank]
            return named[0] if named else None
        for evidence in finding.evidence:
            place = evidence.where
            source = place.source if isinstance(place, EventPlace) else ""
            shown = [rank for rank in self.ranks if rank.one.trace.source == source]
            if shown:
                return shown[0]
        return None

    def _find_whole_window(self) -> tuple[int, int]:
        """Find when the first rank begins its steady steps, and when the last one ends them."""
        windows = [find_steady_time(rank) for rank in self.ranks]
        return min(start for start, _ in windows), max(end for _, end in windows)

    def _mark(
        self,
        finding: Finding,
        start_ns: int,
        end_ns: int,
    ) -> SingleSlice:
        """Make the slice of a finding."""
        return SingleSlice(
            start_ns,
            end_ns,
            name_finding(finding),
            self._list_arguments(finding),
        )

    def _list_arguments(self, finding: Finding) -> dict[str, str | int]:
        """List what is known of a finding."""
        arguments: dict[str, str | int] = {
            "code": finding.code,
            "verdict": self.report.verdict.headline,
            "confidence": "certain" if finding.certain else "likely",
            "remedy": finding.advice,
        }
        if finding.flags:
            arguments["flags"] = ", ".join(finding.flags)
        if finding.cost_ms is not None:
            cost_us = round(finding.cost_ms * 1e3)
            arguments["cost_us_per_step"] = max(cost_us, 0)
        if finding.gain_ms is not None:
            gain_us = round(finding.gain_ms * 1e3)
            name = "gain_at_most_us_per_step" if finding.gain_is_bound else "gain_us_per_step"
            arguments[name] = max(gain_us, 0)
        if finding.cost_bytes is not None:
            arguments["cost_bytes"] = max(finding.cost_bytes, 0)
        for number, evidence in enumerate(finding.evidence[:MAX_EVIDENCE_CARRIED], 1):
            place = f" ({evidence.where})" if evidence.where else ""
            arguments[f"evidence {number}"] = evidence.text + place
        return arguments

    def _mark_rank(self, rank: RankTracks) -> Iterator[Slices]:
        """Mark the findings of one rank."""
        start_ns, end_ns = find_steady_time(rank)
        stretches = []
        for finding in self.report.findings:
            if self._find_rank(finding) is rank:
                stretch = self._mark(finding, start_ns, end_ns)
                stretches.append(stretch)
        if stretches:
            track = self.maker.make_track(rank.process, "findings", Order.FINDINGS)
            yield lay_stretches(track, stretches, FINDING)
        trace = rank.one.trace
        for finding in self.report.findings:
            for evidence in finding.evidence:
                place = evidence.where
                if not isinstance(place, EventPlace) or place.row is None:
                    continue
                if place.source != trace.source:
                    continue
                moment_ns = int(trace.events.start_ns[place.row]) + rank.clock_ns
                arguments: dict[str, str | int] = {
                    "evidence": evidence.text,
                    "remedy": finding.advice,
                }
                mark = SingleSlice(moment_ns, moment_ns, name_finding(finding), arguments)
                track = rank.find_track(place.row)
                yield lay_stretches(track, [mark], EVIDENCE)


def name_finding(finding: Finding) -> str:
    """Name a finding: "[loader-slow] the data loader is too slow"."""
    return f"[{finding.code}] {finding.title}"


def find_steady_time(rank: RankTracks) -> tuple[int, int]:
    """Find when the steady steps of a rank begin and end, ns on the clock of all ranks; all it has without any."""
    all_steps = rank.one.placing.steps
    steps = [step for step in all_steps if step.steady] or list(all_steps)
    start_ns = 0
    end_ns = int(rank.one.trace.events.end_ns.max(initial=0))
    if steps:
        start_ns = steps[0].start_ns
        end_ns = steps[-1].end_ns
    return start_ns + rank.clock_ns, end_ns + rank.clock_ns
