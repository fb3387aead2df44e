"""From users' targets to what losses take: numbers, or classes and labels as signs or one-hot rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.utils.class_weight import compute_class_weight
from torch import Tensor

from convexformer.validation import as_tensor, check_indicators, without_tensor
from convexformer_solvers import Loss

# A header, of what JSON holds and numpy numbers, and arrays without objects.
SavedState = tuple[dict[str, Any], dict[str, NDArray]]


class Targets(ABC):
    """How the targets of a fitted model read; the same for training, held-out data and ``Heads.objective``.

    Attributes
    ----------
    single : bool
        Whether predictions drop the axis of outputs, there being one output and ``y`` one-dimensional.
    """

    single: bool

    @abstractmethod
    def encode(self, y: ArrayLike) -> NDArray[np.float64]:
        """Targets of the loss, shape ``(N, c)``."""

    def weight(self, y: ArrayLike, sample_weight: ArrayLike | None) -> NDArray[np.float64] | None:
        """Weights of the samples, with those of their classes multiplied in; None when all are equal."""
        return None if sample_weight is None else np.asarray(sample_weight, dtype=np.float64)

    def check_part(self, encoded: NDArray[np.float64]) -> None:  # noqa: B027 - most need no check besides the loss's
        """Raise ``ValueError`` when some rows of encoded targets are not enough to fit by themselves."""

    def _saved_state(self) -> SavedState:
        """What a file must hold of them, besides the loss."""
        raise NotImplementedError


@dataclass(frozen=True)
class RealTargets(Targets):
    """Real numbers, one or several per sample.

    Parameters
    ----------
    single : bool, default=False
        Whether ``y`` is one-dimensional.
    """

    single: bool = False

    def encode(self, y: ArrayLike) -> NDArray[np.float64]:
        array = as_tensor(y, dtype=torch.float64, name="y").numpy(force=True)
        if array.ndim == 0:
            raise ValueError(f"y must have one row per sample, got the single value {y!r}")
        return array.reshape(len(array), -1)

    def _saved_state(self) -> SavedState:
        return {"single": self.single}, {}


@dataclass(frozen=True)
class ProbabilityTargets(Targets):
    """Probabilities of classes, a row per sample, as a teacher network gives them.

    Rows of less than double precision miss a sum of 1 by their rounding, and are taken over their sums.
    """

    single = False

    def encode(self, y: ArrayLike) -> NDArray[np.float64]:
        given = as_tensor(y, name="y")
        rows = given.double().numpy(force=True)
        if rows.ndim != 2 or not given.is_floating_point() or given.dtype == torch.float64:
            return rows  # which are checked later
        total = rows.sum(1, keepdims=True)
        rounding = rows.shape[1] * torch.finfo(given.dtype).eps
        return np.divide(rows, total, where=np.abs(total - 1) <= rounding, out=rows)

    def _saved_state(self) -> SavedState:
        return {"single": False}, {}


class LabelTargets(Targets):
    """Targets of a classification, which say what the outputs mean as well.

    Attributes
    ----------
    classes : ndarray of shape (n_classes,)
        Classes, or numbers of labels.
    loss : Loss
        Loss of the outputs.
    """

    classes: NDArray
    loss: Loss

    @abstractmethod
    def scores(self, outputs: Tensor) -> Tensor:
        """Outputs with one column per class or label, or of two classes with a single column of margins."""

    @abstractmethod
    def labels(self, outputs: Tensor) -> NDArray[Any]:
        """What to predict of outputs."""

    @abstractmethod
    def probabilities(self, outputs: Tensor) -> Tensor:
        """Probabilities of each class or label."""


@dataclass(frozen=True, eq=False)
class ClassTargets(LabelTargets):
    """Classes, one per sample.

    Parameters
    ----------
    classes : ndarray of shape (n_classes,)
        Sorted labels.
    loss : Loss
        Decides the coding: one-hot rows for a loss on the simplex; -1 and 1 for a loss of margins, in one column for
        two classes and one column per class (one against the rest) for more.
    class_weight : ndarray of shape (n_classes,), optional
        Factor on the weight of each class's samples; ``class_targets`` makes the largest less than 1.
    """

    classes: NDArray
    loss: Loss
    class_weight: NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "single", self.loss.targets == "sign" and len(self.classes) == 2)

    def index(self, y: ArrayLike) -> NDArray[np.int64]:
        """Positions of labels in ``classes``."""
        labels = np.asarray(without_tensor(y, "y"))
        if labels.ndim == 0:
            raise ValueError(f"y must have a label for each sample, got {y!r}")
        if labels.ndim == 2 and labels.shape[1] == 1:  # a column, which fit takes too
            labels = labels[:, 0]
        if labels.ndim != 1:
            raise ValueError(f"y must have shape (n_samples,), a label for each sample, got {labels.shape}")
        try:
            position = np.searchsorted(self.classes, labels).clip(max=len(self.classes) - 1)
        except TypeError as error:  # of objects, as None, that have no order
            raise ValueError(f"y must hold labels of the kind of those in fit, {self.classes[:5]}: {error}") from error
        unknown = self.classes[position] != labels
        if unknown.any():
            raise ValueError(f"y has labels that were not seen in fit: {np.unique(labels[unknown])[:5]}")
        return position

    def encode(self, y: ArrayLike) -> NDArray[np.float64]:
        one_hot = np.eye(len(self.classes))[self.index(y)]
        if self.loss.targets == "simplex":
            return one_hot
        signs = 2.0 * one_hot - 1.0
        return signs[:, 1:] if self.single else signs

    def weight(self, y: ArrayLike, sample_weight: ArrayLike | None) -> NDArray[np.float64] | None:
        weight = super().weight(y, sample_weight)
        if self.class_weight is None:
            return weight
        factor = self.class_weight[self.index(y)]
        return factor if weight is None else factor * weight

    def scores(self, outputs: Tensor) -> Tensor:
        if len(self.classes) == 2 and not self.single:
            return outputs[:, 1:] - outputs[:, :1]
        return outputs

    def labels(self, outputs: Tensor) -> NDArray[Any]:
        scores = self.scores(outputs)
        index = (scores[:, 0] > 0).long() if scores.shape[1] == 1 else scores.argmax(1)
        return self.classes[index.numpy(force=True)]

    def probabilities(self, outputs: Tensor) -> Tensor:
        probability = self.loss.mean(outputs)
        if self.single:
            probability = torch.cat([self.loss.mean(-outputs), probability], 1)
        total = probability.sum(1, keepdim=True)
        # Where all of a row underflow, their logarithms are the outputs.
        small = total < torch.finfo(total.dtype).tiny
        return torch.where(small, outputs.softmax(1), probability / total)

    def _saved_state(self) -> SavedState:
        weight = {} if self.class_weight is None else {"class_weight": self.class_weight}
        return {"single": self.single}, {"classes": _plain_labels(self.classes), **weight}


@dataclass(frozen=True, eq=False)
class MultilabelTargets(LabelTargets):
    """Any of several labels per sample, as a matrix of 0 and 1: one binary problem per label.

    Parameters
    ----------
    n_labels : int
        Columns of the matrix, two or more.
    loss : Loss
        A loss of margins.
    """

    n_labels: int
    loss: Loss
    single = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "classes", np.arange(self.n_labels))

    def encode(self, y: ArrayLike) -> NDArray[np.float64]:
        return 2.0 * check_indicators(y) - 1.0

    def check_part(self, encoded: NDArray[np.float64]) -> None:
        # As with a single class: an intercept would go to infinity with the logistic loss.
        constant = np.flatnonzero((encoded == encoded[0]).all(0))
        if constant.size:
            raise ValueError(
                "y must have both 0 and 1 in the column of each label, among samples of positive weight, got one of "
                f"them alone in the columns {constant[:5].tolist()}; leave such labels out"
            )

    def scores(self, outputs: Tensor) -> Tensor:
        return outputs

    def labels(self, outputs: Tensor) -> NDArray[Any]:
        return (outputs > 0).long().numpy(force=True)

    def probabilities(self, outputs: Tensor) -> Tensor:
        return self.loss.mean(outputs)

    def _saved_state(self) -> SavedState:
        return {"single": False, "n_labels": self.n_labels}, {}


def multilabel_targets(
    y: NDArray[np.float64], loss: Loss, class_weight: Any, sample_weight: NDArray[np.float64] | None
) -> MultilabelTargets:
    """Targets of a checked matrix of labels.

    Raises
    ------
    ValueError
        If the loss is for classes that exclude each other, there are class weights, or a label is that of all or none
        of the samples of positive weight.
    """
    if loss.targets != "sign":
        raise ValueError(
            f"loss={loss!r} is for classes of which each sample has one; y with several labels per sample needs a loss "
            "of margins, such as 'logistic', which is that of 'auto'; of one-hot rows give the classes, y.argmax(1)"
        )
    if class_weight is not None:
        raise ValueError(
            f"class_weight must be None for y with several labels per sample, got {class_weight!r}; give sample_weight"
        )
    targets = MultilabelTargets(y.shape[1], loss)
    targets.check_part(targets.encode(y if sample_weight is None else y[sample_weight > 0]))
    return targets


def _plain_labels(classes: NDArray) -> NDArray:
    """Labels that a file without code can hold: strings that came as objects, as from data frames, become strings."""
    if not classes.dtype.hasobject:
        return classes
    if all(isinstance(label, str) for label in classes):
        plain = classes.astype(str)
        if (plain.astype(object) != classes).any():
            raise ValueError(
                f"the labels {classes.tolist()} cannot be saved, as text of numpy loses null characters at its end; "
                "fit on labels without them"
            )
        return plain
    raise ValueError(
        f"the labels {classes.tolist()} cannot be saved, as they are objects; fit on strings, integers or booleans"
    )


def class_targets(
    y: NDArray, loss: Loss, class_weight: dict | str | None, sample_weight: NDArray[np.float64] | None
) -> ClassTargets:
    """Read the classes and their weights off training labels.

    Parameters
    ----------
    y : ndarray of shape (N,)
        Labels.
    loss : Loss
        Decides the coding.
    class_weight : dict, "balanced" or None
        As in scikit-learn.
    sample_weight : ndarray of shape (N,), optional
        Counted in by "balanced".

    Returns
    -------
    ClassTargets

    Raises
    ------
    ValueError
        If fewer than two classes have positive weight, or a class weight is negative or not finite.
    """
    classes = np.unique(y)
    weighted = y if sample_weight is None else y[sample_weight > 0]
    if len(np.unique(weighted)) < 2:
        raise ValueError(
            f"y must have at least two classes with positive weight, got one class: {weighted.tolist()[0]!r}"
        )
    if class_weight is None:
        return ClassTargets(classes, loss)
    try:
        weights = _class_weights(class_weight, classes, y, sample_weight)
    except (TypeError, ValueError) as error:  # keys of another kind than the labels are either
        raise ValueError(f"class_weight={class_weight!r} cannot be used: {error}") from error
    if not np.isfinite(weights).all() or (weights < 0).any():
        raise ValueError(f"class_weight must be finite and not negative, got {class_weight!r}")
    # Only ratios matter, and sums and products of huge weights would overflow; powers of two round nothing.
    given, weights = weights, np.ldexp(weights, -np.frexp(weights.max())[1])
    if (weights[given > 0] == 0).any():
        raise ValueError(f"class_weight must have ratios that float64 can represent, got {class_weight!r}")
    if len(np.intersect1d(weighted, classes[weights > 0])) < 2:
        raise ValueError(
            f"class_weight must leave at least two classes with positive weight, got {class_weight!r} for the classes "
            f"{classes.tolist()}"
        )
    return ClassTargets(classes, loss, weights)


def _class_weights(
    class_weight: dict | str, classes: NDArray, y: NDArray, sample_weight: NDArray[np.float64] | None
) -> NDArray[np.float64]:
    """The factor of each class; balanced ones are those of the samples of positive weight alone, zero without such."""
    if isinstance(class_weight, dict):
        try:
            return compute_class_weight(class_weight, classes=classes, y=y)
        except ValueError as error:  # which shows booleans as integers
            if without := [label for label in classes.tolist() if label not in class_weight]:
                raise ValueError(f"the classes {without} are not in class_weight") from error
            raise
    if sample_weight is None:
        return compute_class_weight(class_weight, classes=classes, y=y)
    counted = sample_weight > 0
    present = np.unique(y[counted])
    weights = np.zeros(len(classes))
    weights[np.isin(classes, present)] = compute_class_weight(
        class_weight, classes=present, y=y[counted], sample_weight=sample_weight[counted]
    )
    return weights
