r"""Alternating inexact minimisation (AIM) of a sum h = f + g, and when a step of it lowers h.

A step goes along the gradient of f first and then along that of g, as a layer of a Transformer attends first and then
transforms each token by itself. As the second gradient is taken where the first step ended, h may rise even where the
steps are short. Notation and numbering are those of Yang, Huang and Wipf, "Transformers from an Optimization
Perspective", NeurIPS 2022, sections 4 and 5.

Points are tensors of any shape, whose norms and inner products are over all entries; f and g are given as functions
that return their gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from convexformer.validation import check_finite, check_positive
from convexformer_solvers.validation import is_real

from .regions import check_points, clipping_index, norm

Gradient = Callable[[Tensor], Tensor]


def aim_step(
    y: Tensor, gradient_f: Gradient, gradient_g: Gradient, step_f: float, step_g: float, *, nonnegative: bool = False
) -> Tensor:
    r"""One step of alternating inexact minimisation.

    .. math:: u = y - \alpha_1 \nabla f(y), \qquad y_+ = u - \alpha_2 \nabla g(u)

    is Algorithm 1 of Yang, Huang and Wipf (2022); their Algorithm 2 ends with
    :math:`y_+ = \max(u - \alpha_2 \nabla g(u), 0)` instead, which is the ReLU of a network.

    Parameters
    ----------
    y : Tensor of shape (...)
        The point.
    gradient_f, gradient_g : callable
        Each takes a tensor of the shape of `y` and returns a gradient at it, of that shape.
    step_f, step_g : float
        The step lengths :math:`\alpha_1` and :math:`\alpha_2`.
    nonnegative : bool, default=False
        Whether the step ends with the ReLU (Algorithm 2).

    Returns
    -------
    Tensor of shape (...)
        The next point, in the precision and on the device of `y`.

    Raises
    ------
    TypeError
        If `y` is no tensor or a gradient no callable.
    ValueError
        If `y` is not finite or holds no floating-point numbers, a gradient is not of the shape and precision of `y` or
        not finite, or a step length is not positive and finite.

    See Also
    --------
    descent_condition : whether the step is proven not to raise f + g.

    Examples
    --------
    >>> import torch
    >>> y = torch.tensor([1.0, -1.0])
    >>> aim_step(y, lambda y: y, lambda y: y - 2, 0.5, 0.5)
    tensor([1.2500, 0.7500])
    >>> aim_step(y, lambda y: y, lambda y: y + 2, 0.5, 0.5, nonnegative=True)
    tensor([0., 0.])
    """
    check_points(y=y)
    check_positive(step_f=step_f, step_g=step_g)
    halfway = y - step_f * _gradient("gradient_f", gradient_f, y)
    end = halfway - step_g * _gradient("gradient_g", gradient_g, halfway)
    return torch.clamp(end, min=0) if nonnegative else end


def gradient_ratio(y: Tensor, gradient_f: Gradient, gradient_g: Gradient) -> float:
    r"""Length of the gradient of f relative to that of h = f + g.

    .. math:: \delta(y) = \|\nabla f(y)\| / \|\nabla h(y)\|,

    of which :func:`descent_condition` needs that it is small (Yang, Huang and Wipf 2022, section 4).

    Parameters
    ----------
    y : Tensor of shape (...)
        The point.
    gradient_f, gradient_g : callable
        Each takes a tensor of the shape of `y` and returns a gradient at it, of that shape.

    Returns
    -------
    float
        Where the gradient of h is zero: infinite, or 0 if the gradient of f is zero too, at which point a step of
        :func:`aim_step` leads nowhere.

    Raises
    ------
    TypeError
        If `y` is no tensor or a gradient no callable.
    ValueError
        If `y` is not finite or holds no floating-point numbers, or a gradient is not of the shape and precision of `y`
        or not finite.

    Examples
    --------
    >>> import torch
    >>> gradients = lambda y: 2 * y, lambda y: 2 * (y - 3)
    >>> [gradient_ratio(torch.tensor([y]), *gradients) for y in (-1.0, 0.0, 1.5)]
    [0.2, 0.0, inf]
    """
    check_points(y=y)
    return _ratio(*_gradients(gradient_f, gradient_g, y))


def descent_constant(step_f: float, step_g: float, lipschitz_g: float, *, kappa: float = 0.0) -> float:
    r"""Bound on the ratio of gradients below which a step of alternating inexact minimisation does not raise h.

    .. math:: C = \sqrt{1 - \kappa}\, \frac{\alpha_2}{\alpha_2 - \alpha_1 + \alpha_1 \alpha_2 L_g}

    With :math:`\kappa = 0` this is the constant of Theorem 4.1 of Yang, Huang and Wipf (2022). Other values belong to
    their Theorem 5.1, which has :math:`\alpha_2 c_P \lambda / \sqrt 2` in place of the numerator
    :math:`\alpha_2`, with a constant :math:`c_P` that depends on the problem and is not known; see
    :func:`descent_condition` for a proof of the constant used here. Neither can be larger: for each :math:`\kappa` and
    any larger ratio of gradients there are quadratic f and g whose sum a step at :math:`\alpha_2 = 1 / L_h` raises.

    Parameters
    ----------
    step_f, step_g : float
        The step lengths :math:`\alpha_1 \le \alpha_2`.
    lipschitz_g : float
        The Lipschitz constant of the gradient of g, :math:`L_g`.
    kappa : float, default=0.0
        How much of a step the ReLU of Algorithm 2 may cut off, from 0 to 1; the default is for Algorithm 1, which has
        no ReLU, and for steps that it leaves alone.

    Returns
    -------
    float
        Infinite where the step lengths are equal and `lipschitz_g` is zero, as the step is then one along the gradient
        of h.

    Raises
    ------
    ValueError
        If a step length is not positive and finite, `step_f` is larger than `step_g`, `lipschitz_g` is negative or
        not finite, or `kappa` is not from 0 to 1.

    Examples
    --------
    >>> descent_constant(0.25, 0.25, lipschitz_g=2.0)
    2.0
    >>> descent_constant(0.25, 0.25, lipschitz_g=2.0, kappa=0.75)
    1.0
    """
    check_positive(step_f=step_f, step_g=step_g)
    _check_lipschitz_g(lipschitz_g)
    if step_f > step_g:
        raise ValueError(f"step_f must be at most step_g={step_g}, got {step_f}")
    if not (is_real(kappa) and 0 <= kappa <= 1):
        raise ValueError(f"kappa must be a number from 0 to 1, got {kappa!r}")
    error = step_g - step_f + step_f * step_g * lipschitz_g
    return math.sqrt(1 - kappa) * step_g / error if error else math.inf


@dataclass(frozen=True)
class DescentCondition:
    """Whether a step is proven not to raise h, and if not, why.

    Parameters
    ----------
    ratio : float
        The ratio of gradients at the point, as :func:`gradient_ratio` computes it.
    bound : float
        What it may be at most, as :func:`descent_constant` computes it; nan where `step_f` is larger than `step_g`.
    clipping : float
        The index :func:`~convexformer.unfolded.clipping_index` of the step of length `step_g` along the
        gradient of h; 0 for Algorithm 1, which cuts off nothing.
    failures : tuple of str
        The parts of the hypothesis that do not hold, in words.

    Examples
    --------
    >>> DescentCondition(ratio=0.5, bound=2.0, clipping=0.0, failures=()).holds
    True
    """

    ratio: float
    bound: float
    clipping: float
    failures: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether all of the hypothesis holds."""
        return not self.failures


def descent_condition(
    y: Tensor,
    gradient_f: Gradient,
    gradient_g: Gradient,
    step_f: float,
    step_g: float,
    *,
    lipschitz_g: float,
    lipschitz_h: float,
    nonnegative: bool = False,
    kappa: float | None = None,
) -> DescentCondition:
    r"""Tell whether a step of :func:`aim_step` is proven not to raise h = f + g.

    Let :math:`\delta(y) = \|\nabla f(y)\| / \|\nabla h(y)\|` and C be :func:`descent_constant`. If

    .. math:: \alpha_1 \le \alpha_2 \le 1 / L_h \quad\text{and}\quad \delta(y) \le C

    then :math:`h(y_+) \le h(y)` for Algorithm 1 (Theorem 4.1 of Yang, Huang and Wipf 2022). For Algorithm 2 this holds
    if moreover :math:`y \ge 0` and :math:`D(\alpha_2 \nabla h(y); y) \ge -\kappa`, with C as it is for that
    :math:`\kappa`. The printed form of this, Theorem 5.1, has :math:`C c_P \lambda / \sqrt 2` in place of C, where
    :math:`\lambda = \alpha_2` and :math:`c_P` is the constant of an error bound, which is not known.

    Parameters
    ----------
    y : Tensor of shape (...)
        The point.
    gradient_f, gradient_g : callable
        Each takes a tensor of the shape of `y` and returns a gradient at it, of that shape.
    step_f, step_g : float
        The step lengths :math:`\alpha_1` and :math:`\alpha_2`.
    lipschitz_g, lipschitz_h : float
        The Lipschitz constants of the gradients of g and h, :math:`L_g` and :math:`L_h`, or upper bounds on them.
    nonnegative : bool, default=False
        Whether the step ends with the ReLU (Algorithm 2).
    kappa : float, optional
        The number :math:`\kappa` of Algorithm 2. Default: the smallest that fits the point,
        :math:`-D(\alpha_2 \nabla h(y); y)`, for which the condition is the weakest.

    Returns
    -------
    DescentCondition

    Raises
    ------
    TypeError
        If `y` is no tensor or a gradient no callable.
    ValueError
        If `y` is not finite or holds no floating-point numbers, a gradient is not of the shape and precision of `y` or
        not finite, a step length or `lipschitz_h` is not positive and finite, `lipschitz_g` is negative or not finite,
        or `kappa` is not from 0 to 1, or given for Algorithm 1.

    Notes
    -----
    Neither function needs to be convex. Let :math:`s = \alpha_2 \nabla h(y)`, and let e be what sets the step apart
    from one along the gradient of h, :math:`u - \alpha_2 \nabla g(u) = y - s + e`. Then
    :math:`e = (\alpha_2 - \alpha_1) \nabla f(y) + \alpha_2 (\nabla g(y) - \nabla g(u))`, so that
    :math:`\|e\| \le (\alpha_2 - \alpha_1 + \alpha_1 \alpha_2 L_g) \|\nabla f(y)\|`, which is at most
    :math:`\sqrt{1 - \kappa} \|s\|` where :math:`\delta(y) \le C`. As the gradient of h changes by at most
    :math:`1 / \alpha_2` of the way,

    .. math:: 2 \alpha_2 (h(y_+) - h(y)) \le \|y_+ - (y - s)\|^2 - \|s\|^2.

    For Algorithm 1 the right-hand side is :math:`\|e\|^2 - \|s\|^2 \le 0`. For Algorithm 2 let :math:`w = y - s`; each
    entry of :math:`y_+ - w = \max(e, -w)` has a square of at most :math:`e_i^2 + \max(-w_i, 0)^2`, and
    :math:`\max(s_i - y_i, 0)^2 \le \max(s_i^2 - y_i^2, 0)` as :math:`y \ge 0`, so that the right-hand side is at most
    :math:`\|e\|^2 + \kappa \|s\|^2 - \|s\|^2 \le 0`.

    Examples
    --------
    >>> import torch
    >>> gradients = lambda y: 2 * y, lambda y: 2 * (y - 3)
    >>> constants = {"lipschitz_g": 2.0, "lipschitz_h": 4.0}
    >>> descent_condition(torch.tensor([-1.0]), *gradients, 0.25, 0.25, **constants)
    DescentCondition(ratio=0.2, bound=2.0, clipping=0.0, failures=())
    >>> descent_condition(torch.tensor([1.4]), *gradients, 0.25, 0.25, **constants).failures
    ('the ratio of gradients, 7, is larger than the bound, 2',)
    """
    check_points(y=y)
    check_positive(step_f=step_f, step_g=step_g, lipschitz_h=lipschitz_h)
    _check_lipschitz_g(lipschitz_g)
    if kappa is not None and not nonnegative:
        raise ValueError(f"kappa must be None for Algorithm 1, as it belongs to nonnegative=True, got {kappa!r}")
    along_f, along_h = _gradients(gradient_f, gradient_g, y)
    ratio = _ratio(along_f, along_h)
    clipping = clipping_index(step_g * along_h, y) if nonnegative else 0.0
    kappa = -clipping if kappa is None else kappa
    bound = math.nan if step_f > step_g else descent_constant(step_f, step_g, lipschitz_g, kappa=kappa)
    parts = {
        f"step_f, {step_f:.6g}, is larger than step_g, {step_g:.6g}": step_f > step_g,
        f"step_g, {step_g:.6g}, is larger than 1 / lipschitz_h, {1 / lipschitz_h:.6g}": step_g > 1 / lipschitz_h,
        "some entries of y are negative": nonnegative and bool((y < 0).any()),
        f"the clipping index, {clipping:.6g}, is below -kappa, {-kappa:.6g}": clipping < -kappa,
        f"the ratio of gradients, {ratio:.6g}, is larger than the bound, {bound:.6g}": ratio > bound,
    }
    failures = tuple(part for part, fails in parts.items() if fails)
    return DescentCondition(ratio, bound, clipping, failures)


def _gradient(name: str, gradient: Gradient, y: Tensor) -> Tensor:
    """The gradient at a point, which must be of its kind."""
    if not callable(gradient):
        raise TypeError(f"{name} must be a function that takes a point and returns a gradient, got {gradient!r}")
    value = gradient(y)
    check_points(**{"the point": y, f"what {name} returns": value})
    return value


def _gradients(gradient_f: Gradient, gradient_g: Gradient, y: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of f and of h at a point."""
    along_f = _gradient("gradient_f", gradient_f, y)
    along_h = along_f + _gradient("gradient_g", gradient_g, y)
    check_finite("the gradient of h", along_h)
    return along_f, along_h


def _ratio(along_f: Tensor, along_h: Tensor) -> float:
    """Quotient of the norms of two gradients; 0 / 0 is 0."""
    length_f, length_h = norm(along_f), norm(along_h)
    if length_h == 0:
        return math.inf if length_f else 0.0
    return length_f / length_h


def _check_lipschitz_g(value: float) -> None:
    if not (is_real(value) and 0 <= value < math.inf):
        raise ValueError(f"lipschitz_g must be a non-negative finite number, got {value!r}")
