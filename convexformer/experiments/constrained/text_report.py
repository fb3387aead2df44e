"""The numbers of the experiment on text as tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from convexformer.experiments.common import Column, closing, counted, grouped, mean_and_error, shown, shown_with_error
from convexformer.experiments.tables import format_rows

from .common import METHODS, paired_difference
from .text_settings import ConstrainedTextSettings

_CURVES = ("accuracies", "by_layer", "layer_losses", "exit_layers", "exit_accuracies")
_NUMBERS = ("area", "seconds", "mean_ratio", "median_ratio", "descending_share")


def summarise(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over seeds with standard errors, and paired differences to unconstrained training.

    Parameters
    ----------
    runs : sequence of dict
        Finished runs; those that diverged are left out.

    Returns
    -------
    dict
        ``summaries``, a row for each corpus, model, noise and method, and ``differences`` of the areas.
    """
    groups = grouped([run for run in runs if not has_diverged(run)], ("corpus", "model", "noise", "method"))
    summaries, differences = [], []
    for (corpus, model, noise, method), group in groups.items():
        group = sorted(group, key=lambda run: run["seed"])
        row = {"corpus": corpus, "model": model, "noise": noise, "method": method, "n_seeds": len(group)}
        for name in (*_CURVES, *_NUMBERS):
            row[name], row[f"{name}_error"] = mean_and_error([run[name] for run in group])
        row["clean"], row["clean_error"] = mean_and_error([run["accuracies"][0] for run in group])
        row["feasible"] = sum(run["feasible"] for run in group)
        summaries.append(row)
        areas = {run["seed"]: run["area"] for run in groups.get((corpus, model, noise, METHODS[1].name), [])}
        both = [run for run in group if run["seed"] in areas]
        if both and method != METHODS[1].name:
            compared = paired_difference([run["area"] for run in both], [areas[run["seed"]] for run in both])
            differences.append({"corpus": corpus, "model": model, "noise": noise, "method": method, **compared})
    return {"summaries": summaries, "differences": differences}


def has_diverged(row: dict[str, Any]) -> bool:
    """Whether the losses of a run became infinite. Reports made before such runs were recorded hold none of them."""
    return row.get("diverged") is not None


def _price(row: dict[str, Any]) -> str:
    return "hard" if row["price"] is None else f"{row['price']:g}"


def _of_ended(show: Callable[[dict[str, Any]], str]) -> Callable[[dict[str, Any]], str]:
    """What is shown of a run that came to its end, and a dash for others."""
    return lambda row: "-" if has_diverged(row) else show(row)


_PLACE: tuple[Column, ...] = (
    ("corpus", "<", shown("corpus", "")),
    ("model", "<", shown("model", "")),
    ("noise", ">", shown("noise", "g")),
    ("method", "<", shown("method", "")),
)
_COLUMNS: tuple[Column, ...] = (
    *_PLACE,
    ("accuracy, no noise, %", ">", shown_with_error("clean", ".1f", 100)),
    ("area", ">", shown_with_error("area", ".3f")),
    ("feasible", ">", lambda row: f"{row['feasible']} of {row['n_seeds']}"),
    ("mean ratio", ">", shown("mean_ratio", ".2f")),
    ("descending", ">", shown("descending_share", ".0%")),
    ("seconds", ">", shown("seconds", ".0f")),
)
_DIFFERENCES: tuple[Column, ...] = (
    *_PLACE,
    ("area less unconstrained", ">", shown("difference", "+.4f")),
    ("standard error", ">", shown("error", ".4f")),
    ("p", ">", shown("p", ".2g")),
)
_ABLATION: tuple[Column, ...] = (
    ("alpha", ">", shown("alpha", "g")),
    ("price of slacks", ">", _price),
    ("feasible", "<", lambda row: "diverged" if has_diverged(row) else "yes" if row["feasible"] else "no"),
    ("losses of the layers", "<", _of_ended(lambda row: ", ".join(f"{loss:.3f}" for loss in row["layer_losses"]))),
    ("accuracy, no noise, %", ">", _of_ended(lambda row: f"{100 * row['accuracies'][0]:.1f}")),
    ("most noise, %", ">", _of_ended(lambda row: f"{100 * row['accuracies'][-1]:.1f}")),
    ("area", ">", _of_ended(shown("area", ".3f"))),
)


def format_constrained_text(report: dict[str, Any]) -> str:
    """Tables, what was left out, and the remark.

    Parameters
    ----------
    report : dict
        As ``run_constrained_text`` returns it.

    Returns
    -------
    str

    Examples
    --------
    The text of a report that has no runs yet:

    >>> report = {name: [] for name in ("runs", "summaries", "differences", "ablation", "skipped", "figures")}
    >>> print(format_constrained_text(report | {"remark": "What it means."}))
    means over 0 seeds ± standard error
    corpus  model  noise  method  accuracy, no noise, % ...
    areas beside unconstrained training, paired over seeds
    ...
    What it means.
    figures:
    """
    n_seeds = len({run["seed"] for run in report["runs"]})
    n_diverged = sum(map(has_diverged, report["runs"]))
    parts = [
        f"means over {counted(n_seeds, 'seed')} ± standard error",
        format_rows(report["summaries"], _COLUMNS),
        "",
        "areas beside unconstrained training, paired over seeds",
        format_rows(report["differences"], _DIFFERENCES),
        "",
        "ablation of constrained training, one seed",
        format_rows(report["ablation"], _ABLATION),
        "",
        *(f"left out: {reason}" for reason in report["skipped"]),
        *(
            [f"{counted(n_diverged, 'run')} diverged and left out of the means and of what is feasible"]
            if n_diverged
            else []
        ),
        *closing(report),
    ]
    return "\n".join(parts)


def remark(settings: ConstrainedTextSettings) -> str:
    """What the numbers mean and how large the search of every method was.

    Parameters
    ----------
    settings : ConstrainedTextSettings
        The settings.

    Returns
    -------
    str
    """
    pairs = counted(len(settings.search.pairs(METHODS[0])), "pair")
    rates, others = counted(len(settings.learning_rates), "learning rate"), counted(len(settings.alphas), "value")
    return (
        f"{settings.n_sentences} sentences, 60% training, 20% validation, 20% test, another split for each seed. Each "
        f"of the methods tries {pairs} of options ({rates}, and {others} of alpha or of weight decay), "
        f"{settings.n_epochs} epochs each ({settings.encoder_epochs} for readouts of the encoder), and keeps the run "
        "of least validation loss of the "
        "last layer, constrained training among its feasible runs if there are any; constrained runs keep their best "
        "feasible epoch or, where none is feasible, that of least violation, the others their best one. Deep "
        "supervision minimises the sum of the losses of all layers. Noise: standard deviation of Gaussian noise on "
        "embeddings relative to theirs, in training as in the column, at test time from "
        f"{settings.test_noises[0]:g} to {settings.test_noises[-1]:g}; area: accuracy integrated over that. c_ref is "
        f"{settings.c_ref_ratio:g} of the loss of the best constant prediction. Feasible: constraints hold on "
        "validation sentences, up to slacks and a standard error. Mean ratio: of the loss of a validation sentence, "
        "with the noise of training, in a layer and in the one before; descending: share of such ratios below 1."
    )
