"""``convexformer demo``: certified fits beside Adam."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .inputs import check_folder, named_path, seed
from .output import as_json
from .processes import check_one_process


def add_command(commands: Any, common: argparse.ArgumentParser) -> None:
    """Describe the command and its options."""
    demo = commands.add_parser(
        "demo",
        parents=[common],
        help="certified fits on digits beside Adam (half a minute, no download)",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    demo.add_argument(
        "--out", type=named_path, default=Path("convexformer-demo"), help="folder for the figures and demo.json"
    )
    demo.add_argument("--seed", type=seed, default=0, help="seed of the split and of the gates")
    demo.set_defaults(run=_run_demo)


def _run_demo(options: argparse.Namespace) -> dict[str, Any]:
    check_one_process("demo")
    from convexformer.experiments.demonstration import (
        ADAM_LEARNING_RATE,
        ADAM_STEPS,
        format_table,
        rows_as_json,
        run_demo,
    )

    check_folder(options.out)
    rows = run_demo(options.out, seed=options.seed, quiet=options.quiet or options.json)
    figures = [str(options.out / name) for name in ("token_map.png", "convergence.png")]
    report: dict[str, Any] = {"rows": rows_as_json(rows), "figures": figures}
    (options.out / "demo.json").write_text(as_json(report) + "\n")
    remark = (
        "relative gap = (objective - dual bound) / objective of the best constant model; the dual bound is certified: "
        "no network of the class, however trained, gets below it. heads = those of the certified solution; the same "
        f"number (and their gates) were given to Adam, with {ADAM_STEPS} full-batch steps and one learning rate "
        f"throughout, {ADAM_LEARNING_RATE} falling to zero along a cosine. Scores: accuracy, or R2 for the regression."
    )
    report["text"] = "\n".join([format_table(rows), "", remark, "figures: " + ", ".join(figures)])
    return report
