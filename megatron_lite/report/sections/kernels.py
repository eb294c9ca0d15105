"""What runs: kernels by role, the largest ones, operators."""

from megatron_lite.analysis.facts import RankFacts
from megatron_lite.analysis.kernels.figures import OperatorRow, RankKernels
from megatron_lite.analysis.report import Report
from megatron_lite.report.colors import GREY, ROLE_COLORS
from megatron_lite.report.numbers import calls, milliseconds, percent, share
from megatron_lite.report.section import Section, Table, first, with_some_value
from megatron_lite.report.sections.step import whose

ROLES_SHOWN, KERNELS_SHOWN, OPERATORS_SHOWN = 3, 3, 3


def kernels_section(report: Report, everything: bool) -> Section | None:
    """Time by role, then the largest kernels."""
    rank = report.facts.critical
    if rank is None or not rank.time.on_gpu or not rank.kernels.device_ms:
        return None
    of = f"{whose(rank.time.rank)}{milliseconds(rank.kernels.device_ms)} ms per step, parallel streams added up"
    roles = _roles(rank.kernels, rank.kernels.device_ms, everything)
    return Section("kernels", "Kernels", of, [roles, _largest(rank.kernels, everything)])


def _roles(kernels: RankKernels, total: float, everything: bool) -> Table:
    """Time by role, as a share of `total` ms."""
    roles = sorted(((role, ms) for role, ms in kernels.roles.items() if ms > 0), key=lambda pair: -pair[1])
    shown, hidden = first(roles, ROLES_SHOWN, everything)
    pairs = [(str(role), ms) for role, ms in shown]
    if hidden:
        pairs.append((f"{hidden} other roles", sum(ms for _, ms in roles[len(shown) :])))
    return Table(
        [(name, milliseconds(ms, total), percent(share(ms, total))) for name, ms in pairs],
        "lrr",
        shares=[share(ms, total) for _, ms in pairs],
        colors=[*(ROLE_COLORS[role] for role, _ in shown), GREY],
    )


def _largest(kernels: RankKernels, everything: bool) -> Table:
    shown, hidden = first(kernels.rows, KERNELS_SHOWN, everything)
    rows = [
        [
            row.short or row.name,
            row.phase,
            calls(row.per_step),
            milliseconds(row.ms, kernels.device_ms),
            percent(row.share),
            row.precision,
            row.tensor_cores.value,
        ]
        for row in shown
    ]
    return with_some_value(
        Table(rows, "llrrrll", ["kernel", "phase", "calls", "ms", "share", "type", "tensor cores"], hidden=hidden)
    )


def operators_section(report: Report, everything: bool) -> Section | None:
    """Host operators by their own time: what counts where there is no GPU; beside a GPU only where all is wanted."""
    rank = report.facts.critical
    if rank is None or not rank.kernels.operators or (rank.time.on_gpu and not everything):
        return None
    shown, hidden = first(rank.kernels.operators, OPERATORS_SHOWN, everything)
    largest = max(row.self_ms for row in shown)
    last = "on device" if rank.time.on_gpu else "of step"
    rows = [
        [
            row.name,
            str(row.role),
            row.phase,
            calls(row.per_step),
            milliseconds(row.self_ms, largest),
            _last(row, rank, largest),
        ]
        for row in shown
    ]
    of = f"{whose(rank.time.rank)}ms per step on the host, without what they call"
    table = with_some_value(
        Table(rows, "lllrrr", ["operator", "role", "phase", "calls", "own time", last], hidden=hidden)
    )
    roles = [] if rank.time.on_gpu else [_roles(rank.kernels, sum(rank.kernels.roles.values()), everything)]
    return Section("operators", "Operators", of, [*roles, table])


def _last(row: OperatorRow, rank: RankFacts, largest: float) -> str:
    return milliseconds(row.device_ms, largest) if rank.time.on_gpu else percent(share(row.self_ms, rank.time.step_ms))
