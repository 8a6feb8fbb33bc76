"""How far colours are apart for those who see fewer of them."""

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]

SIGHTS = {
    "all": np.eye(3),
    "no red": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "no green": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "no blue": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
"""Machado, Oliveira and Fernandes 2009, severity 1.0, for linear RGB."""
_TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
_WHITE = np.array([0.9505, 1.0, 1.089])


def distance(one: tuple[int, ...], other: tuple[int, ...], sight: str) -> float:
    """CIE76 between two sRGB colours (0 to 255): 2.3 is just noticeable, side by side."""
    return float(np.linalg.norm(_lab(one, sight) - _lab(other, sight)))


def _lab(color: tuple[int, ...], sight: str) -> Numbers:
    part = np.array(color) / 255
    linear = np.where(part <= 0.04045, part / 12.92, ((part + 0.055) / 1.055) ** 2.4)
    xyz = _TO_XYZ @ np.clip(SIGHTS[sight] @ linear, 0, 1) / _WHITE
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])
