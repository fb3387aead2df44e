"""Tables and curves from the records of run.py."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TARGETS = (1e-4, 1e-6)


@dataclass(frozen=True)
class Problem:
    """One row of the table: a data set, alpha over alpha_max, and the design."""

    dataset: str
    ratio: float
    design: str


@dataclass
class Record:
    """One contender on one instance in one repeat.

    Attributes
    ----------
    status : str
        ``"done"``, ``"stopped"`` at the limit, ``"failed"`` or ``"skipped"``.
    points : list of (seconds, value, relative gap)
        Each a complete run from scratch, or certified progress within one run.
    memory : int
        Peak resident memory of its process in bytes.
    """

    problem: Problem
    seed: int
    repeat: int
    contender: str
    status: str = "done"
    reason: str = ""
    points: list[tuple[float, float, float]] = field(default_factory=list)
    memory: int = 0

    def seconds_to(self, target: float, limit: float) -> float:
        """Seconds to a certified gap, infinite when it was not reached within the limit."""
        return min((s for s, _, gap in self.points if gap <= target and s <= limit), default=math.inf)

    def best_gap(self, limit: float) -> float:
        """Smallest certified gap within the limit."""
        return min((gap for s, _, gap in self.points if s <= limit), default=math.inf)


@dataclass(frozen=True)
class Score:
    """Medians of one contender over seeds and repeats."""

    contender: str
    seconds: dict[float, float]
    gap: float
    memory: int
    note: str

    @classmethod
    def of(cls, records: list[Record], limit: float) -> Score:
        seconds = {target: statistics.median(r.seconds_to(target, limit) for r in records) for target in TARGETS}
        gap = statistics.median(r.best_gap(limit) for r in records)
        notes = sorted({r.reason for r in records if r.reason})
        return cls(records[0].contender, seconds, gap, max(r.memory for r in records), "; ".join(notes))

    def cell(self, target: float) -> str:
        """Seconds, or x with the gap at which the contender stopped."""
        if math.isfinite(self.seconds[target]):
            return f"{self.seconds[target]:.2g}"
        return f"x ({self.gap:.1e})" if math.isfinite(self.gap) else "x (-)"


def scores(records: Iterable[Record], limit: float) -> dict[Problem, list[Score]]:
    """Medians of every contender that took part, by problem."""
    groups: dict[Problem, dict[str, list[Record]]] = {}
    for record in records:
        if record.status != "skipped":
            groups.setdefault(record.problem, {}).setdefault(record.contender, []).append(record)
    return {problem: [Score.of(group, limit) for group in by.values()] for problem, by in groups.items()}


def best(peers: list[Score], target: float) -> Score | None:
    """The peer that reaches the target first; when none does, the one with the smallest gap."""
    return min(peers, key=lambda score: (score.seconds[target], score.gap), default=None)


def speedup(ours: Score | None, peer: Score | None, target: float, limit: float) -> str:
    """Seconds of the best peer over ours; a lower bound where only we reach the target."""
    if ours is None or peer is None or not math.isfinite(ours.seconds[target]):
        return "-"
    bound = "" if math.isfinite(peer.seconds[target]) else ">"
    return f"{bound}{min(peer.seconds[target], limit) / ours.seconds[target]:.2g}"


def summary(table: dict[Problem, list[Score]], ours: str, limit: float) -> str:
    """Markdown: ours against the best peer, seconds to each target and their ratio."""
    names = [f"{target:.0e}".replace("e-0", "e-") for target in TARGETS]
    header = [f"{ours} {name}" for name in names] + [f"best peer {name}" for name in names]
    rows = [["cell", "ratio", "design", *header, *(f"peer / {ours} {name}" for name in names)]]
    for problem, entries in table.items():
        mine = next((score for score in entries if score.contender == ours), None)
        peers = [score for score in entries if score.contender != ours]
        firsts = [best(peers, target) for target in TARGETS]
        rows.append(
            [
                problem.dataset,
                f"{problem.ratio:g}",
                problem.design,
                *(mine.cell(target) if mine else "-" for target in TARGETS),
                *(f"{p.contender} {p.cell(t)}" if p else "none" for p, t in zip(firsts, TARGETS, strict=True)),
                *(speedup(mine, p, t, limit) for p, t in zip(firsts, TARGETS, strict=True)),
            ]
        )
    return markdown(rows)


def details(table: dict[Problem, list[Score]]) -> str:
    """Markdown: every contender that took part."""
    rows = [["cell", "ratio", "design", "contender", *(f"to {target:.0e}" for target in TARGETS), "peak MB", "note"]]
    for problem, entries in table.items():
        for score in sorted(entries, key=lambda s: (s.seconds[TARGETS[-1]], s.seconds[TARGETS[0]], s.gap)):
            cells = [score.cell(target) for target in TARGETS]
            place = [problem.dataset, f"{problem.ratio:g}", problem.design]
            rows.append([*place, score.contender, *cells, f"{score.memory / 2**20:.0f}", score.note])
    return markdown(rows)


def skips(records: Iterable[Record]) -> str:
    """Who did not take part in what, and why; one line per contender and reason."""
    places: dict[tuple[str, str], list[str]] = {}
    for record in records:
        if record.status == "skipped":
            where = places.setdefault((record.contender, record.reason), [])
            where += [record.problem.dataset] * (record.problem.dataset not in where)
    return "\n".join(f"- {name} skips {', '.join(where)}: {reason}" for (name, reason), where in places.items())


def markdown(rows: list[list[str]]) -> str:
    """A table from a header and rows of strings."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def draw(records: list[Record], folder: Path) -> list[Path]:
    """Gap-against-seconds curves, one figure per data set and one panel per ratio and design."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    names = list(dict.fromkeys(record.contender for record in records))
    colors = {name: f"C{i % 10}" for i, name in enumerate(names)}
    paths = []
    for dataset in dict.fromkeys(record.problem.dataset for record in records):
        problems = list(dict.fromkeys(r.problem for r in records if r.problem.dataset == dataset and r.points))
        if not problems:
            continue
        figure, axes = plt.subplots(1, len(problems), figsize=(5 * len(problems), 4), squeeze=False, sharey=True)
        for axis, problem in zip(axes[0], problems, strict=True):
            for name in names:
                _draw_curve(axis, [r for r in records if r.problem == problem and r.contender == name], colors[name])
            axis.set(xscale="log", yscale="log", xlabel="seconds")
            axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.xaxis.set_minor_formatter(NullFormatter())
            axis.set_title(f"{dataset}, alpha / alpha_max = {problem.ratio:g}, {problem.design}")
            axis.grid(True, alpha=0.3)
        axes[0, 0].set_ylabel("certified relative gap")
        axes[0, 0].legend(fontsize=8)
        figure.tight_layout()
        paths.append(folder / f"{dataset}.png")
        figure.savefig(paths[-1], dpi=120)
        plt.close(figure)
    return paths


def _draw_curve(axis: Any, records: list[Record], color: str) -> None:
    """The middle one of the repeats by its last seconds: one true curve rather than a mixture of several."""
    measured = sorted((r for r in records if r.points), key=lambda r: r.points[-1][0])
    if not measured:
        return
    record = measured[len(measured) // 2]
    seconds, gaps, smallest = [], [], math.inf
    for second, _, gap in sorted(record.points):
        smallest = min(smallest, gap)
        seconds.append(second)
        gaps.append(max(smallest, 1e-12))
    axis.plot(seconds, gaps, marker=".", color=color, label=record.contender, drawstyle="steps-post")
