"""How subcommands show builds and plans."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eagle3compat.plan import DISABLE_VARIABLE

if TYPE_CHECKING:
    from rich.table import Table

    from eagle3compat.installed import Build
    from eagle3compat.plan import Plan


def build_line(build: Build) -> str:
    """A build with the folder that it is loaded from."""
    return f"{build.title}, {build.kind} in {build.package_dir}"


def shim_lines(plan: Plan) -> list[str]:
    """Which shims the plan makes live, and which the user turned off."""
    live = ", ".join(decision.shim.id for decision in plan.needed) or "none"
    lines = [f"shims live   {live}"]
    if plan.off:
        off = ", ".join(decision.shim.id for decision in plan.off)
        lines.append(f"shims off    {off} (turned off by the user: {DISABLE_VARIABLE})")
    return lines


def plan_table(plan: Plan) -> Table:
    """Every decision of the plan with its reason, for a terminal."""
    from rich.table import Table

    table = Table(title=f"{plan.consumer.title} on {plan.provider.title}", title_justify="left")
    for column in ("shim", "decision", "reason"):
        table.add_column(column)
    for decision in plan.decisions:
        remarks = (decision.finding.reason, decision.finding.conditional, decision.disagreement)
        table.add_row(
            decision.shim.id,
            decision.status.value,
            "; ".join(remark for remark in remarks if remark),
        )
    return table
