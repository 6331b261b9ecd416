"""The outer step of IsoLoCo: equal singular values for the mean update of each matrix (2607.03011)."""

from __future__ import annotations

import numpy as np
import pytest

from narrows.ps.store.changes import FloatArray
from narrows.ps.store.spectrum import equal_spectrum


def reference(update: FloatArray) -> FloatArray:
    """mean(S) U V', by NumPy's singular value decomposition; directions without length take no part."""
    u, s, v = np.linalg.svd(update.astype(np.float64), full_matrices=False)
    out: FloatArray = (s.mean() * (u * (s > 1e-6 * s[0])) @ v).astype(np.float32)
    return out


def matrix(rows: int, columns: int, seed: int = 0) -> FloatArray:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (5, 5), (3, 40), (40, 3), (96, 64)], ids=str)
def test_it_is_that_of_the_singular_value_decomposition(shape: tuple[int, int]) -> None:
    update = matrix(*shape)
    wanted = reference(update)
    equal_spectrum(update)
    np.testing.assert_allclose(update, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())


def test_small_singular_values_count_as_much_as_large_ones() -> None:
    """Of 1 to 1e-5: float32 has them all."""
    u, _ = np.linalg.qr(matrix(6, 6, 1))
    v, _ = np.linalg.qr(matrix(6, 6, 2))
    sizes = np.logspace(0, -5, 6)
    update = ((u * sizes) @ v).astype(np.float32)
    equal_spectrum(update)
    np.testing.assert_allclose(np.linalg.svd(update, compute_uv=False), np.full(6, sizes.mean()), rtol=1e-3)


def test_directions_without_length_take_no_part() -> None:
    update = np.outer(np.arange(1, 5), np.arange(3)).astype(np.float32)  # one singular value is not 0, of three
    wanted = update / 3
    equal_spectrum(update)
    np.testing.assert_allclose(update, wanted, rtol=1e-5)
    for same in (np.zeros((3, 2), np.float32), np.full((2, 2), np.inf, np.float32)):
        left = same.copy()
        equal_spectrum(left)
        np.testing.assert_array_equal(left, same)


def test_huge_and_tiny_values_do_not_overflow() -> None:
    for scale in (1e30, 1e-30):
        update = matrix(4, 6) * np.float32(scale)
        wanted = reference(update)
        equal_spectrum(update)
        np.testing.assert_allclose(update, wanted, rtol=1e-3, atol=1e-4 * np.abs(wanted).max())
