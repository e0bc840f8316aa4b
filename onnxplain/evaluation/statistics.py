"""From sums per picture to numbers with bootstrap intervals, and to differences of methods."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import DegenerateDataWarning, bootstrap

from onnxplain.evaluation.measures import Measure

__all__ = ["CONFIDENCE", "LEAST_PICTURES", "Interval", "Statistics"]

CONFIDENCE = 0.95
LEAST_PICTURES = 6
"""Of fewer there is no interval: even if all of five agree, that happens by chance in 1 of 16."""
_RESAMPLES_AT_ONCE = 50
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A number, its bootstrap interval, and what it was measured on.

    Attributes:
        value: None where nothing was measured.
        low, high: Of the interval; None where fewer than `LEAST_PICTURES` were measured.
        count: Questions (or pixels) in the denominator.
    """

    value: float | None
    low: float | None
    high: float | None
    count: int = 0

    @property
    def excludes_zero(self) -> bool:
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


class Statistics:
    """Ratios of sums over pictures, and how they vary if other pictures had been drawn.

    The bootstrap draws pictures, not questions: what is asked about one picture stays together. The
    same draws serve every method, so that differences of two methods are paired.

    Args:
        parts: Names of the ratios.
        sums: float64 [pictures, methods, parts, 2]: numerators and denominators.
        methods: Names.
        resamples: How many times pictures are drawn, with replacement.
        seed: Of the draws.
    """

    def __init__(
        self,
        parts: Sequence[str],
        sums: Floats,
        methods: Sequence[str],
        *,
        resamples: int,
        seed: int,
    ) -> None:
        self._part = {name: i for i, name in enumerate(parts)}
        self._method = {name: i for i, name in enumerate(methods)}
        self._totals = sums.sum(axis=0)
        self._ratios = _ratios(self._totals)
        self._pictures = (sums[..., 1] > 0).sum(axis=0)
        self._drawn = _drawn(sums, resamples, seed)

    def value(self, method: str, measure: Measure) -> Interval:
        """A method's number."""
        i = self._method[method]
        return self._interval(
            self._mean(self._ratios, i, measure), self._mean(self._drawn, i, measure), i, measure
        )

    def difference(self, method: str, other: str, measure: Measure) -> Interval:
        """A method's number less another one's, on the same pictures."""
        i, j = self._method[method], self._method[other]
        return self._interval(
            self._mean(self._ratios, i, measure) - self._mean(self._ratios, j, measure),
            self._mean(self._drawn, i, measure) - self._mean(self._drawn, j, measure),
            i,
            measure,
        )

    def _mean(self, ratios: Floats, method: int, measure: Measure) -> Floats:
        return np.asarray(
            np.mean([ratios[method, self._part[part]] for part in measure.parts], axis=0)
        )

    def _interval(self, value: Floats, drawn: Floats, method: int, measure: Measure) -> Interval:
        part = self._part[measure.parts[0]]
        count = int(self._totals[method, part, 1])
        if np.isnan(value):
            return Interval(None, None, None, count)
        known = drawn[~np.isnan(drawn)]  # some draws may have nothing that was measured
        if self._pictures[method, part] < LEAST_PICTURES:
            return Interval(float(value), None, None, count)
        outside = (1 - CONFIDENCE) / 2
        low, high = np.quantile(known, (outside, 1 - outside))
        return Interval(float(value), float(low), float(high), count)


def _ratios(totals: Floats) -> Floats:
    """[..., 2] to [...]; NaN where the denominator is 0."""
    empty = totals[..., 1] == 0
    return np.where(empty, np.nan, totals[..., 0] / np.where(empty, 1, totals[..., 1]))


def _drawn(sums: Floats, resamples: int, seed: int) -> Floats:
    """The ratios of pictures drawn with replacement, [methods, parts, resamples]."""
    pictures, *inner, _ = sums.shape
    flat = sums.reshape(pictures, -1)
    if pictures < LEAST_PICTURES:
        return np.empty((*inner, 0))

    def statistic(chosen: NDArray[np.intp], axis: int) -> Floats:
        draws = np.atleast_2d(chosen)
        times = np.stack([np.bincount(one, minlength=pictures) for one in draws])
        ratios = _ratios((times.astype(np.float64) @ flat).reshape(len(draws), *inner, 2))
        return ratios.transpose(1, 2, 0) if chosen.ndim == 2 else ratios[0]

    with warnings.catch_warnings():
        # Its own intervals, which are not used, are NaN where a ratio was not measured.
        warnings.simplefilter("ignore", DegenerateDataWarning)
        result = bootstrap(
            (np.arange(pictures),),
            statistic,
            n_resamples=resamples,
            batch=_RESAMPLES_AT_ONCE,
            vectorized=True,
            method="percentile",
            rng=np.random.default_rng(seed),
        )
    return np.asarray(result.bootstrap_distribution)
