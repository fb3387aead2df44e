"""Unfolded layers and estimators on another device than the CPU give the same answers."""

import numpy as np
import pytest
import torch
from unfolded_cases import draw

from convexformer import UnfoldedTransformerRegressor
from convexformer.unfolded import UnfoldedTransformer

MASK = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])


@pytest.mark.parametrize("attention", ["softmax", "jacobi"])
@pytest.mark.parametrize("mode", ["aim", "joint"])
def test_layers(mode, attention, accelerator):
    tokens = draw(0, 2, 6, 4).float()
    here = UnfoldedTransformer(4, 3, mode, attention=attention, anchored=True)
    expected = here(tokens, MASK, return_energies=True)
    expected.tokens.sum().backward()
    there = UnfoldedTransformer(4, 3, mode, attention=attention, anchored=True).to(accelerator)
    output = there(tokens.to(accelerator), MASK.to(accelerator), return_energies=True)
    output.tokens.sum().backward()
    torch.testing.assert_close(output.tokens.cpu(), expected.tokens, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(output.energies.cpu(), expected.energies, rtol=1e-4, atol=1e-4)
    for ours, reference in zip(there.parameters(), here.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.cpu(), reference.grad, rtol=1e-3, atol=1e-3)


def test_estimators(accelerator):
    X = draw(1, 30, 4, 3).numpy()
    y = X[:, :, 0].mean(1)
    options = {"n_layers": 2, "n_steps": 10, "random_state": 0}
    here, there = (UnfoldedTransformerRegressor(device=device, **options).fit(X, y) for device in ("cpu", accelerator))
    np.testing.assert_allclose(there.predict(X), here.predict(X), rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(there.energies_, here.energies_, rtol=1e-3)
