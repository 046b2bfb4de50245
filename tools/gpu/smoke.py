"""A minute's test of what everything else stands on: each kernel once, as a served model calls it, each under its name.

The first thing that runs on a GPU nobody has tried before. Sizes are those of Llama-3.1-8B's layers with a few rows, so
that what is compiled here serves the measurements, too; every result is compared with the kernel's reference.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from kernels.activation import silu_mul, silu_mul_reference
from kernels.block_copy import BlockPool, copy_blocks
from kernels.decode_inputs import DecodeInputs, prepare_decode
from kernels.fp8 import dequantize, quantize
from kernels.kv_cache import write_kv
from kernels.norm import rms_norm, rms_norm_reference
from kernels.paged_attention import paged_attention, paged_attention_reference, schedule_decode
from kernels.qkv import rotate_and_cache
from kernels.sampling import SamplingTensors, sample, sample_reference
from kernels.scatter import scatter_words
from tools.gpu.results import Figures
from worker_svc.accelerator import make_accelerator

_HEADS, _KV_HEADS, _HEAD_DIM, _PAGE = 32, 8, 128, 16


def smoke(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], Figures]]]:
    """Name of each test and what makes it; one that fails raises, and says what differs."""
    attention = partial(_attention, device, dtype)
    tests: list[tuple[str, Callable[[], float]]] = [
        ("scatter_words_kernel", partial(_scatter, device)),
        ("prepare_decode_kernel", partial(_decode_inputs, device)),
        ("rms_norm_kernel", partial(_norm, device, dtype)),
        ("silu_mul_kernel", partial(_silu_mul, device, dtype)),
        ("rotate_and_cache_kernel", partial(_qkv, device, dtype)),
        ("write_kv_kernel over fp8", partial(_write_fp8, device, dtype)),
        ("schedule_kernel", partial(_schedule, device)),
        ("decode_kernel", partial(attention, [(1, 1), (700, 1), (0, 1), (33, 1)])),
        ("decode_kernel over fp8", partial(attention, [(700, 1), (33, 1)], fp8=True)),
        ("decode_kernel, combine_shares_kernel", partial(attention, [(9000, 1), (40, 1)])),
        ("prefill_kernel", partial(attention, [(600, 300), (90, 90), (40, 1)])),
        ("prefill_kernel over fp8", partial(attention, [(600, 300), (90, 90)], fp8=True)),
        ("attention with window and cap", partial(attention, [(600, 300), (400, 1)], window=100, cap=30.0)),
        ("select_kernel, draw_tiles_kernel", partial(_sampling, device, True)),
        ("draw_rows_kernel", partial(_sampling, device, False)),
        ("copy_blocks_kernel", partial(_copy, device, dtype, pinned=False)),
    ]
    if device.type == "cuda":
        tests += [
            ("copy_blocks_kernel to the host and back", partial(_copy, device, dtype, pinned=True)),
            ("a captured graph", partial(_graph, device, dtype)),
        ]
    for name, test in tests:
        yield f"smoke: {name}", partial(_figures, test, device)


@torch.inference_mode()
def _figures(test: Callable[[], float], device: torch.device) -> Figures:
    torch.manual_seed(0)
    error = test()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return {"error": error}


def _close(ours: torch.Tensor, expected: torch.Tensor, tolerance: float) -> float:
    """The distance relative to what was expected.

    Raises:
        AssertionError: it is too large, or no number.
    """
    ours, expected = ours.double(), expected.double()
    error = float((ours - expected).norm() / expected.norm().clamp(min=1e-30))
    assert error <= tolerance, f"off by {error:.2g}, {tolerance:g} allowed; NaN: {int(ours.isnan().sum())}"
    return error


def _tolerance(dtype: torch.dtype) -> float:
    return {torch.float32: 1e-5, torch.float16: 2e-3}.get(dtype, 1e-2)


def _attention(
    device: torch.device,
    dtype: torch.dtype,
    rows: list[tuple[int, int]],
    *,
    fp8: bool = False,
    window: int | None = None,
    cap: float | None = None,
) -> float:
    """Rows of (context, chunk) over pages in random order; what no row owns is NaN."""
    pages = [-(-context // _PAGE) for context, _ in rows]
    order = torch.randperm(sum(pages), device=device).int()
    tables = torch.zeros(len(rows), max(pages) + 1, dtype=torch.int32, device=device)
    for row, part in enumerate(torch.split(order, pages)):
        tables[row, : len(part)] = part
    caches = torch.randn(2, sum(pages), _KV_HEADS, _PAGE, _HEAD_DIM, device=device, dtype=dtype)
    for row, (context, _) in enumerate(rows):
        if context % _PAGE:
            caches[:, tables[row, pages[row] - 1].long(), :, context % _PAGE :] = torch.nan
    if fp8:
        caches = quantize(caches)
    lengths = [length for _, length in rows]
    query = torch.randn(sum(lengths), _HEADS, _HEAD_DIM, device=device, dtype=dtype)
    starts = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    contexts = torch.tensor([context for context, _ in rows], device=device).int()
    options = {"max_query_len": max(lengths), "scale": _HEAD_DIM**-0.5, "sliding_window": window, "soft_cap": cap}
    ours = paged_attention(query, caches[0], caches[1], tables, starts, contexts, **options)
    wide = caches if fp8 else caches.double()
    expected = paged_attention_reference(query.double(), wide[0], wide[1], tables, starts, contexts, **options)
    return _close(ours, expected, _tolerance(dtype))


def _schedule(device: torch.device) -> float:
    contexts = [5, 9000, 0, 129]
    made = schedule_decode(
        torch.arange(5, device=device).int(), torch.tensor(contexts, device=device).int(), num_kv_heads=_KV_HEADS
    )
    if made is None:  # there are no kernels on a CPU
        return 0.0
    shares = [share for share in made.shares.tolist() if share[0] >= 0]
    for row, context in enumerate(contexts):
        assert sum(end - begin for owner, begin, end, _ in shares if owner == row) == context, (row, shares)
    return 0.0


def _qkv(device: torch.device, dtype: torch.dtype) -> float:
    tokens = 33
    qkv = torch.randn(tokens, (_HEADS + 2 * _KV_HEADS) * _HEAD_DIM, device=device, dtype=dtype)
    angle = torch.randn(tokens, _HEAD_DIM // 2, device=device)
    slots = torch.randperm(40 * _PAGE, device=device)[:tokens]
    slots[5] = -1  # padding: writes nothing
    norms = torch.rand(2, _HEAD_DIM, device=device).to(dtype)
    caches = torch.zeros(2, 40, _KV_HEADS, _PAGE, _HEAD_DIM, device=device, dtype=dtype)
    there = caches.cpu()
    query = rotate_and_cache(qkv, norms[0], norms[1], 1e-6, angle.cos(), angle.sin(), caches[0], caches[1], slots)
    expected = rotate_and_cache(
        qkv.cpu(), norms[0].cpu(), norms[1].cpu(), 1e-6, angle.cos().cpu(), angle.sin().cpu(), there[0], there[1],
        slots.cpu(),
    )  # fmt: skip
    return max(_close(query.cpu(), expected, _tolerance(dtype)), _close(caches.cpu(), there, _tolerance(dtype)))


def _write_fp8(device: torch.device, dtype: torch.dtype) -> float:
    key, value = 20 * torch.randn(2, 40, _KV_HEADS, _HEAD_DIM, device=device).to(dtype)
    caches = torch.zeros(2, 5, _KV_HEADS, _PAGE, _HEAD_DIM, device=device, dtype=torch.uint8)
    slots = torch.randperm(5 * _PAGE, device=device)[:40]
    write_kv(key, value, caches[0], caches[1], slots)
    for cache, given in zip(caches, (key, value), strict=True):
        read = cache[slots // _PAGE, :, slots % _PAGE]
        assert torch.equal(dequantize(read.cpu(), torch.float32), dequantize(quantize(given.cpu()), torch.float32))
    return 0.0


def _norm(device: torch.device, dtype: torch.dtype) -> float:
    x, residual = torch.randn(2, 7, 4096, device=device, dtype=dtype)
    weight = torch.rand(4096, device=device).to(dtype)
    normed, summed = rms_norm(x, weight, 1e-6, residual=residual)
    expected, expected_sum = rms_norm_reference(x, weight, 1e-6, residual=residual)
    return max(_close(normed, expected, _tolerance(dtype)), _close(summed, expected_sum, 1e-6))


def _silu_mul(device: torch.device, dtype: torch.dtype) -> float:
    gate_up = torch.randn(7, 2 * 14336, device=device, dtype=dtype)
    return _close(silu_mul(gate_up), silu_mul_reference(gate_up), _tolerance(dtype))


def _sampling(device: torch.device, truncated: bool) -> float:
    """Share of draws that differ from the reference's."""
    rows = 33  # odd: the columns of a packed upload are not aligned
    floats, ints = torch.ones(rows + 1, device=device)[1:], torch.zeros(rows + 1, dtype=torch.int32, device=device)[1:]
    params = SamplingTensors(
        temperature=floats * 0.7,
        top_k=ints + 50 * truncated,
        top_p=floats * (0.9 if truncated else 1.0),
        min_p=floats * (0.01 if truncated else 0.0),
        seed=torch.arange(rows, device=device) << 40,
        choice=ints,
        position=torch.arange(rows, device=device).int(),
        any_random=True,
        any_truncation=truncated,
    )
    logits = 3 * torch.randn(rows, 128256, device=device)
    differing = float((sample(logits, params) != sample_reference(logits, params)).float().mean())
    assert differing <= 1 / rows, f"{differing:.0%} of the draws differ"
    return differing


def _scatter(device: torch.device) -> float:
    state = torch.zeros(5000, dtype=torch.int32, device=device)
    changes = torch.stack((torch.randperm(5000)[:1777], torch.arange(1777))).int().contiguous()
    scatter_words(state, changes.to(device))
    assert torch.equal(state.cpu()[changes[0].long()], changes[1])
    return 0.0


def _decode_inputs(device: torch.device) -> float:
    lanes = torch.tensor([2, -1, 0], dtype=torch.int32, device=device)
    computed = torch.tensor([17, 5, 15], dtype=torch.int32, device=device)
    tables = torch.arange(12, dtype=torch.int32, device=device).view(3, 4)
    wide = torch.zeros(4, 3, dtype=torch.int64, device=device)
    narrow = torch.zeros(3, dtype=torch.int32, device=device)
    out = DecodeInputs(wide[0], wide[1], wide[2], wide[3], narrow, torch.zeros_like(tables))
    prepare_decode(lanes, computed, torch.tensor([70, 71, 72, 0], device=device), tables, _PAGE, out)
    assert wide.tolist() == [[72, 0, 70], [17, 0, 15], [9 * _PAGE + 1, -1, 15], [2, 3, 0]], wide.tolist()
    assert narrow.tolist() == [18, 0, 16]
    assert computed.tolist() == [18, 5, 16]
    return 0.0


def _copy(device: torch.device, dtype: torch.dtype, *, pinned: bool) -> float:
    """Blocks copied on the device; or to pinned memory and back, on a stream of their own."""
    tensors = [torch.randn(20, _KV_HEADS, _PAGE, _HEAD_DIM, device=device, dtype=dtype) for _ in range(3)]
    before = [tensor.clone() for tensor in tensors]
    pool = BlockPool(tensors, device)
    there, back = (torch.tensor(columns, device=device) for columns in ([[1, 4], [7, 9]], [[7, 9], [11, 12]]))
    accelerator = make_accelerator(device)
    if pinned and accelerator is not None:
        host = BlockPool([accelerator.pinned(tuple(x.shape), x.dtype).zero_() for x in tensors], device)
        stream, ready, done = accelerator.stream(), accelerator.event(), accelerator.event()
        ready.record()
        stream.wait(ready)
        with stream.current():
            copy_blocks(pool, host, there, beside=True)
            copy_blocks(host, pool, back, beside=True)
            done.record()
        done.synchronize()
    else:
        copy_blocks(pool, pool, there)
        copy_blocks(pool, pool, back)
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor[[11, 12]], old[[1, 4]])
        assert torch.equal(tensor[13:], old[13:])
    return 0.0


def _graph(device: torch.device, dtype: torch.dtype) -> float:
    """Two graphs with one pool: a product, a norm, and attention that follows lengths on the device."""
    accelerator = make_accelerator(device)
    assert accelerator is not None
    weight = torch.randn(4096, 4096, device=device, dtype=dtype) / 64
    ones = torch.ones(4096, device=device, dtype=dtype)
    caches = torch.randn(2, 300, _KV_HEADS, _PAGE, _HEAD_DIM, device=device, dtype=dtype)
    x = torch.randn(8, 4096, device=device, dtype=dtype)
    starts, contexts = torch.arange(9, device=device).int(), torch.zeros(8, dtype=torch.int32, device=device)
    tables = torch.arange(8 * 37, device=device).int().view(8, 37)

    def compute(rows: int) -> torch.Tensor:
        query = (rms_norm(x[:rows], ones, 1e-6) @ weight).view(rows, _HEADS, _HEAD_DIM)
        given = (tables[:rows], starts[: rows + 1], contexts[:rows])
        return paged_attention(query, caches[0], caches[1], *given, max_query_len=1, scale=0.1)

    graphs = {rows: accelerator.capture(partial(compute, rows)) for rows in (8, 3)}
    worst = 0.0
    for rows, context in ((8, 500), (3, 17), (8, 3)):
        x.normal_()
        contexts.fill_(context)
        graph, result = graphs[rows]
        graph.replay()
        worst = max(worst, _close(result, compute(rows), 1e-3))
    return worst
