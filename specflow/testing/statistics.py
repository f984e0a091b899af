"""Statistical gates: does a sample follow a law, and how small a bias would have been seen?

Everything is stated in terms of total variation, half the sum of absolute differences of two laws, because it has a
meaning on its own: the largest change in the probability of any event. The guarantees rest on
sum (p'-p)^2/p >= 4 TV(p', p)^2 (Cauchy-Schwarz), so a law at distance TV shifts the chi-square statistic by a
noncentrality of at least 4 N TV^2 whatever its shape, and `detectable_total_variation` holds for the worst case.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

ALPHA = 1e-4  # chance that a right sampler fails one gate
POWER = 0.99  # chance with which the stated bias is caught
LEAST_EXPECTED = 5.0  # cells with fewer expected samples are pooled


@dataclass(frozen=True)
class Gate:
    """Outcome of one chi-square test."""

    statistic: float
    degrees: int  # of freedom
    p_value: float
    num_samples: int
    total_variation: float  # observed, over the pooled cells
    detectable: float  # smallest total variation that is caught with probability `POWER`
    alpha: float

    @property
    def passed(self) -> bool:
        """True unless the sample is less likely than alpha under the law."""
        return self.p_value >= self.alpha

    def sentence(self) -> str:
        """The result in one line."""
        verdict = "passed" if self.passed else "FAILED"
        return (
            f"{verdict}, p = {self.p_value:.2g} (fails below {self.alpha:.2g}): chi-square {self.statistic:.1f} with "
            f"{self.degrees} degrees of freedom, {self.num_samples} samples, total variation "
            f"{self.total_variation:.4f}; a bias of {self.detectable:.3f} would be caught with probability {POWER:g}"
        )


def chi_square_gate(observed: np.ndarray, law: np.ndarray, alpha: float = ALPHA) -> Gate:
    """Test counts [cells] against probabilities [cells] (Pearson). Cells that expect too few samples are pooled.

    A sample in a cell of probability zero fails the gate outright.
    """
    counts, law = np.asarray(observed, dtype=np.float64), np.asarray(law, dtype=np.float64)
    total = counts.sum()
    impossible = counts[law == 0].sum()
    counts, expected = _pooled(counts, law / law.sum() * total)
    statistic = float(((counts - expected) ** 2 / expected).sum()) if not impossible else math.inf
    distance = 0.5 * float(np.abs(counts - expected).sum() / total) if total else 0.0
    degrees = max(len(counts) - 1, 1)
    detectable = detectable_total_variation(degrees, total, alpha)
    return Gate(statistic, degrees, survival(statistic, degrees), int(total), distance, detectable, alpha)


def two_sample_gate(first: np.ndarray, second: np.ndarray, alpha: float = ALPHA) -> Gate:
    """Test whether two sets of counts [cells] come from one law (homogeneity). Power counts both samples."""
    first, second = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    n, m = first.sum(), second.sum()
    share = n / (n + m)
    together = first + second
    order_first, expected = _pooled(first, together * share, LEAST_EXPECTED * max(share, 1 - share))
    both = expected / share
    statistic = float(((order_first - expected) ** 2 / (both * share * (1 - share))).sum())
    degrees = max(len(expected) - 1, 1)
    distance = 0.5 * float(np.abs(order_first / n - (both - order_first) / m).sum())
    detectable = detectable_total_variation(degrees, n * m / (n + m), alpha)
    return Gate(statistic, degrees, survival(statistic, degrees), int(n + m), distance, detectable, alpha)


def total_variation(observed: np.ndarray, law: np.ndarray) -> float:
    """Distance between the frequencies of counts [cells] and probabilities [cells]."""
    return 0.5 * float(np.abs(observed / observed.sum() - law / law.sum()).sum())


def total_variation_bound(cells: int, num_samples: float, alpha: float = 1e-6) -> float:
    """Observed total variation that a right sampler exceeds with probability at most alpha (McDiarmid)."""
    return 0.5 * math.sqrt(cells / num_samples) + math.sqrt(math.log(1 / alpha) / (2 * num_samples))


def detectable_total_variation(degrees: int, num_samples: float, alpha: float = ALPHA, power: float = POWER) -> float:
    """Smallest total variation that a chi-square test catches with at least this power, whatever its shape."""
    if num_samples <= 0:
        return 1.0
    return min(1.0, math.sqrt(_least_noncentrality(degrees, alpha, power) / (4 * num_samples)))


def samples_needed(degrees: int, bias: float, alpha: float = ALPHA, power: float = POWER) -> int:
    """Sample size with which every law at total variation `bias` or more is caught with this power."""
    return math.ceil(_least_noncentrality(degrees, alpha, power) / (4 * bias**2))


def survival(statistic: float, degrees: int) -> float:
    """P(chi-square with these degrees of freedom > statistic)."""
    if math.isinf(statistic):
        return 0.0
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def critical_value(degrees: int, alpha: float) -> float:
    """Statistic that is exceeded with probability alpha."""
    return _bisect(lambda value: survival(value, degrees) < alpha, degrees + 10.0)


def noncentral_survival(statistic: float, degrees: int, noncentrality: float) -> float:
    """P(noncentral chi-square > statistic): a Poisson mixture of central ones."""
    mean = noncentrality / 2
    spread = 12 * math.sqrt(mean) + 30
    terms = torch.arange(max(0, math.floor(mean - spread)), math.ceil(mean + spread) + 1, dtype=torch.float64)
    weights = torch.exp(terms * math.log(mean) - mean - torch.lgamma(terms + 1)) if mean > 0 else (terms == 0).double()
    tails = torch.special.gammaincc(degrees / 2 + terms, torch.full_like(terms, statistic / 2))
    return float((weights * tails).sum())


def _least_noncentrality(degrees: int, alpha: float, power: float) -> float:
    critical = critical_value(degrees, alpha)
    return _bisect(lambda value: noncentral_survival(critical, degrees, value) > power, critical)


def _bisect(reached: Callable[[float], bool], start: float) -> float:
    """Smallest value with `reached(value)`, which is monotone, to a relative precision of 1e-6."""
    low, high = 0.0, start
    while not reached(high):
        low, high = high, 2 * high
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


def _pooled(counts: np.ndarray, expected: np.ndarray, least: float = LEAST_EXPECTED) -> tuple[np.ndarray, np.ndarray]:
    """Merge the cells that expect fewer than `least`, rarest first, into cells that expect enough."""
    order = np.argsort(-expected, kind="stable")
    counts, expected = counts[order], expected[order]
    enough = int((expected >= least).sum())
    rest_counts, rest_expected = counts[enough:].sum(), expected[enough:].sum()
    if rest_expected >= least or enough == 0:
        return np.append(counts[:enough], rest_counts), np.append(expected[:enough], rest_expected)
    counts, expected = counts[:enough].copy(), expected[:enough].copy()
    counts[-1] += rest_counts
    expected[-1] += rest_expected
    return counts, expected
