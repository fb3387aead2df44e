"""Bounds on rounding, in units of the machine precision."""

from torch import finfo, float32, float64

EPS = finfo(float64).eps
DIFFERENCE = EPS ** (1 / 3)  # relative width of a central difference that is as exact as can be
SUM = 2.0**9 * EPS  # relative to the size of a sum's terms, 1e-13
CANCELLED = 2.0**19 * EPS  # relative to what is left where terms of either sign cancel, 1e-10
SINGLE = 100 * finfo(float32).eps  # gap below which products in single precision say too little, 1e-5
