"""Classifiers of sentences on activations of a frozen encoder: accuracy and seconds, as a Markdown table.

Run: python benchmarks/text_probes.py                                            # which package documents it
     python benchmarks/text_probes.py --positive rt.pos --negative rt.neg --encoding latin-1
     python benchmarks/text_probes.py --pairs msr-para-train.tsv --n-tokens 64   # two sentences, one text

All choose their parameters by the loss on the same fifth of the training samples. The convex and the logistic ones are
then fitted to all training samples; the softmax probe keeps the weights that are best on that fifth. Seconds are those
of the whole search, one setting after the other; of the softmax probe they count the steps, not the evaluations.
"""

from __future__ import annotations

import argparse
import csv
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, PredefinedSplit, StratifiedShuffleSplit, train_test_split

from convexformer import ConvexAttentionClassifierCV, SoftmaxAttention
from convexformer.datasets import load_attention_activations, load_documentation_sentences
from convexformer.nn import train

N_ALPHAS, SMALLEST_ALPHA, TOLERANCE = 10, 0.05, 1e-3
STRENGTHS = np.logspace(-3, 2, 10)
LEARNING_RATES, WEIGHT_DECAY, BATCH_SIZE, PATIENCE = [3e-4, 1e-3, 3e-3], 0.01, 128, 20


class Samples(NamedTuple):
    """Token activations, zero after the end of a sentence, their numbers of tokens and labels."""

    tokens: NDArray[np.float32]
    lengths: NDArray[np.int64]
    labels: NDArray

    def rows(self, index: NDArray[np.int64]) -> Samples:
        return Samples(*(part[index] for part in self))

    def means(self) -> NDArray[np.float32]:
        """Mean over the tokens of each sentence."""
        return self.tokens.sum(1) / self.lengths[:, None].astype(np.float32)


class Score(NamedTuple):
    """What a contender came to; tokens and heads where it has some that it need not use."""

    accuracy: float
    seconds: float
    tokens: float = np.nan
    heads: float = np.nan
    gap: float = np.nan


Read = Callable[[Samples], NDArray[np.float32]]


def convex(training: Samples, test: Samples, fold: PredefinedSplit, **options: object) -> Score:
    model = ConvexAttentionClassifierCV(alphas=N_ALPHAS, eps=SMALLEST_ALPHA, cv=fold, tol=TOLERANCE, **options)
    began = time.perf_counter()
    model.fit(training.tokens, training.labels)
    seconds = time.perf_counter() - began
    if model.alpha_ == model.alphas_[-1]:
        print("  the smallest alpha was chosen: a finer grid might do better", flush=True)
    used = int(np.count_nonzero(model.token_norms_))
    gap = model.certificate_.relative_gap
    return Score(model.score(test.tokens, test.labels), seconds, used, len(model.heads_), gap)


def logistic(read: Read, training: Samples, test: Samples, fold: PredefinedSplit) -> Score:
    # A search over C instead of LogisticRegressionCV, whose defaults differ between versions.
    search = GridSearchCV(LogisticRegression(max_iter=5000), {"C": STRENGTHS}, scoring="neg_log_loss", cv=fold)
    began = time.perf_counter()
    search.fit(read(training), training.labels)
    seconds = time.perf_counter() - began
    return Score(search.best_estimator_.score(read(test), test.labels), seconds)


def softmax(training: Samples, test: Samples, fold: PredefinedSplit, n_steps: int, seed: int) -> Score:
    """A softmax-attention layer whose query is the first token's, tuned in its learning rate."""
    classes, labels = np.unique(training.labels, return_inverse=True)
    one_hot = torch.eye(len(classes))[torch.as_tensor(labels)]
    (fitting, held_out) = next(fold.split())
    tokens = torch.as_tensor(training.tokens)
    network = SoftmaxAttention(tokens.shape[2], len(classes), n_heads=4, head_width=32, position=0, seed=seed)
    history = train(
        network,
        tokens[fitting],
        one_hot[fitting],
        loss="softmax",
        alpha=0.0,
        optimizer="adamw",
        lr=LEARNING_RATES,
        weight_decay=WEIGHT_DECAY,
        n_steps=n_steps,
        batch_size=BATCH_SIZE,
        validation=(tokens[held_out], one_hot[held_out]),
        patience=PATIENCE,
        seed=seed,
    )
    with torch.no_grad():
        predicted = classes[network(torch.as_tensor(test.tokens)).argmax(1).numpy()]
    return Score(float((predicted == test.labels).mean()), history.total_seconds)


def majority(training: Samples, test: Samples) -> Score:
    values, counts = np.unique(training.labels, return_counts=True)
    return Score(float((test.labels == values[counts.argmax()]).mean()), 0.0)


def compare(samples: Samples, seed: int, options: argparse.Namespace) -> dict[str, Score]:
    """All contenders on one random split."""
    split = {"stratify": samples.labels, "random_state": seed, "test_size": options.test_size}
    training, test = (samples.rows(rows) for rows in train_test_split(np.arange(len(samples.labels)), **split))
    splitter = StratifiedShuffleSplit(1, test_size=0.2, random_state=seed)
    (_, held_out) = next(splitter.split(training.labels, training.labels))
    in_fold = np.full(len(training.labels), -1)
    in_fold[held_out] = 0
    fold = PredefinedSplit(in_fold)
    data = (training, test, fold)
    gated = {"activation": "gated_relu", "n_gates": options.n_gates, "random_state": seed}
    runs: dict[str, Callable[[], Score]] = {
        "majority class": lambda: majority(training, test),
        "convex, linear": lambda: convex(*data),
        f"convex, {options.n_gates} gates": lambda: convex(*data, **gated),
        "mean of tokens + logistic regression": lambda: logistic(Samples.means, *data),
        "first token + logistic regression": lambda: logistic(lambda part: part.tokens[:, 0], *data),
        "softmax attention, Adam": lambda: softmax(*data, options.n_steps, seed),
    }
    scores = {}
    for name, run in runs.items():
        scores[name] = run()
        print(f"seed {seed}, {name}: {scores[name]}", flush=True)
    return scores


def table(scores: list[dict[str, Score]]) -> str:
    """Medians over seeds, with the least and largest accuracy."""
    lines = ["| classifier | accuracy | seconds | tokens used | heads | relative gap |", "|---|---|---|---|---|---|"]
    for name in scores[0]:
        all_seeds = np.array([score[name] for score in scores])
        middle = Score(*np.median(all_seeds, axis=0))
        least, largest = all_seeds[:, 0].min(), all_seeds[:, 0].max()
        rest = (
            f"{value:{form}}" if np.isfinite(value) else ""
            for value, form in zip(middle[2:], ("g", "g", ".0e"), strict=True)
        )
        accuracy = f"{middle.accuracy:.3f} ({least:.3f} to {largest:.3f})"
        lines.append(f"| {name} | {accuracy} | {middle.seconds:.1f} | {' | '.join(rest)} |")
    return "\n".join(lines)


def read_texts(options: argparse.Namespace) -> tuple[list[str], NDArray]:
    """Sentences and labels in random order."""
    if options.pairs is not None:
        with open(options.pairs, encoding="utf-8-sig", newline="") as file:
            rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))[1:]
        texts, labels = [f"{row[3]} {row[4]}" for row in rows], np.array([row[0] for row in rows])
    elif options.positive is not None:
        parts = [path.read_text(options.encoding).splitlines() for path in (options.positive, options.negative)]
        texts = parts[0] + parts[1]
        labels = np.repeat(["positive", "negative"], [len(part) for part in parts])
    else:
        texts, labels = load_documentation_sentences()
    order = np.random.default_rng(0).permutation(len(texts))[: options.n_sentences]
    return [texts[i] for i in order], labels[order]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positive", type=Path, help="file of positive sentences, one a line")
    parser.add_argument("--negative", type=Path, help="file of negative sentences, one a line")
    parser.add_argument("--encoding", default="utf-8", help="of these two files")
    parser.add_argument("--pairs", type=Path, help="tab-separated file: label, two numbers, two sentences; a heading")
    parser.add_argument("--n-sentences", type=int, default=4000)
    parser.add_argument("--n-tokens", type=int, default=32)
    parser.add_argument("--model", help="Hugging Face encoder; all-MiniLM-L6-v2 by default")
    parser.add_argument("--layer", type=int, default=5, help="whose outputs are read; the last of MiniLM by default")
    parser.add_argument("--test-size", type=float, default=0.25)
    parser.add_argument("--n-gates", type=int, default=8)
    parser.add_argument("--n-steps", type=int, default=200, help="of Adam, for each of three learning rates")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cache", help="folder that keeps activations")
    parser.add_argument("--output", type=Path, help="JSON file for settings and all numbers")
    options = parser.parse_args()
    if (options.positive is None) != (options.negative is None):
        parser.error("--positive and --negative must be given together")
    torch.set_num_threads(options.threads)
    texts, labels = read_texts(options)
    places = {"model": options.model, "layer": options.layer, "site": "layer", "n_tokens": options.n_tokens}
    data = load_attention_activations(texts, short="pad", cache=options.cache, **places)
    samples = Samples(data.outputs, data.lengths, labels)
    scores = [compare(samples, seed, options) for seed in range(options.seeds)]
    print(f"\n{data}, {options.seeds} splits, {options.test_size:.0%} for testing; medians, and ranges of accuracy.\n")
    print(table(scores))
    if options.output is not None:
        numbers = [{name: score._asdict() for name, score in each.items()} for each in scores]
        settings = {name: str(value) for name, value in vars(options).items()}
        options.output.write_text(json.dumps({"settings": settings, "scores": numbers}, indent=1))


if __name__ == "__main__":
    main()
