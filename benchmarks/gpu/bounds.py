"""Lower bounds on times: the bytes that must be moved, at the bandwidth of a GPU."""

from __future__ import annotations

# Memory bandwidth in bytes per second, from the data sheets. The first is the card of the paper.
BANDWIDTH = {
    "Quadro RTX 8000": 672e9,
    "A100 40 GB": 1555e9,
    "RTX 4090": 1008e9,
    "H100 SXM": 3350e9,
    "RTX 5090": 1792e9,
}
SIZES = ((65536, 8), (1048576, 8), (196608, 16), (262144, 64))
# Seconds of one log-likelihood on a Quadro RTX 8000 with torch's functions, as plotted in the paper.
PAPER = {(65536, 8): 0.00104, (1048576, 8): 0.00193, (65536, 64): 0.00128, (262144, 64): 0.00220}


def least_seconds(S: int, R: int, bandwidth: float) -> float:
    """Both passes in float32: P read twice, its gradient written once, and the vectors of S entries."""
    return 4 * S * (3 * R + 6) / bandwidth


def least_seconds_forward(S: int, R: int, bandwidth: float) -> float:
    """The forward pass in float32: P, diagonal, value and mean read once."""
    return 4 * S * (R + 3) / bandwidth
