"""Functions, tokens and graphs that the tests of unfolded transformers share."""

import torch

from convexformer.unfolded import Rho


class SquareRoot(Rho):
    """A concave function of the tests' own, whose derivative is no registered one."""

    def value(self, z):
        return 2 * (z + 1).sqrt()

    def derivative(self, z):
        return (z + 1).rsqrt()


class Capped(Rho):
    """Concave with a corner-free flat end; its derivative is no positive definite kernel."""

    def value(self, z):
        return torch.where(z < 1, z - z.square() / 2, 0.5)

    def derivative(self, z):
        return (1 - z).clamp_min(0)


RHOS = ["exp", "log1", "log2", SquareRoot(), Capped()]
RHO_IDS = ["exp", "log1", "log2", "sqrt", "capped"]


def draw(seed, *shape, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(shape, generator=generator, dtype=torch.float64)


def random_graph(seed, n, share=0.5):
    generator = torch.Generator().manual_seed(seed)
    upper = torch.triu(torch.rand(n, n, generator=generator) < share, 1)
    return upper | upper.mT


def autograd_gradient(function, tokens):
    tokens = tokens.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(function(tokens).sum(), tokens)
    return gradient
