"""Every output is compared with float64 before anything is timed.

Exact variants have a tolerance by dtype, ours a tighter one than rivals. Sampled ones are run with
several seeds. The error of their mean must be what the estimator's variance says:

    S draws of head h       sum_j p_j |v_j|^2 / S - |o|^2 / S         (multinomial; an upper bound
                                                                      in practice for the others)
    "shared"                sum_j p_j^2 (1 - pi_j) / pi_j |v_j|^2     (Poisson; likewise)

with ``pi_j = min(1, S sqrt(sum_h p_hj^2))``. Two finer tests take their bounds from the spread over
the seeds: the slope ``<mean, o> / <o, o>``, which is 1 without bias, and the mean over pairs of
seeds of ``<o_i - o, o_j - o>``, which is |bias|^2 on average. A wrong variant is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

#: Largest relative RMS error of ours, by dtype; twice what was measured at any shape, or more.
OWN = {torch.bfloat16: 0.005, torch.float16: 0.002, torch.float32: 2e-5}

#: The same of a rival, by the dtype that it reads.
TOLERANCE = {torch.bfloat16: 0.03, torch.float16: 0.01, torch.float32: 1e-4}

#: Error from which a rival is wrong rather than imprecise.
GROSS = 0.2

#: Seeds averaged for a sampled variant, and the multiple of the expected error that is refused.
SEEDS, LIMIT = 16, 2.0

#: Standard errors that a bias may seem to have; without one, Student's t of 16 seeds exceeds this
#: once in 40,000 times.
SPREADS = 6.0

#: Rows of V scored at once in float64.
_BLOCK = 2**17


class WrongResultError(Exception):
    """A variant's output is not attention; the message names it."""


class Exact:
    """Attention of one set in float64, and the variances of the estimators.

    Parameters
    ----------
    q : Tensor
        ``[B, Hq, D]``.
    k, v : Tensor
        ``[B, Hkv, L, D]``.
    samples : sequence of int
        The S that will be asked for.

    Attributes
    ----------
    out : Tensor
        float64 ``[B, Hq, D]``.
    """

    def __init__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, samples: Sequence[int] = ()
    ) -> None:
        batch, heads, dim = q.shape
        kv_heads = k.shape[1]
        grouped = q.double().view(batch, kv_heads, heads // kv_heads, dim) * dim**-0.5
        self.out = torch.empty_like(grouped)
        self._square = 0.0  # sum over heads of sum_j p_j |v_j|^2
        self._shared = dict.fromkeys(samples, 0.0)
        for b in range(batch):
            for h in range(kv_heads):
                self._head(grouped[b, h], k[b, h], v[b, h], self.out[b, h])
        self.out = self.out.view(batch, heads, dim)

    def _head(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        p = torch.cat([q @ part.double().T for part in k.split(_BLOCK)], -1).softmax(-1)  # [G, L]
        out.zero_()
        norms = []
        for weights, part in zip(p.split(_BLOCK, -1), v.split(_BLOCK), strict=True):
            rows = part.double()
            out += weights @ rows
            norms.append(rows.square().sum(-1))
        norm = torch.cat(norms)  # [L]
        self._square += float((p @ norm).sum())
        root = p.square().sum(0).sqrt()
        for samples in self._shared:
            inclusion = (samples * root).clamp(max=1).clamp(min=1e-300)
            variance = p.square() * (1 - inclusion) / inclusion * norm
            self._shared[samples] += float(variance.sum())

    def expected(self, method: str, samples: int) -> float:
        """Relative RMS error that one seed of a sampled method may have."""
        power = float(self.out.square().sum())
        if method == "shared":
            variance = self._shared[samples]
        else:
            variance = (self._square - power) / samples
        return math.sqrt(max(variance, 0.0) / power)

    def error(self, out: torch.Tensor) -> float:
        """Relative RMS error of an output ``[B, Hq, D]``."""
        difference = out.double().reshape(self.out.shape) - self.out
        return math.sqrt(float(difference.square().sum() / self.out.square().sum()))

    def check_exact(self, name: str, out: torch.Tensor, dtype: torch.dtype) -> float:
        """Return the error of an exact variant that computes in ``dtype``.

        Raises
        ------
        WrongResultError
            It is above the tolerance, or not a number.
        """
        return self._verdict(name, self.error(out), OWN[dtype])

    def check_peer(self, name: str, out: torch.Tensor, dtype: torch.dtype) -> tuple[float, bool]:
        """Return the error of a rival that reads ``dtype``, and whether it is over the tolerance.

        Raises
        ------
        WrongResultError
            The error is gross, or not a number: this is no attention.
        """
        error = self._verdict(name, self.error(out), GROSS)
        return error, error > TOLERANCE[dtype]

    def check_sampled(
        self, name: str, run: Callable[[int], torch.Tensor], method: str, samples: int
    ) -> float:
        """Return the error of a single seed; ``run`` takes a seed.

        Raises
        ------
        WrongResultError
            The mean over seeds is further off than the estimator's variance or their spread allow.
        """
        outs = [run(seed) for seed in range(SEEDS)]
        every = torch.stack([out.double().reshape(self.out.shape) for out in outs])
        rounding, title = OWN[outs[0].dtype], f"{name}, mean of {SEEDS} seeds"
        limit = LIMIT * self.expected(method, samples) / math.sqrt(SEEDS) + rounding
        self._verdict(title, self.error(every.mean(0)), limit)
        self._check_bias(title, every.flatten(1), rounding)
        return self.error(outs[0])

    def _check_bias(self, title: str, every: torch.Tensor, rounding: float) -> None:
        """Refuse outputs ``[n, Hq * D]`` of n seeds whose mean is not the exact one."""
        n, wanted = len(every), self.out.flatten()
        power = wanted.square().sum()
        slopes = every @ wanted / power
        off = abs(float(slopes.mean()) - 1)
        limit = SPREADS * float(slopes.std()) / math.sqrt(n) + rounding
        self._verdict(title, off, limit, "slope is off by")
        pairs = ~torch.eye(n, dtype=torch.bool, device=every.device)
        errors, centred = every - wanted, every - every.mean(0)
        bias = float((errors @ errors.T)[pairs].mean() / power)
        # A pair counts twice among n (n - 1). Centring shifts all products alike: their deviation.
        spread = float((centred @ centred.T)[pairs].std() / power) * math.sqrt(2 / (n * (n - 1)))
        self._verdict(title, bias, SPREADS * spread + rounding**2, "squared bias over |o|^2 is")

    @staticmethod
    def _verdict(name: str, error: float, limit: float, what: str = "relative RMS error") -> float:
        if not error <= limit:  # NaN too
            raise WrongResultError(
                f"{name}: {what} {error:.3g} against float64, at most {limit:.3g}"
            )
        return error
