"""Regions of points at which alternating inexact minimisation is proven to descend.

Notation and numbering are those of Yang, Huang and Wipf, "Transformers from an Optimization Perspective", NeurIPS 2022,
sections 4 and 5.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from convexformer.validation import check_finite, check_positive
from convexformer_solvers.validation import check_tensor

from .graphs import check_floats


@dataclass(frozen=True, eq=False)  # tensors are not compared as a whole
class DescentRegion:
    r"""The points whose distance from one point is at most a multiple of that from another.

    For :math:`k > 0` and the minimisers :math:`y_f` of f and :math:`y_h` of h = f + g,

    .. math:: S = \{y : \|y - y_f\| \le k \|y - y_h\|\},

    the set of Yang, Huang and Wipf (2022), section 4 and figure 1, whose boundary is a sphere of Apollonius. With

    .. math:: c = \frac{y_f - k^2 y_h}{1 - k^2}, \qquad r = \frac{k \|y_f - y_h\|}{|1 - k^2|}

    it is the closed ball around c of radius r where k < 1, the half-space of the points no farther from :math:`y_f`
    than from :math:`y_h` where k = 1, and all but the open ball around c of radius r where k > 1. The centre is neither
    minimiser, unless they are equal.

    Parameters
    ----------
    optimum_f, optimum_h : Tensor of shape (...)
        The minimisers of f and of h, of one shape, precision and device. Norms are over all entries.
    ratio : float
        The number k; :func:`descent_region` computes the one at which alternating inexact minimisation descends.

    Attributes
    ----------
    centre : Tensor of shape (...), or None
        The point c; None where k = 1.
    radius : float
        The number r; infinite where k = 1.
    is_complement : bool
        Whether the region is all but the open ball: k > 1.

    Raises
    ------
    TypeError
        If a minimiser is no tensor.
    ValueError
        If the minimisers differ in shape, precision or device, are not finite or hold no floating-point numbers, or
        `ratio` is no positive finite number.

    See Also
    --------
    descent_region : the region of a bound on the ratio of gradients.

    Examples
    --------
    >>> import torch
    >>> region = DescentRegion(torch.tensor([0.0, 0.0]), torch.tensor([3.0, 0.0]), ratio=0.5)
    >>> region.centre, region.radius, region.is_complement
    (tensor([-1., 0.]), 2.0, False)
    >>> region.contains(torch.tensor([[1.0, 0.0], [1.1, 0.0], [-3.0, 0.0]]))
    tensor([ True, False, True])
    """

    optimum_f: Tensor = field(repr=False)
    optimum_h: Tensor = field(repr=False)
    ratio: float

    def __post_init__(self) -> None:
        """Check the parameters."""
        check_points(optimum_f=self.optimum_f, optimum_h=self.optimum_h)
        check_positive(ratio=self.ratio)
        object.__setattr__(self, "ratio", float(self.ratio))

    @property
    def centre(self) -> Tensor | None:
        """The centre of the sphere that bounds the region; None where that is a plane."""
        if self.ratio == 1:
            return None
        # The square of the ratio may be beyond all numbers; that of its inverse is then zero.
        near, far = (self.optimum_h, self.optimum_f) if self.is_complement else (self.optimum_f, self.optimum_h)
        square = self._below_one**2
        return (near - square * far) / (1 - square)

    @property
    def radius(self) -> float:
        """The radius of the sphere that bounds the region; infinite where that is a plane."""
        if self.ratio == 1:
            return float("inf")
        return self._below_one * norm(self.optimum_f - self.optimum_h) / (1 - self._below_one**2)

    @property
    def _below_one(self) -> float:
        """The ratio or its inverse."""
        return 1 / self.ratio if self.is_complement else self.ratio

    @property
    def is_complement(self) -> bool:
        """Whether the region is all but an open ball."""
        return self.ratio > 1

    def contains(self, y: Tensor) -> Tensor:
        r"""Tell which points are in the region.

        Parameters
        ----------
        y : Tensor of shape (\*batch, ...)
            Points; the last dimensions are those of the minimisers.

        Returns
        -------
        Tensor of bool of shape (\*batch)
            Of no dimension for one point.

        Raises
        ------
        TypeError
            If `y` is no tensor.
        ValueError
            If the last dimensions of `y` are not those of the minimisers.
        """
        check_tensor("y", y)
        shape = self.optimum_f.shape
        n_batch = y.ndim - len(shape)
        if y.shape[n_batch:] != shape:  # shorter than it where there are too few dimensions
            raise ValueError(f"y must have the shape {tuple(shape)} of the minimisers at its end, got {tuple(y.shape)}")
        ways = torch.stack([(y - point).reshape(*y.shape[:n_batch], -1) for point in (self.optimum_f, self.optimum_h)])
        largest = ways.abs().amax((0, -1), keepdim=True)  # unscaled squares may be zero or infinite
        to_f, to_h = torch.linalg.vector_norm(ways / torch.where(largest > 0, largest, 1), dim=-1)
        return to_f <= self.ratio * to_h


def descent_region(
    optimum_f: Tensor, optimum_h: Tensor, bound: float, *, convexity_h: float, lipschitz_f: float
) -> DescentRegion:
    r"""Region around the minimisers in which the ratio of the gradients of f and h is at most a bound.

    As :math:`\|\nabla f(y)\| \le L_f \|y - y_f\|` and :math:`\|\nabla h(y)\| \ge c_h \|y - y_h\|`, every y with
    :math:`\|y - y_f\| \le k \|y - y_h\|`, :math:`k = c_h C / L_f`, has
    :math:`\|\nabla f(y)\| \le C \|\nabla h(y)\|` (Yang, Huang and Wipf 2022, section 4). The converse is false: points
    outside the region may satisfy the bound too.

    Parameters
    ----------
    optimum_f, optimum_h : Tensor of shape (...)
        The minimisers of f and of h = f + g.
    bound : float
        The number C, as :func:`~convexformer.unfolded.descent_constant` computes it.
    convexity_h : float
        The constant of strong convexity of h, :math:`c_h`.
    lipschitz_f : float
        The Lipschitz constant of the gradient of f, :math:`L_f`.

    Returns
    -------
    DescentRegion
        With ``ratio`` k.

    Raises
    ------
    TypeError
        If a minimiser is no tensor.
    ValueError
        If a number is not positive and finite, or the minimisers do not fit each other.

    Examples
    --------
    With f = y**2 and g = (y - 3)**2, h is least at 1.5:

    >>> import torch
    >>> region = descent_region(torch.tensor([0.0]), torch.tensor([1.5]), 1.0, convexity_h=4.0, lipschitz_f=2.0)
    >>> region.ratio, region.is_complement, region.centre
    (2.0, True, tensor([2.]))
    """
    check_positive(bound=bound, convexity_h=convexity_h, lipschitz_f=lipschitz_f)
    return DescentRegion(optimum_f, optimum_h, convexity_h * bound / lipschitz_f)


def clipping_index(step: Tensor, y: Tensor) -> float:
    r"""How much of a gradient step may be cut off where its end is made non-negative.

    .. math:: D(\xi_1; \xi_2) = \frac{\sum_i \min(\xi_{2,i}^2 - \xi_{1,i}^2, 0)}{\|\xi_1\|^2} \in [-1, 0]

    of Yang, Huang and Wipf (2022), section 5 and figure 3, at the step :math:`\xi_1 = \alpha_2 \nabla h(y)` and the
    point :math:`\xi_2 = y`. For :math:`y \ge 0` it bounds what :math:`\max(y - \xi_1, 0)` takes away from
    :math:`y - \xi_1`, :math:`\|\max(\xi_1 - y, 0)\|^2 \le -D \|\xi_1\|^2`: 0 means that the step stays where nothing is
    cut off, -1 that all of it may be.

    Parameters
    ----------
    step : Tensor of shape (...)
        The gradient step :math:`\xi_1`.
    y : Tensor of shape (...)
        The point :math:`\xi_2` from which it goes.

    Returns
    -------
    float
        From -1 to 0; 0 where `step` is zero, by definition.

    Raises
    ------
    TypeError
        If an argument is no tensor.
    ValueError
        If the arguments differ in shape, precision or device, are not finite or hold no floating-point numbers.

    Examples
    --------
    >>> import torch
    >>> y = torch.tensor([1.0, 0.0])
    >>> [clipping_index(torch.tensor(step), y) for step in ([0.5, 0.0], [1.0, 1.0], [0.0, 1.0])]
    [0.0, -0.5, -1.0]
    """
    check_points(step=step, y=y)
    largest = _largest(step)
    if largest == 0:
        return 0.0
    squares = (step / largest).square()  # unscaled ones of tiny steps are zero
    short = torch.clamp((y / largest).square() - squares, max=0)
    return max(-1.0, float(short.sum() / squares.sum()))


def norm(values: Tensor) -> float:
    """Euclidean norm over all entries, whose squares may be beyond all numbers."""
    largest = _largest(values)
    if largest == 0:
        return 0.0
    return largest * float(torch.linalg.vector_norm(values / largest))


def _largest(values: Tensor) -> float:
    """Largest absolute entry, 0 where there is none."""
    return float(values.abs().max()) if values.numel() else 0.0


def check_points(**points: Tensor) -> None:
    """Raise an error naming the first argument that is no finite point, or does not fit the one before it."""
    (first, pattern), *_ = points.items()
    for name, point in points.items():
        check_floats(name, point)
        check_finite(name, point)
        if point.shape != pattern.shape:
            raise ValueError(f"{name} must have the shape {tuple(pattern.shape)} of {first}, got {tuple(point.shape)}")
        if (point.dtype, point.device) != (pattern.dtype, pattern.device):
            wanted = f"of {pattern.dtype} on {pattern.device}, as {first} is"
            raise ValueError(f"{name} must be {wanted}, got {point.dtype} on {point.device}")
