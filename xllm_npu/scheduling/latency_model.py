"""How long a step will take: a linear model fitted to the steps just seen.

seconds = c0 + c1 * prefill tokens + c2 * prefill tokens * context + c3 * decode sequences + c4 * decode context,
least squares over the last WINDOW steps, refitted every REFIT steps. Says None until it has seen enough.
"""

from __future__ import annotations

from collections import deque

import numpy as np

WINDOW, REFIT, ENOUGH = 256, 16, 16


class LatencyModel:
    def __init__(self) -> None:
        self._steps: deque[tuple[tuple[float, ...], float]] = deque(maxlen=WINDOW)
        self._weights: np.ndarray | None = None
        self._since_fit = 0

    @staticmethod
    def features(prefill: float, prefill_context: float, decodes: float, decode_context: float) -> tuple[float, ...]:
        return (1.0, prefill, prefill_context, decodes, decode_context)

    def observe(self, features: tuple[float, ...], seconds: float) -> None:
        self._steps.append((features, seconds))
        self._since_fit += 1
        if len(self._steps) >= ENOUGH and self._since_fit >= REFIT:
            self._fit()

    def predict(self, features: tuple[float, ...]) -> float | None:
        if self._weights is None:
            return None
        return float(np.dot(self._weights, features))

    def _fit(self) -> None:
        """Ridge-damped so that columns never seen stay at zero; negative costs make no sense and are cut off."""
        x = np.array([f for f, _ in self._steps])
        y = np.array([s for _, s in self._steps])
        scale = np.maximum(np.abs(x).max(axis=0), 1e-9)
        x = x / scale
        weights = np.linalg.solve(x.T @ x + 1e-6 * np.eye(x.shape[1]), x.T @ y)
        self._weights = np.maximum(weights, 0.0) / scale
        self._since_fit = 0
