"""Sampling parameters of all rows, as arrays indexed by row; plan.proto documents each one."""

import math

import numpy as np

from protos.quire.plan.v1 import plan_pb2
from shared.frames import MAX_LOGPROBS
from worker_svc.interface.errors import PlanError

_INT32_MAX = 0x7FFFFFFF
NO_LOGPROBS = -1
"""The row needs no log-probabilities; 0 means that of the sampled token only."""


class SamplingColumns:
    """Sampling parameters of all rows, one array per parameter."""

    __slots__ = (
        "choice", "logprobs", "min_p", "prompt_logprobs", "seed", "temperature", "top_k", "top_p", "typical_p",
    )  # fmt: skip

    def __init__(self, max_rows: int) -> None:
        self.temperature = np.zeros(max_rows, np.float32)
        self.top_k = np.zeros(max_rows, np.int32)
        self.top_p = np.ones(max_rows, np.float32)
        self.min_p = np.zeros(max_rows, np.float32)
        self.typical_p = np.ones(max_rows, np.float32)
        self.seed = np.zeros(max_rows, np.int64)
        self.choice = np.zeros(max_rows, np.int32)
        self.logprobs = np.full(max_rows, NO_LOGPROBS, np.int32)
        self.prompt_logprobs = np.full(max_rows, NO_LOGPROBS, np.int32)

    def set(self, row: int, params: plan_pb2.SamplingParams) -> None:
        """Set the parameters of one row.

        Raises:
            PlanError: a parameter is out of range.
        """
        if not (math.isfinite(params.temperature) and params.temperature >= 0):
            raise PlanError("admission: temperature is negative or not finite")
        shares = (params.top_p, params.min_p, params.typical_p)
        if not all(0 <= share <= 1 for share in shares) or max(params.top_k, params.choice) > _INT32_MAX:
            raise PlanError("admission: top_p, min_p, typical_p, top_k or choice is out of range")
        if max(params.logprobs, params.prompt_logprobs) > MAX_LOGPROBS:
            raise PlanError(f"admission: more than {MAX_LOGPROBS} log-probabilities per token")
        self.temperature[row] = params.temperature
        self.top_k[row] = params.top_k
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.typical_p[row] = params.typical_p or 1
        self.seed[row] = params.seed - (1 << 64) if params.seed >> 63 else params.seed  # the same 64 bits, signed
        self.choice[row] = params.choice
        self.logprobs[row] = params.logprobs if params.HasField("logprobs") else NO_LOGPROBS
        self.prompt_logprobs[row] = params.prompt_logprobs if params.HasField("prompt_logprobs") else NO_LOGPROBS
