"""Step line: a step's time as a linear function of its work, fitted as steps are measured.

The coefficients are fitted by a Kalman filter: recursive least squares in which every coefficient may drift by `_DRIFT`
per step. A coefficient keeps its value while its column does not vary. No coefficient is negative. The covariance
yields the uncertainty for steps that were never measured.
"""

from math import sqrt

_TOKEN_SHARE = 0.01
"""Initial time per decode row or prompt token, relative to the fixed time."""
_TOKEN_DEVIATION = 0.04
"""Standard deviation of this ratio."""
_CONTEXT_PER_TOKEN = 1 / 600
"""Initial time per context token, relative to the time per prompt token."""
_TOKEN_CORRELATION = 0.5
"""Initial correlation between the times per row and per prompt token, because both read the same weights."""
_DRIFT = 0.004
"""Standard deviation of a coefficient's change per step, relative to its value."""
_LEAST_DRIFTING = 0.1
"""Lower bound of a coefficient's drift, relative to its typical value, so that no coefficient stays at 0."""

Column = tuple[float, float, float]
"""Rows, prompt tokens and context of a step."""


class StepLine:
    """Coefficients for one worker's steps, and their covariance; seconds."""

    def __init__(self) -> None:
        """Start without measurements; all times are 0 until `begin`."""
        self.fixed_s = 0.0
        self.row_s = 0.0
        self.prompt_token_s = 0.0
        self.context_token_s = 0.0
        self._covariance = [0.0] * 10
        """Upper triangle, in the order of the coefficients above."""
        self._limits = [0.0] * 4
        """Upper bounds on the coefficients' variances due to drift."""
        self._floors = [0.0] * 4
        """Minimum values for determining the coefficients' drift."""

    def begin(self, column: Column, seconds: float) -> None:
        """Start with a typical device's coefficients, scaled so that this step takes this long."""
        scale = _scale(column, seconds)
        self.fixed_s = scale
        self.row_s = self.prompt_token_s = scale * _TOKEN_SHARE
        self.context_token_s = self.prompt_token_s * _CONTEXT_PER_TOKEN
        self._doubt(scale, _TOKEN_CORRELATION)

    def changed(self, column: Column, seconds: float) -> None:
        """Adopt a new speed for such steps, with the same uncertainty as before the first step.

        For steps with prompt tokens, only the time per prompt token changes. Otherwise all other times change by the
        same factor.
        """
        known, expected = self._covariance, self.expected_s(column)
        self._doubt(_scale(column, max(seconds, expected)), 0.0)
        fresh = self._covariance
        if column[1]:
            self._covariance = [*known[:2], 0.0, *known[3:5], 0.0, known[6], fresh[7], 0.0, known[9]]
            self.prompt_token_s = max(0.0, self.prompt_token_s + (seconds - expected) / column[1])
        else:
            fresh[7] = known[7]
            factor = seconds / expected
            self.fixed_s *= factor
            self.row_s *= factor
            self.context_token_s *= factor

    def _doubt(self, scale: float, correlation: float) -> None:
        token = (scale * _TOKEN_DEVIATION) ** 2
        context = token * _CONTEXT_PER_TOKEN**2
        self._covariance = [scale * scale, 0.0, 0.0, 0.0, token, correlation * token, 0.0, token, 0.0, context]
        self._limits = [scale * scale, token, token, context]
        typical = _LEAST_DRIFTING * scale
        tokens = typical * _TOKEN_SHARE
        self._floors = [typical, tokens, tokens, tokens * _CONTEXT_PER_TOKEN]

    def expected_s(self, column: Column) -> float:
        r, p, c = column
        return self.fixed_s + self.row_s * r + self.prompt_token_s * p + self.context_token_s * c

    def variance(self, column: Column) -> float:
        """Return the variance of a step's expected time, without the steps' own noise, s^2."""
        r, p, c = column
        ff, fr, fp, fc, rr, rp, rc, pp, pc, cc = self._covariance
        squares = ff + rr * r * r + pp * p * p + cc * c * c
        products = fr * r + fp * p + fc * c + rp * r * p + rc * r * c + pc * p * c
        return max(0.0, squares + 2.0 * products)

    @property
    def prompt_token_variance(self) -> float:
        """Variance of the time per prompt token, s^2."""
        return max(0.0, self._covariance[7])

    def correct(self, column: Column, error: float, noise: float, num_steps: int = 1) -> None:
        """Correct the coefficients by a step's error, or by the mean error of several equal steps.

        Args:
            column: the step.
            error: actual minus expected time, s.
            noise: standard deviation of its error if all coefficients are right, s.
            num_steps: number of steps.
        """
        r, p, c = column
        ff, fr, fp, fc, rr, rp, rc, pp, pc, cc = self._covariance
        # Covariance between each coefficient and the expected time.
        f_x = ff + fr * r + fp * p + fc * c
        r_x = fr + rr * r + rp * p + rc * c
        p_x = fp + rp * r + pp * p + pc * c
        c_x = fc + rc * r + pc * p + cc * c
        total = f_x + r_x * r + p_x * p + c_x * c + noise * noise
        if total <= 0:
            return
        inverse = 1.0 / total
        step = error * inverse
        fixed_s = self.fixed_s + f_x * step
        row_s = self.row_s + r_x * step
        prompt_s = self.prompt_token_s + p_x * step
        context_s = self.context_token_s + c_x * step
        f_g, r_g, p_g = f_x * inverse, r_x * inverse, p_x * inverse
        ff -= f_g * f_x
        rr -= r_g * r_x
        pp -= p_g * p_x
        cc -= c_x * c_x * inverse
        limits, floors, drift = self._limits, self._floors, _DRIFT * _DRIFT * num_steps
        # Only the coefficients that contribute to this step can show drift.
        if ff < limits[0]:
            ff += drift * max(fixed_s, floors[0]) ** 2
        if r and rr < limits[1]:
            rr += drift * max(row_s, floors[1]) ** 2
        if p and pp < limits[2]:
            pp += drift * max(prompt_s, floors[2]) ** 2
        if c and cc < limits[3]:
            cc += drift * max(context_s, floors[3]) ** 2
        covariance = self._covariance = [
            ff,
            fr - f_g * r_x,
            fp - f_g * p_x,
            fc - f_g * c_x,
            rr,
            rp - r_g * p_x,
            rc - r_g * c_x,
            pp,
            pc - p_g * c_x,
            cc,
        ]
        if fixed_s < 0 or row_s < 0 or prompt_s < 0 or context_s < 0:
            fixed_s, row_s, prompt_s, context_s = _non_negative([fixed_s, row_s, prompt_s, context_s], covariance)
        self.fixed_s, self.row_s, self.prompt_token_s, self.context_token_s = fixed_s, row_s, prompt_s, context_s


def _scale(column: Column, duration: float) -> float:
    """Return the fixed time for a typical device on which a step takes this long."""
    rows, prompt_tokens, context = column
    tokens = rows + prompt_tokens + context * _CONTEXT_PER_TOKEN
    return duration / (1.0 + _TOKEN_SHARE * tokens)


_AT = ((0, 1, 2, 3), (1, 4, 5, 6), (2, 5, 7, 8), (3, 6, 8, 9))
"""Positions of the covariance rows in its upper triangle."""


def _non_negative(values: list[float], covariance: list[float]) -> list[float]:
    """Return the most likely coefficients under the constraint that negative ones become 0."""
    for _ in range(len(values)):
        lowest = min(range(len(values)), key=lambda at: values[at] / sqrt(max(covariance[_AT[at][at]], 1e-300)))
        if values[lowest] >= 0:
            break
        excess = values[lowest] / max(covariance[_AT[lowest][lowest]], 1e-300)
        values = [value - covariance[_AT[lowest][at]] * excess for at, value in enumerate(values)]
        values[lowest] = 0.0
    return [max(0.0, value) for value in values]
