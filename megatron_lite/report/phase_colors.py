"""Colors of phases, by their meaning, since programs spell names in many ways. A plan's page uses palette.py without
numpy, so this is apart."""

from collections.abc import Iterable
from zlib import crc32

from megatron_lite.analysis.time.time_results import NO_PHASE, ROW_TITLES
from megatron_lite.phase_names import find_meaning
from megatron_lite.report.palette import GREY, OTHER_PHASES, PHASES, ROWS

# what a timeline shows beside phases has the color of the step's row
BESIDE_PHASES = {
    NO_PHASE: GREY,
    "communication": ROWS["exposed_communication"],
    "copies": ROWS["exposed_copy"],
    **{title: ROWS[row] for row, title in ROW_TITLES.items() if row in ROWS},
}


def color_phases(names: Iterable[str]) -> dict[str, str]:
    """Choose a color for each phase: by its meaning, else by its name, whichever other phases there are.

    Of names that nobody knows two have the same color only where there are more names than colors.
    """
    found: dict[str, str] = {}
    unknown = []
    for name in sorted(set(names)):
        color = BESIDE_PHASES.get(name) or PHASES.get(find_meaning(name) or name)
        if color:
            found[name] = color
        else:
            unknown.append(name)
    taken = set(found.values())
    for name in unknown:
        start = crc32(name.encode(errors="replace")) % len(OTHER_PHASES)
        hues = OTHER_PHASES[start:] + OTHER_PHASES[:start]
        free = [hue for hue in hues if hue not in taken]
        found[name] = free[0] if free else hues[0]
        taken.add(found[name])
    return found
