"""The similarity transform against least squares solved slowly, point by point, and against Umeyama's SVD."""

import numpy as np
import numpy.typing as npt
import pytest

from visard.data.pictures import similarity, template

Array = npt.NDArray[np.float64]


def slow_least_squares(points: Array, target: Array) -> Array:
    """min over a, b, x, y of sum (a px - b py + x - qx)^2 + (b px + a py + y - qy)^2, by its normal equations."""
    normal, right = np.zeros((4, 4)), np.zeros(4)
    for (px, py), (qx, qy) in zip(points, target, strict=True):
        if np.isnan(px):
            continue
        for row, value in (((px, -py, 1.0, 0.0), qx), ((py, px, 0.0, 1.0), qy)):
            for i in range(4):
                right[i] += row[i] * value
                for j in range(4):
                    normal[i, j] += row[i] * row[j]
    a, b, x, y = np.linalg.solve(normal, right)
    return np.array([[a, -b, x], [b, a, y]])


def umeyama(points: Array, target: Array) -> Array:
    """Umeyama (1991), equations 34 to 43."""
    p, q = points - points.mean(0), target - target.mean(0)
    U, D, Vt = np.linalg.svd(q.T @ p / len(p))
    S = np.diag([1.0, np.sign(np.linalg.det(U) * np.linalg.det(Vt))])
    R = U @ S @ Vt
    c = np.trace(np.diag(D) @ S) / (p**2).sum(1).mean()
    return np.column_stack([c * R, target.mean(0) - c * R @ points.mean(0)])


@pytest.mark.parametrize("size", [112, 64, 224])
def test_against_the_slow_solutions(size: int) -> None:
    rng = np.random.default_rng(size)
    target = template(size)
    turned = rng.normal(size=(50, 5, 2)) * 30 + rng.normal(size=(50, 1, 2)) * 300
    found = similarity(turned, target)
    assert found.shape == (50, 2, 3)
    for points, matrix in zip(turned, found, strict=True):
        np.testing.assert_allclose(matrix, slow_least_squares(points, target), rtol=1e-7, atol=1e-8)
        np.testing.assert_allclose(matrix, umeyama(points, target), rtol=1e-7, atol=1e-8)


def test_against_the_slow_solution_with_unknown_points() -> None:
    points = np.random.default_rng(0).normal(size=(5, 2)) * 30
    points[[1, 4]] = np.nan
    np.testing.assert_allclose(similarity(points, template(112)), slow_least_squares(points, template(112)), rtol=1e-9)


def test_literal_values() -> None:
    """Twice as large, turned by 90 degrees, shifted by (10, 20): (x, y) -> (10 - 2 y, 20 + 2 x)."""
    points = np.array([(0.0, 0.0), (1.0, 0.0), (1.0, 1.0), (0.0, 1.0), (5.0, 7.0)])
    target = np.array([(10.0, 20.0), (10.0, 22.0), (8.0, 22.0), (8.0, 20.0), (-4.0, 30.0)])
    np.testing.assert_allclose(similarity(points, target), [[0, -2, 10], [2, 0, 20]], atol=1e-12)
    np.testing.assert_allclose(template(112)[0], (38.2946, 51.6963))
    np.testing.assert_allclose(template(224)[4], (141.4598, 184.4082))
