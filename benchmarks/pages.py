"""Pages of docs/benchmarks, made from the figures in benchmarks/data. Run: python benchmarks/pages.py."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmark_utils.report import Problem, Record, details, markdown, scores, summary
from side_by_side import megabytes, ratio, seconds

HERE = Path(__file__).parent
DATA, DOCS = HERE / "data", HERE.parent / "docs" / "benchmarks"
NOTE = "% Made by benchmarks/pages.py from benchmarks/data; changes belong there."


def load(name: str) -> dict[str, Any]:
    """What a benchmark has stored under a name."""
    return json.loads((DATA / f"{name}.json").read_text())


def measured(data: dict[str, Any]) -> str:
    """Where, when and how figures were measured."""
    packages = ", ".join(f"{name} {number}" for name, number in data["versions"].items())
    where = (
        f"Measured at commit {data['commit']} on {data['date']}: {data['processor']}, {data['threads']} thread(s), "
        f"Python {data['python']}, {packages}."
    )
    return "\n\n".join([where, *data.get("notes", []), *(f"`{command}`" for command in data["command"])])


def section(title: str, text: str, rows: list[list[str]], data: dict[str, Any]) -> str:
    """A page or a section of one: a table with what it says and where it was measured."""
    return "\n\n".join([title, text, markdown(rows), measured(data)])


def geometric(values: Iterable[float]) -> float:
    """Geometric mean."""
    return statistics.geometric_mean(list(values))


def number(value: float | None) -> str:
    """Two digits, or a dash."""
    return "-" if value is None or not math.isfinite(value) else f"{value:.2g}"


def place(problem: dict[str, Any]) -> tuple[str, str, str]:
    """Cell, ratio and design of a problem, without its seed."""
    return problem["cell"], f"{problem.get('ratio', '')}", problem["design"]


def groups(records: list[dict[str, Any]]) -> dict[tuple[str, str, str], list[dict[str, Any]]]:
    """Records of cells by what they have in common but for the seed."""
    found: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for record in records:
        if record["problem"]["family"] == "cells":
            found.setdefault(place(record["problem"]), []).append(record)
    return found


def side_by_side(name: str, processor: str) -> str:
    """Two commits, program by program."""
    data = load(name)
    records = data["records"]
    rows = [["cell", "ratio", "design", "old, s", "new, s", "new / old by seed", "MB new - old"]]
    for (cell, share, design), own in groups(records).items():
        old, new = (statistics.median(seconds(record[side], "1e-06") for record in own) for side in ("old", "new"))
        more = max(megabytes(record["new"]) - megabytes(record["old"]) for record in own)
        each = ", ".join(f"{ratio(record):.2f}" for record in own)
        rows.append([cell, share, design, number(old), number(new), each, f"{more:+.0f}"])
    families = [
        ["programs", "number", "old, s", "new, s", "median ratio", "above 1.15", "unsolved old", "unsolved new"]
    ]
    for family in dict.fromkeys(record["problem"]["family"] for record in records):
        own = [record for record in records if record["problem"]["family"] == family]
        totals = [sum(min(seconds(record[side], "1e-06"), 60.0) for record in own) for side in ("old", "new")]
        unsolved = [sum(math.isinf(seconds(record[side], "1e-06")) for record in own) for side in ("old", "new")]
        ratios = [ratio(record) for record in own]
        counts = [sum(value > 1.15 for value in ratios), *unsolved]
        middle = [*(f"{total:.1f}" for total in totals), f"{statistics.median(ratios):.2f}"]
        families.append([family, str(len(own)), *middle, *map(str, counts)])
    slow = sorted((record for record in records if ratio(record) > 1.15), key=ratio, reverse=True)
    worst = [["program", "old, s", "new, s", "ratio", "iterations old", "iterations new"]]
    for record in slow:
        name = " ".join(str(part) for part in record["problem"].values())
        times = [seconds(record[side], "1e-06") for side in ("old", "new")]
        iterations = [str(record[side][0]["n_iter"]) for side in ("old", "new")]
        worst.append([name, *(f"{value:.3f}" for value in times), f"{ratio(record):.2f}", *iterations])
    return "\n\n".join(
        [
            f"# This version beside {data['other']}, on {processor}",
            f"Seconds to a certified relative gap of 1e-6, medians of {data['repeats']} runs that take turns in one "
            "process each. Cells are those of `benchmarks/README.md`, over three seeds; the other families are the "
            "random programs of `benchmarks/benchmark_utils/sweep.py`. The last column of the first table is the "
            "largest difference of peak memory.",
            markdown(rows),
            markdown(families),
            "## Programs that take more than 1.15 times as long",
            markdown(worst) if slow else "None.",
            measured(data),
        ]
    )


def packages() -> str:
    """Single solves beside other packages."""
    parts = [
        "# Beside other packages",
        "Seconds of complete runs to certified relative gaps, medians; `x (g)` stopped at gap g. `ratio` is alpha over "
        "`alpha_max`. A peer is another package. A rung is the tolerance or the number of iterations of one run. "
        "`benchmarks/README.md` lists the problems (cells), the rules and what each package can express.",
    ]
    titles = {"amd": "Simulated cells", "intel": "Simulated cells", "sentences": "Activations of a text encoder"}
    for name, title in titles.items():
        data = load(f"packages_{name}")
        settings = data["settings"]
        records = [Record(**{**record, "problem": Problem(**record["problem"])}) for record in data["records"]]
        table = scores(records, settings["limit"])
        parts += [
            f"## {title}, {data['processor']}",
            f"{settings['repeats']} runs of each, limit {settings['limit']:g} s. Against the best of the others:",
            summary(table, "auto", settings["limit"]),
        ]
        parts += ["All contenders:", details(table), measured(data)]
    return "\n\n".join(parts)


def paths() -> str:
    """Paths beside other packages."""
    data = load("paths")
    names = list(dict.fromkeys(record["contender"] for record in data["records"]))
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for record in data["records"]:
        gap = "" if record["gap"] is None else f" ({record['gap']:.1e})"
        reached = "x" + gap if record["seconds"] is None else number(record["seconds"])
        cells.setdefault((record["cell"], record["design"]), {})[record["contender"]] = reached
    rows = [["cell", "design", *names]]
    rows += [[*where, *(found.get(name, "-") for name in names)] for where, found in cells.items()]
    return section(
        "# Paths",
        "Seconds of thirty values of `alpha` from `alpha_max` to a hundredth of it, until the largest certified "
        f"gap is at most 1e-4. `x (g)`: the smallest largest gap within {data['limit']:g} s of runs, unless a "
        "command below names another limit; `-`: the package has no such program.",
        rows,
        data,
    )


def _without(data: dict[str, Any]) -> Iterator[tuple[str, list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]]]:
    """Pieces, and for each the problems with what was found with all pieces and without it."""
    for piece in data["records"][0]["without"]:
        if piece != "none":
            yield (
                piece,
                [
                    (record["problem"], record["without"]["none"], record["without"][piece])
                    for record in data["records"]
                    if piece in record["without"]
                ],
            )


def leave_one_out(name: str, title: str, text: str) -> str:
    """What each piece brings."""
    data = load(name)
    rows = [["without", "cells: mean ratio", "cells: largest ratios", "sweep: ratio of sums", "iterations", "unsolved"]]
    whole = [record["without"]["none"] for record in data["records"]]
    for piece, found in _without(data):
        by_place: dict[str, list[float]] = {}
        sums, unsolved = [0.0, 0.0], 0
        for problem, base, other in found:
            before, after = base.get("1e-06"), other.get("1e-06")
            unsolved += before is not None and after is None
            if before is None or after is None:
                continue
            if problem["family"] == "cells":
                by_place.setdefault(" ".join(place(problem)), []).append(after / before)
            else:
                sums = [sums[0] + before, sums[1] + after]
        means = sorted(((geometric(values), where) for where, values in by_place.items()), reverse=True)
        worst = ", ".join(f"{where} {value:.2f}" for value, where in means[:3])
        overall = f"{geometric(value for value, _ in means):.2f}" if means else "-"
        iterations = sum(other["n_iter"] for _, base, other in found if other.get("1e-06") is not None)
        sweep = f"{sums[1] / sums[0]:.2f}" if sums[0] else "-"
        rows.append([piece, overall, worst, sweep, str(iterations), str(unsolved)])
    return section(
        title,
        f"{text}\n\nWith all pieces: {sum(found['n_iter'] for found in whole)} iterations. Ratios are of seconds to a "
        "certified relative gap of 1e-6, those of a cell geometric means over its seeds. A program counts as "
        "unsolved that all pieces together solve. The iterations are those of solved programs. A dash stands for "
        "what was not measured.",
        rows,
        data,
    )


def memory() -> str:
    """Peak memory."""
    data = load("memory")
    rows = [["cell", "ratio", "MB beyond the data", "limit", "gap", "seconds"]]
    for record in data["records"]:
        sizes = (f"{record[name] / 2**20:.0f}" for name in ("bytes", "limit"))
        rest = f"{record['gap']:.1e}", number(record["seconds"])
        rows.append([record["cell"], f"{record['ratio']:g}", *sizes, *rest])
    return section(
        "# Peak memory",
        "Peak memory of a solve to 1e-6 beyond its data. The limit is a quarter of the gated design, or half of "
        "the data where there are no gates.",
        rows,
        data,
    )


def probe_memory() -> str:
    """Memory of probes whose pooled tokens are large."""
    data = load("probe_memory")
    rows = [["samples", "pooled tokens, GB", "memory_limit, GB", "held, GB", "alpha / alpha_max", "gap", "seconds"]]
    for record in data["records"]:
        limit = "-" if record["limit"] is None else f"{record['limit'] / 1e9:.2g}"
        pooled, held = (f"{record[name] / 1e9:.3g}" for name in ("pooled_bytes", "bytes"))
        rest = f"{record['alpha_ratio']:.2f}", f"{record['gap']:.1e}", f"{record['seconds']:.0f}"
        rows.append([str(record["n_samples"]), pooled, limit, held, *rest])
    return section(
        "# Memory of probes",
        "`ConvexProbeClassifier` on samples of 64 tokens of width 384 in half precision, which a memory map reads "
        "from the disk, with 128 weightings, to a gap of 1e-3. Held is what the process holds beyond what it held "
        "before, pages of files left out. The seconds contain the pooling.",
        rows,
        data,
    )


def out_of_core() -> str:
    """Data on a disk, and many processes."""
    data = load("out_of_core")
    sections = [of_large, of_peers, of_wide, of_held, of_passes, of_ranks, of_scaling, of_one_process]
    return "\n\n".join(["# Data on a disk, and many processes", *(of_part(data) for of_part in sections)])


def of_large(data: dict[str, Any]) -> str:
    """Data larger than memory."""
    found = data["large"]["figures"]
    size = max(record["bytes"] / record["passes"] for record in found["large"])
    rows = [["task", "model", "seconds", "passes", "GB/s of reading", "memory, GB", "gap", "score", "tokens used"]]
    for ours, sgd in zip(found["large"], found["sgd"], strict=True):
        passes, rate, held = ours["passes"], ours["bytes"] / ours["seconds"] / 1e9, ours["held_bytes"] / 1e9
        figures = [f"{ours['seconds']:.0f}", f"{passes:.1f}", f"{rate:.2f}", f"{held:.2f}", f"{ours['gap']:.1e}"]
        rows.append([ours["task"], "ours", *figures, f"{ours['score']:.4f}", f"{ours['tokens']} of 16"])
        rows.append([sgd["task"], "SGD", f"{sgd['seconds']:.0f}", "1", *"---", f"{sgd['score']:.4f}", "16 of 16"])
    return section(
        "## Data larger than memory",
        f"{size / 1e9:.0f} GB of samples in float32, of 16 tokens of width 64, in {found['n_shards']} shards, of "
        "which four tokens count and half of the variance is noise. The machine has 24 GiB of memory and "
        f"`memory_limit` is {found['limit'] / 2**30:.0f} GiB. Fits at a tenth of `alpha_max` to a gap of 1e-4, "
        "beside one pass of `partial_fit` of `SGDRegressor` and `SGDClassifier` with their defaults, which have no "
        f"certificate. The disk reads {found['disk_rate'] / 1e9:.2f} GB/s in one file after the other. Seconds are "
        "those of the whole fit. Memory is what the process held beyond its start.",
        rows,
        data["large"],
    )


def of_peers(data: dict[str, Any]) -> str:
    """Other packages on the same data."""
    found, rows = data["peers"]["figures"], []
    for task in ("regression", "classification"):
        for name, runs in found[task].items():
            last = runs[-1]
            if "seconds" not in last:
                rows.append(
                    [task, name, last.get("skipped") or f"more than {last.get('stopped_after', 0):.0f}", *"----"]
                )
                continue
            held, mapped = (f"{last[key] / 1e9:.2f}" for key in ("held_bytes", "mapped_bytes"))
            rows.append(
                [task, name, f"{last['seconds']:.1f}", held, mapped, number(last.get("gap")), f"{last['score']:.4f}"]
            )
    return section(
        "### Other packages",
        f"{found['data_bytes'] / 1e9:.1f} GB of the same kind, read from the disk at the start of each fit, kept "
        "in the page cache by the system while there is room, without an intercept. `memory_limit` is a quarter of "
        "the data. adelie reads one file by columns and fits a path of seven alphas. dask-ml's ADMM reads the "
        "shards. It has no group norm, and is given one of a few lines; `l1` is its own norm, at a tenth of that "
        "norm's alpha_max. Each is run at tighter settings until its coefficients have a gap of 1e-4, and the last "
        "run counts.",
        [["task", "package", "seconds", "held, GB", "mapped files, GB", "gap", "score"], *rows],
        data["peers"],
    )


def of_wide(data: dict[str, Any]) -> str:
    """Features without room for Gram matrices."""
    found = data["wide"]["figures"]
    n_samples, n_tokens, width = found["shape"]
    rows = rows_beside_gradient_steps(found)
    gram = 8 * (n_tokens * width) ** 2 / 1e9
    return section(
        "### More features than there is room for",
        f"{n_samples:,} samples of {n_tokens} tokens of width {width} in float16, in a file in the page cache. "
        f"`memory_limit` is {found['limit'] / 1e6:.0f} MB, and a Gram matrix would take {gram:.1f} GB. Tokens depend "
        "on their neighbours and on a common part. Their variances fall as 1, 1/2, 1/3 and so on. Four tokens make "
        "the targets, half of whose variance is noise. `fista` takes gradient steps alone. Fits are to a gap of 1e-4, "
        "and are stopped at the first certificate after "
        f"{found['stopped_after']} s:",
        rows,
        data["wide"],
    )


def of_held(data: dict[str, Any]) -> str:
    """As many features of samples in memory."""
    found = data["held"]["figures"]
    n_samples, n_tokens, width = found["shape"]
    return section(
        "### More features and samples in memory than a Gram matrix is formed of",
        f"{n_samples:,} samples of {n_tokens} tokens of width {width}, made in the same way, in memory in float32. "
        "Gram matrices are not formed where features and samples are more than 12,000. `fista` ends where float32 has "
        "no digits left for its steps, which is why its last gap is above 1e-4:",
        rows_beside_gradient_steps(found),
        data["held"],
    )


def rows_beside_gradient_steps(found: dict[str, Any]) -> list[list[str]]:
    """Table of fits by the default solver and by gradient steps, with passes where data are read."""
    reads = any(fit["passes"] for fit in found["fits"])
    rows = [["task", "alpha", "solver", "seconds", *(["passes"] if reads else []), "iterations", "gap", "tokens used"]]
    for fit in found["fits"]:
        amounts = [f"{fit['seconds']:.1f}", *([f"{fit['passes']:.0f}"] if reads else []), str(fit["n_iter"])]
        tokens = f"{fit['tokens']} of {found['shape'][1]}"
        solver = f"`{fit['solver']}`"
        rows.append([fit["task"], f"{fit['ratio']} alpha_max", solver, *amounts, f"{fit['gap']:.1e}", tokens])
    return rows


def of_passes(data: dict[str, Any]) -> str:
    """A product in memory and in the page cache."""
    rows = [["product, precision", "memory, ms", "page cache, ms", "ratio"]]
    for name, found in data["pass"]["figures"].items():
        held, disk = found["memory"], found["disk"]
        rows.append([name, f"{1e3 * held:.0f}", f"{1e3 * disk:.0f}", f"{disk / held:.2f}"])
    return section(
        "## One product",
        "A product with 2 GB of samples in float32 that are in memory, or in a file in the page cache, on one "
        "thread beside the thread that reads. Medians of products in turn:",
        rows,
        data["pass"],
    )


def of_ranks(data: dict[str, Any]) -> str:
    """Cell G on two processes."""
    rows = [["design", "what", "one process, s", "two processes, s", "ratio"]]
    for design, one in data["ranks"]["figures"]["1"].items():
        for what, seconds_of_one in one.items():
            two = data["ranks"]["figures"]["2"][design][what]
            said = "two products" if what == "product" else f"fit at {what} alpha_max"
            rows.append([design, said, f"{seconds_of_one:.2f}", f"{two:.2f}", f"{two / seconds_of_one:.2f}"])
    return section(
        "## Two processes",
        "Cell G on one process and on two, each of one thread, to a gap of 1e-4. Two products read all samples "
        "twice, which is what limits two processes that share the memory of a machine:",
        rows,
        data["ranks"],
    )


def of_scaling(data: dict[str, Any]) -> str:
    """Weak scaling, and a cost model."""
    found = data["scaling"]["figures"]
    designs = {name: part["fits"] for name, part in found.items() if isinstance(part, dict)}
    rows = [["design", "fit", "one process, s", "one rank, s", "two ranks, s", "model of one", "model of two"]]
    sizes = list(next(iter(next(iter(designs.values())).values()))["prediction"])
    more = [["design", "fit", *(f"{size} ranks, s" for size in sizes)]]
    errors, from_one = [], []
    for design, fits in designs.items():
        for name, fit in fits.items():
            one, two = (fit["measured"][size] for size in ("1", "2"))
            off = fit["model_over_measured"]["1"], fit["with_the_commands_of_two_processes"]["over_measured"]
            rows.append([design, name, *(f"{value:.2f}" for value in (fit["plain"], one, two, *off))])
            more.append([design, name, *(f"{fit['prediction'][size]['seconds']:.2f}" for size in sizes)])
            errors += [abs(ratio - 1) for ratio in off]
            from_one.append(fit["model_over_measured"]["2"])
    return "\n\n".join(
        [
            "## Weak scaling",
            f"{found['samples_of_a_rank']:,} samples of 32 tokens of width 16 in float64 for each rank of one thread. "
            "Seconds of fits to a gap of 1e-4 in one process without ranks, on one rank and on two, whose vectors of "
            "samples are on the ranks, and those of a cost model over them. The model adds up the seconds of products "
            "and messages, which are measured by themselves, times their number in that fit, and those of operations "
            "on vectors and of rank 0. `benchmarks/scaling.py` says what it assumes:",
            markdown(rows),
            f"The model is within 15% of {sum(error <= 0.15 for error in errors)} of these {len(errors)} times, and "
            f"off by {max(errors):.0%} at most. That of two ranks is of the commands that the fit on two ranks took. "
            "Of the commands of the fit on one rank, of which the prediction is made, it is "
            f"{min(from_one):.2f} to {max(from_one):.2f} of the measured seconds of two.",
            "**A prediction, which nothing was measured against**: seconds of the same fits on more ranks, each on a "
            f"machine of its own with a network of {found['network'] / 1e9:.2f} GB/s, with as many samples each:",
            markdown(more),
            measured(data["scaling"]),
        ]
    )


def of_one_process(_: dict[str, Any]) -> str:
    """One process with its data in memory, beside the commit before data on a disk and ranks."""
    data = load("one_process")
    rows = [["cell", "ratio", "design", "before, s", "now, s", "now over before"]]
    for (cell, share, design), records in groups(data["records"]).items():
        before, now = (geometric(seconds(record[side]) for record in records) for side in ("old", "new"))
        over = geometric(ratio(record) for record in records)
        rows.append([cell, share, design, f"{before:.3f}", f"{now:.3f}", f"{over:.2f}"])
    ratios = [ratio(record) for record in data["records"]]
    return section(
        "## One process in memory",
        f"Seconds of the default solver to a gap of 1e-6 beside those at commit {data['other']}, before there were "
        f"data on a disk and ranks. The geometric mean of the ratios is {geometric(ratios):.2f}:",
        rows,
        data,
    )


def accelerator() -> str:
    """Fits on a GPU."""
    data = load("accelerator")
    rates, large, cells = (data[part]["figures"]["found"] for part in ("rates", "large", "cells"))
    names = {
        "copy": "copies on the device, bytes read and written",
        "to_device": "copies from pinned memory to the device",
    }
    copies = [["what", "GB/s"], *([text, f"{rates[name] / 1e9:.0f}"] for name, text in names.items())]
    copies.append(["reads of a file in the page cache to pinned memory", f"{large['read'] / 1e9:.0f}"])
    products = " and ".join(f"{rates[kind] / 1e12:.0f} TFLOP/s in {kind}" for kind in ("float32", "float64"))
    fits = [["loss", "data", "s", "gap", "iterations", "passes", "GB read", "GB/s of reading", "GB on the device"]]
    for place, loss in ((place, loss) for loss in large["disk"] for place in ("memory", "disk")):
        fit = large[place][loss]
        traffic = ["-"] * 3
        if "passes" in fit:
            traffic = [f"{fit['passes']:.1f}", f"{fit['bytes'] / 1e9:.0f}", f"{fit['read_rate'] / 1e9:.1f}"]
        last = [*traffic, number(fit["bytes_on_device"] / 1e9)]
        where = {"memory": "on the device", "disk": "in a file"}[place]
        fits.append([loss, where, f"{fit['seconds']:.1f}", f"{fit['gap']:.0e}", str(fit["n_iter"]), *last])
    rows = [["cell", "ratio", "CPU, s", "device, s", "iterations", "gap on the device"]]
    for record in cells:
        there = record["fits"]["cuda"]
        of_cpu = record["fits"].get("cpu", {}).get("seconds")
        row = [record["cell"], str(record["ratio"]), number(of_cpu), number(there["seconds"]), str(there["n_iter"])]
        rows.append([*row, f"{there['gap']:.0e}"])
    tokens, width = large["sample"]
    return "\n\n".join(
        [
            "# On a GPU",
            section("## Rates", f"{data['rates']['figures']['device']}. Products: {products}.", copies, data["rates"]),
            section(
                "## A million samples",
                f"{large['n_samples']:,} samples of {tokens} tokens of width {width} in float32, "
                f"{large['bytes'] / 1e9:.0f} GB, fitted to a gap of 1e-4 at a tenth of alpha_max by an estimator, from "
                "the memory of the device and from a file in the page cache with a `memory_limit` of "
                f"{large['memory_limit'] / 2**30:.0f} GiB:",
                fits,
                data["large"],
            ),
            section(
                "## Cells of ten times their samples",
                "Seconds to a gap of 1e-4 on all threads of the CPU and on the device, in float64:",
                rows,
                data["cells"],
            ),
        ]
    )


def layers() -> str:
    """Unfolded layers beside torch's encoder layer."""
    data = load("layers")
    names = list(data["records"][0]["seconds"])
    rows = [["samples", "tokens", "width", *(f"{name}, ms" for name in names), "largest ratio of aim"]]
    for record in data["records"]:
        found = record["seconds"]
        ratio = max(found[name] for name in names if name.startswith("aim")) / found[names[0]]
        rows.append([*map(str, record["size"]), *(f"{1e3 * found[name]:.3g}" for name in names), f"{ratio:.2f}"])
    return section(
        "# Unfolded layers",
        f"Milliseconds of a pass forward and back, medians of {data['repeats']} passes that take turns, of "
        "`torch.nn.TransformerEncoderLayer` (four heads, feed-forward part four times as wide, no dropout) and of "
        "`UnfoldedLayer` of equal width. The bound for the mode `aim` is a ratio of 1.5. The layers have 12 and 2 "
        "times the square of the width as parameters.",
        rows,
        data,
    )


def constrained_steps() -> str:
    """Constrained steps beside unconstrained ones."""
    data = load("constrained_steps")
    rows = [["model", "samples", "tokens", "width", "layers", "last, ms", "constrained, ms", "sum, ms", "ratio"]]
    for record in data["records"]:
        found = record["seconds"]
        times = [f"{1e3 * found[name]:.3g}" for name in ("last", "constrained", "sum")]
        ratio = f"{found['constrained'] / found['last']:.2f}"
        rows.append([record["model"], *map(str, record["size"]), *times, ratio])
    return section(
        "# Steps under descent constraints",
        f"Milliseconds of a step of `PrimalDual`, medians of {data['repeats']} steps that take turns: of the loss "
        "of the last layer alone, the outputs of the others not being computed (`last`), of the Lagrangian with "
        "its multipliers (`constrained`), and of the sum of all losses (`sum`, deep supervision). The bound for "
        "constrained over unconstrained steps is a ratio of 1.3.",
        rows,
        data,
    )


PAGES = {
    "packages": packages,
    "paths": paths,
    "side_by_side": lambda: side_by_side("side_by_side", "Intel"),
    "side_by_side_amd": lambda: side_by_side("side_by_side_amd", "AMD"),
    "leave_one_out": lambda: leave_one_out(
        "leave_one_out",
        "# What each piece of the default solver brings",
        "Each row is the default solver without one piece.",
    ),
    "leave_one_out_cf94d43": lambda: leave_one_out(
        "leave_one_out_cf94d43",
        "# What each piece of the default solver brought at cf94d43",
        "The pieces of the default solver at cf94d43, under their names there. Seconds without a piece are of single "
        "runs, which differ by up to a quarter. [Rejected alternatives](../decisions/rejected.md) lists the pieces "
        "that were removed.",
    ),
    "memory": memory,
    "probe_memory": probe_memory,
    "out_of_core": out_of_core,
    "accelerator": accelerator,
    "layers": layers,
    "constrained_steps": constrained_steps,
}


def rendered() -> dict[Path, str]:
    """The text of every page."""
    return {DOCS / f"{name}.md": f"{NOTE}\n\n{page()}\n" for name, page in PAGES.items()}


if __name__ == "__main__":
    for file, text in rendered().items():
        file.write_text(text)
