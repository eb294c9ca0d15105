"""Latent attention: every kernel computes the same, and positions count."""

from dataclasses import replace

import pytest
import torch
from support.latent_variants import LATENT_VARIANTS
from support.model_variants import build, tokens


@pytest.mark.parametrize("backend", ["auto", "local"])
def test_every_kernel_computes_the_same(backend):
    shape = LATENT_VARIANTS["wide values"]
    inputs = tokens(shape)
    torch.testing.assert_close(build(shape, backend=backend)(inputs), build(shape)(inputs))


def test_what_rotates_decides_whether_order_matters():
    """Without rotation by positions, two earlier tokens may change places."""
    shape = replace(LATENT_VARIANTS["queries of a latent vector"], rotary_base=1e30, num_layers=1)
    inputs = tokens(shape)[:, :3]
    swapped = inputs[:, [1, 0, 2]]
    model = build(shape)
    assert (model(inputs)[:, 2] - model(swapped)[:, 2]).abs().max() > 1e-3
