"""Kernel benchmark on the current device, relative to the device's limits.

Two limits are measured first: the bandwidth of a large copy and the rate of a large matrix product. Each measurement
counts the necessary bytes and operations, and reports its fraction of the limit that applies. Attention is also
compared with torch's SDPA over dense keys, which has no block tables to follow.

On a CPU the same code measures the CPU paths. Such a run only tests the benchmark, and the output says so.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels.activation import silu_mul
from kernels.kv_quantised import DTYPES, QUANTISED, cached_size, to_quantised
from kernels.norm import rms_norm
from kernels.paged_attention import paged_attention, schedule_decode
from kernels.qkv import rotate_and_cache
from kernels.sampling import SamplingTensors, sample


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured limits of the device."""

    copy_bytes_per_s: float
    """Bytes read and written per second by a copy of a large tensor."""
    gemm_flop_per_s: float
    """Operations per second for a large matrix product in the measured dtype."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Measurement of one kernel at one size."""

    name: str
    seconds: float
    """Median time of a call."""
    bytes: float
    """Least number of bytes that must be read or written."""
    flop: float
    peer: str = ""
    peer_seconds: float = 0.0

    def share(self, ceilings: Ceilings) -> float:
        """Return the shortest possible time divided by the measured time."""
        least = max(self.bytes / ceilings.copy_bytes_per_s, self.flop / ceilings.gemm_flop_per_s)
        return least / self.seconds


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the measurements."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocab_size: int
    decode: tuple[tuple[int, int], ...]
    """(rows, context) of each decode batch."""
    prefill: tuple[int, ...]
    """Tokens of each prompt."""
    copy_bytes: int
    gemm_side: int


LLAMA_8B = Sizes(
    32, 8, 128, 4096, 14336, 128256,
    decode=((1, 1024), (1, 32768), (8, 1024), (64, 1024), (256, 1024), (64, 8192)),
    prefill=(2048, 8192),
    copy_bytes=2 << 30,
    gemm_side=8192,
)  # fmt: skip
TINY = Sizes(4, 2, 64, 256, 512, 1000, decode=((1, 64), (4, 100)), prefill=(128,), copy_bytes=1 << 20, gemm_side=128)


_AHEAD_CYCLES = 600_000
"""GPU cycles to wait before each call (0.3 ms). All kernels of the call are enqueued by then, so that the time does not
include the launches on the host."""


def median_seconds(run: Callable[[], object], device: torch.device, budget_s: float = 0.3) -> float:
    """Return the median time of a call on the device, after a warm-up; on a GPU each call has a cold L2 cache."""
    run()
    if device.type == "cpu":
        times: list[float] = []
        deadline = time.perf_counter() + budget_s / 20  # Run once with a short time limit.
        while not times or (time.perf_counter() < deadline and len(times) < 100):
            began = time.perf_counter()
            run()
            times.append(time.perf_counter() - began)
        return statistics.median(times)
    flushed = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    torch.cuda.synchronize()
    count = max(5, min(200, int(budget_s / max(time.perf_counter() - began, 1e-5))))
    pairs = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        for _ in range(count)
    ]
    for first, second in pairs:
        flushed.fill_(1)  # Evict the data of the last call from the L2 cache.
        torch.cuda._sleep(_AHEAD_CYCLES)  # type: ignore[no-untyped-call]
        first.record()
        run()
        second.record()
    torch.cuda.synchronize()
    milliseconds: list[float] = [first.elapsed_time(second) for first, second in pairs]
    return statistics.median(milliseconds) / 1e3


def measure_ceilings(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> Ceilings:
    """Measure copy bandwidth and matrix product rate."""
    source = torch.randint(0, 256, (sizes.copy_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = median_seconds(lambda: target.copy_(source), device)
    side = sizes.gemm_side
    left, right = torch.randn(2, side, side, device=device).to(dtype)
    gemm_s = median_seconds(lambda: left @ right, device)
    return Ceilings(2 * sizes.copy_bytes / copy_s, 2 * side**3 / gemm_s)


def measurements(
    device: torch.device, dtype: torch.dtype, sizes: Sizes
) -> Iterator[tuple[str, Callable[[], Measurement]]]:
    """Yield each measurement's name with the function that runs it, so that a caller can select some."""
    names = {kept: kind for kind, kept in DTYPES.items()}
    for rows, context in sizes.decode:
        for kv_dtype in (dtype, *DTYPES.values()):
            kind = names.get(kv_dtype) or str(kv_dtype).removeprefix("torch.")
            name = f"decode attention, {rows} rows at {context}, {kind} KV"
            yield name, partial(_decode, name, device, dtype, kv_dtype, sizes, rows, context)
    for tokens in sizes.prefill:
        name = f"prefill attention, {tokens} tokens"
        yield name, partial(_prefill, name, device, dtype, sizes, tokens)
    for tokens in (1, 256):
        name = f"norm, rotary and KV write, {tokens} tokens"
        yield name, partial(_qkv, name, device, dtype, sizes, tokens)
        name = f"add and RMSNorm, {tokens} tokens"
        yield name, partial(_norm, name, device, dtype, sizes, tokens)
        name = f"SiLU-mul, {tokens} tokens"
        yield name, partial(_silu_mul, name, device, dtype, sizes, tokens)
        for kind in ("greedy", "temperature", "top-k and top-p"):
            name = f"sampling, {kind}, {tokens} rows"
            yield name, partial(_sampling, name, device, dtype, sizes, tokens, kind)


def _paged(
    device: torch.device, kv_dtype: torch.dtype, sizes: Sizes, rows: int, context: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    block_size = 16
    per_row = -(-context // block_size)
    shape = (2, rows * per_row, sizes.num_kv_heads, block_size, sizes.head_dim)
    if kv_dtype in QUANTISED:
        caches = torch.stack([to_quantised(torch.randn(shape[1:], device=device), kv_dtype) for _ in range(2)])
    else:
        caches = torch.randn(shape, device=device, dtype=kv_dtype)
    tables = torch.randperm(rows * per_row, device=device).view(rows, per_row).int()
    return caches[0], caches[1], tables


def _decode(
    name: str, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype, sizes: Sizes, rows: int, context: int
) -> Measurement:
    k_cache, v_cache, tables = _paged(device, kv_dtype, sizes, rows, context)
    query = torch.randn(rows, sizes.num_heads, sizes.head_dim, device=device, dtype=dtype)
    starts = torch.arange(rows + 1, device=device).int()
    contexts = torch.full((rows,), context, device=device).int()
    scale = sizes.head_dim**-0.5
    schedule = schedule_decode(
        starts, contexts, num_kv_heads=sizes.num_kv_heads
    )  # all layers of a step share one schedule
    seconds = median_seconds(
        lambda: paged_attention(
            query, k_cache, v_cache, tables, starts, contexts, max_query_len=1, scale=scale, schedule=schedule
        ),
        device,
    )
    dense = torch.randn(2, rows, sizes.num_kv_heads, context, sizes.head_dim, device=device, dtype=dtype)
    one = query.unsqueeze(2)
    peer_s = median_seconds(
        lambda: scaled_dot_product_attention(one, dense[0], dense[1], scale=scale, enable_gqa=True), device
    )
    keys = rows * context * sizes.head_dim
    kv_bytes = 2 * rows * context * sizes.num_kv_heads * cached_size(sizes.head_dim, kv_dtype) * kv_dtype.itemsize
    return Measurement(name, seconds, kv_bytes, 4 * keys * sizes.num_heads, "SDPA, dense", peer_s)


def _prefill(name: str, device: torch.device, dtype: torch.dtype, sizes: Sizes, tokens: int) -> Measurement:
    k_cache, v_cache, tables = _paged(device, dtype, sizes, 1, tokens)
    query = torch.randn(tokens, sizes.num_heads, sizes.head_dim, device=device, dtype=dtype)
    starts, contexts = (torch.tensor(values, device=device).int() for values in ([0, tokens], [tokens]))
    scale = sizes.head_dim**-0.5
    seconds = median_seconds(
        lambda: paged_attention(
            query, k_cache, v_cache, tables, starts, contexts, min_query_len=2, max_query_len=tokens, scale=scale
        ),
        device,
    )
    heads = query.transpose(0, 1).unsqueeze(0)
    dense = torch.randn(2, 1, sizes.num_kv_heads, tokens, sizes.head_dim, device=device, dtype=dtype)
    peer_s = median_seconds(
        lambda: scaled_dot_product_attention(heads, dense[0], dense[1], is_causal=True, scale=scale, enable_gqa=True),
        device,
    )
    pairs = tokens * (tokens + 1) / 2
    moved = 2 * tokens * (sizes.num_heads + sizes.num_kv_heads) * sizes.head_dim * dtype.itemsize
    return Measurement(name, seconds, moved, 4 * pairs * sizes.num_heads * sizes.head_dim, "SDPA, dense", peer_s)


def _qkv(name: str, device: torch.device, dtype: torch.dtype, sizes: Sizes, tokens: int) -> Measurement:
    width = (sizes.num_heads + 2 * sizes.num_kv_heads) * sizes.head_dim
    qkv = torch.randn(tokens, width, device=device, dtype=dtype)
    norm = torch.ones(sizes.head_dim, device=device, dtype=dtype)
    angles = torch.rand(tokens, sizes.head_dim // 2, device=device)
    k_cache, v_cache, _ = _paged(device, dtype, sizes, 1, max(tokens, 16))
    slots = torch.arange(tokens, device=device)
    seconds = median_seconds(
        lambda: rotate_and_cache(qkv, norm, norm, 1e-6, angles, angles, k_cache, v_cache, slots), device
    )
    return Measurement(name, seconds, 2 * qkv.numel() * dtype.itemsize, 0)


def _norm(name: str, device: torch.device, dtype: torch.dtype, sizes: Sizes, tokens: int) -> Measurement:
    x, residual = torch.randn(2, tokens, sizes.hidden, device=device, dtype=dtype)
    weight = torch.ones(sizes.hidden, device=device, dtype=dtype)
    seconds = median_seconds(lambda: rms_norm(x, weight, 1e-6, residual=residual), device)
    return Measurement(name, seconds, 4 * x.numel() * dtype.itemsize, 0)


def _silu_mul(name: str, device: torch.device, dtype: torch.dtype, sizes: Sizes, tokens: int) -> Measurement:
    gate_up = torch.randn(tokens, 2 * sizes.intermediate, device=device, dtype=dtype)
    seconds = median_seconds(lambda: silu_mul(gate_up), device)
    return Measurement(name, seconds, 1.5 * gate_up.numel() * dtype.itemsize, 0)


def _sampling(name: str, device: torch.device, dtype: torch.dtype, sizes: Sizes, rows: int, kind: str) -> Measurement:
    logits = 3 * torch.randn(rows, sizes.vocab_size, device=device, dtype=dtype)
    floats, ints = torch.ones(rows, device=device), torch.zeros(rows, dtype=torch.int32, device=device)
    truncated = kind == "top-k and top-p"
    params = SamplingTensors(
        temperature=floats * (kind != "greedy"),
        top_k=ints + 50 * truncated,
        top_p=floats * (0.9 if truncated else 1.0),
        min_p=floats * 0,
        seed=ints.long(),
        choice=ints,
        position=ints,
        any_random=kind != "greedy",
        any_truncation=truncated,
    )
    seconds = median_seconds(lambda: sample(logits, params), device)
    return Measurement(name, seconds, logits.numel() * dtype.itemsize, 0)
