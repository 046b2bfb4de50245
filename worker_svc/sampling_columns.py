"""How each row chooses its tokens, as arrays indexed by row; the meaning of each column is that of plan.proto."""

import math

import numpy as np

from protos.quire.plan.v1 import plan_pb2
from worker_svc.errors import PlanError

_INT32_MAX = 0x7FFFFFFF


class SamplingColumns:
    """The sampling parameters of all rows."""

    __slots__ = ("choice", "min_p", "seed", "temperature", "top_k", "top_p")

    def __init__(self, max_rows: int) -> None:
        self.temperature = np.zeros(max_rows, np.float32)
        self.top_k = np.zeros(max_rows, np.int32)
        self.top_p = np.ones(max_rows, np.float32)
        self.min_p = np.zeros(max_rows, np.float32)
        self.seed = np.zeros(max_rows, np.int64)
        self.choice = np.zeros(max_rows, np.int32)

    def set(self, row: int, params: plan_pb2.SamplingParams) -> None:
        """Sets the parameters of one row.

        Raises:
            PlanError: a parameter out of range.
        """
        if not (math.isfinite(params.temperature) and params.temperature >= 0):
            raise PlanError("admission: a temperature that is negative or not finite")
        shares = (params.top_p, params.min_p)
        if not all(0 <= share <= 1 for share in shares) or max(params.top_k, params.choice) > _INT32_MAX:
            raise PlanError("admission: top_p, min_p, top_k or choice out of range")
        self.temperature[row] = params.temperature
        self.top_k[row] = params.top_k
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seed[row] = params.seed - (1 << 64) if params.seed >> 63 else params.seed  # the same 64 bits, signed
        self.choice[row] = params.choice
