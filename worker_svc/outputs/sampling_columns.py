"""All rows' sampling parameters, as arrays indexed by row; plan.proto documents each one."""

import numpy as np
import torch

from kernels.sampling import SamplingTensors
from worker_svc.device.upload import upload
from worker_svc.interface.arrays import IntArray
from worker_svc.interface.plan import NO_LOGPROBS, SamplingParams


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

    def set(self, row: int, params: SamplingParams) -> None:
        """Set the parameters of one row."""
        self.temperature[row] = params.temperature
        self.top_k[row] = params.top_k
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.typical_p[row] = params.typical_p
        self.seed[row] = params.seed
        self.choice[row] = params.choice
        self.logprobs[row] = params.logprobs
        self.prompt_logprobs[row] = params.prompt_logprobs

    def tensors(self, rows: IntArray, positions: torch.Tensor) -> SamplingTensors:
        """Return the parameters of rows on the device, for tokens at `positions` `[len(rows)] int32`."""
        device = positions.device
        random = self.temperature[rows] > 0
        truncated = (self.top_k[rows] > 0) | (self.top_p[rows] < 1) | (self.min_p[rows] > 0)
        typical = random & (self.typical_p[rows] < 1)
        floats = upload(np.concatenate((self.temperature[rows], self.top_p[rows], self.min_p[rows])), device)
        ints = upload(np.concatenate((self.top_k[rows], self.choice[rows])), device)
        temperature, top_p, min_p = floats.chunk(3)
        top_k, choice = ints.chunk(2)
        return SamplingTensors(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=upload(self.seed[rows], device),
            choice=choice,
            position=positions,
            any_random=bool(random.any()),
            any_truncation=bool((random & truncated).any()),
            typical_p=upload(self.typical_p[rows], device) if typical.any() else None,
        )
