"""One-minute smoke test before all measurements. It calls each kernel once, as a served model does.

It runs first on a new GPU. It uses the sizes of the measurements with a few rows, so the measurements reuse the
compiled kernels. Every result is compared with the kernel's reference.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from kernels.activation import ClampedSwiglu, gated, gated_reference, silu_mul, silu_mul_reference
from kernels.block_copy import BlockPool, copy_blocks
from kernels.decode_inputs import DecodeInputs, prepare_decode
from kernels.experts import ExpertLayers, mix_experts, mix_experts_reference
from kernels.fp8_linear import Fp8Weight, fp8_linear, fp8_linear_reference
from kernels.kv_cache import write_kv
from kernels.kv_quantised import INT4, cached_size, from_parts, from_quantised, quantise_heads, to_quantised
from kernels.norm import rms_norm, rms_norm_reference
from kernels.paged_attention import paged_attention, paged_attention_reference, schedule_decode
from kernels.qkv import rotate_and_cache
from kernels.sampling import SamplingTensors, sample, sample_reference
from kernels.scatter import scatter_words
from kernels.split_sampling import best_in_part, best_of_parts
from kernels.token_masks import mask_tokens, mask_tokens_reference
from kernels.weight_only import WeightOnly, weight_only_linear, weight_only_linear_reference
from measure.gpu.results import Figures
from measure.kernels.bench import Sizes
from measure.kernels.bench_weights import drawn, drawn_experts
from worker_svc.device.accelerator import make_accelerator

_PAGE = 16


@dataclass(frozen=True, slots=True)
class At:
    """The device and the sizes."""

    device: torch.device
    dtype: torch.dtype
    sizes: Sizes


def smoke(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> Iterator[tuple[str, Callable[[], Figures]]]:
    """Return the tests by name. A failing test raises an error that describes the difference."""
    at = At(device, dtype, sizes)
    attention = partial(_attention, at)
    tests: list[tuple[str, Callable[[], float]]] = [
        ("scatter_words_kernel", partial(_scatter, device)),
        ("prepare_decode_kernel", partial(_decode_inputs, device)),
        ("rms_norm_kernel", partial(_norm, at)),
        ("silu_mul_kernel", partial(_silu_mul, at)),
        ("clamped_swiglu_kernel", partial(_clamped_swiglu, at)),
        ("rotate_and_cache_kernel", partial(_qkv, at)),
        ("write_kv_kernel over fp8", partial(_write_quantised, at, torch.uint8)),
        ("write_kv_kernel over int4", partial(_write_quantised, at, INT4)),
        ("schedule_kernel", partial(_schedule, at)),
        ("decode_kernel", partial(attention, [(1, 1), (700, 1), (0, 1), (33, 1)])),
        ("decode_kernel over fp8", partial(attention, [(700, 1), (33, 1)], kept=torch.uint8)),
        ("decode_kernel over int4", partial(attention, [(700, 1), (33, 1)], kept=INT4)),
        ("decode_kernel over divided rows", partial(attention, [(9000, 1), (40, 1)])),
        ("prefill_kernel", partial(attention, [(600, 300), (90, 90), (40, 1)])),
        ("prefill_kernel, combine_parts_kernel", partial(attention, [(9000, 100), (40, 1)])),
        ("prefill_kernel over fp8", partial(attention, [(600, 300), (90, 90)], kept=torch.uint8)),
        ("prefill_kernel over int4", partial(attention, [(600, 300), (90, 90)], kept=INT4)),
        ("attention with window and cap", partial(attention, [(600, 300), (400, 1)], window=100, cap=30.0)),
        ("maxima_kernel, pivots_kernel, gather_kernel, select_kernel", partial(_sampling, at, True)),
        ("draw_tiles_kernel, draw_rows_kernel", partial(_sampling, at, False)),
        ("draw_tiles_kernel over parts of the vocabulary", partial(_sampling_parts, at)),
        ("mask_tokens_kernel", partial(_mask, at)),
        ("weight_only_kernel over int4, add_splits_kernel", partial(_weight_only, at, "int4")),
        ("weight_only_kernel over int8", partial(_weight_only, at, "int8")),
        ("weight_only_kernel over MXFP4", partial(_weight_only, at, "mxfp4")),
        ("weight_only_kernel over NVFP4", partial(_weight_only, at, "nvfp4")),
        ("weight_only_experts_kernel over int4", partial(_experts, at, "int4")),
        ("weight_only_experts_kernel over MXFP4", partial(_experts, at, "mxfp4")),
        ("weight_only_experts_kernel over NVFP4", partial(_experts, at, "nvfp4")),
        ("fp8_experts_kernel", partial(_experts, at, "fp8 in blocks")),
        ("fp8_linear_kernel, quantise_rows_kernel", partial(_fp8_linear, at, (128, 128))),
        ("fp8 products by output", partial(_fp8_linear, at, (1, 1024))),
        ("copy_blocks_kernel", partial(_copy, at, pinned=False)),
    ]
    if device.type == "cuda":
        tests += [
            ("copy_blocks_kernel to the host and back", partial(_copy, at, pinned=True)),
            ("a captured graph", partial(_graph, at)),
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
    """Return the distance relative to the expected values.

    Raises:
        AssertionError: it is too large, or not a number.
    """
    ours, expected = ours.double(), expected.double()
    error = float((ours - expected).norm() / expected.norm().clamp(min=1e-30))
    assert error <= tolerance, f"off by {error:.2g}, {tolerance:g} allowed; NaN: {int(ours.isnan().sum())}"
    return error


def _tolerance(dtype: torch.dtype) -> float:
    return {torch.float32: 1e-5, torch.float16: 2e-3}.get(dtype, 1e-2)


def _attention(
    at: At,
    rows: list[tuple[int, int]],
    *,
    kept: torch.dtype | None = None,
    window: int | None = None,
    cap: float | None = None,
) -> float:
    """Check rows of (context, chunk) over pages in random order. Pages that belong to no row contain NaN.

    `kept` is the type of a quantised cache.
    """
    pages = [-(-context // _PAGE) for context, _ in rows]
    order = torch.randperm(sum(pages), device=at.device).int()
    tables = torch.zeros(len(rows), max(pages) + 1, dtype=torch.int32, device=at.device)
    for row, part in enumerate(torch.split(order, pages)):
        tables[row, : len(part)] = part
    caches = torch.randn(
        2, sum(pages), at.sizes.num_kv_heads, _PAGE, at.sizes.head_dim, device=at.device, dtype=at.dtype
    )
    for row, (context, _) in enumerate(rows):
        if context % _PAGE:
            caches[:, tables[row, pages[row] - 1].long(), :, context % _PAGE :] = torch.nan
    if kept is not None:
        caches = torch.stack([to_quantised(each, kept) for each in caches])
    lengths = [length for _, length in rows]
    query = torch.randn(sum(lengths), at.sizes.num_heads, at.sizes.head_dim, device=at.device, dtype=at.dtype)
    starts = torch.tensor([0, *lengths], device=at.device).cumsum(0).int()
    contexts = torch.tensor([context for context, _ in rows], device=at.device).int()
    options = {
        "max_query_len": max(lengths),
        "scale": at.sizes.head_dim**-0.5,
        "sliding_window": window,
        "soft_cap": cap,
    }
    ours = paged_attention(query, caches[0], caches[1], tables, starts, contexts, **options)
    wide = caches if kept is not None else caches.double()
    expected = paged_attention_reference(query.double(), wide[0], wide[1], tables, starts, contexts, **options)
    # When the CPU kernels compute chunks, they round queries and the elements of int4 to bfloat16.
    rounded = at.device.type == "cpu" and kept == INT4
    return _close(ours, expected, 1e-2 if rounded else _tolerance(at.dtype))


def _schedule(at: At) -> float:
    contexts = [5, 9000, 0, 129]
    made = schedule_decode(
        torch.arange(5, device=at.device).int(),
        torch.tensor(contexts, device=at.device).int(),
        num_kv_heads=at.sizes.num_kv_heads,
    )
    if made is None:  # A CPU has no Triton kernels.
        return 0.0
    shares = made.shares.tolist()[: int(made.programs[-1])]
    for row, context in enumerate(contexts):
        assert sum(end - begin for owner, begin, end, *_ in shares if owner == row) == context, (row, shares)
    assert not made.finished.any()
    return 0.0


def _qkv(at: At) -> float:
    tokens = 33
    qkv = torch.randn(
        tokens, (at.sizes.num_heads + 2 * at.sizes.num_kv_heads) * at.sizes.head_dim, device=at.device, dtype=at.dtype
    )
    angle = torch.randn(tokens, at.sizes.head_dim // 2, device=at.device)
    slots = torch.randperm(40 * _PAGE, device=at.device)[:tokens]
    slots[5] = -1  # padding: writes nothing
    norms = torch.rand(2, at.sizes.head_dim, device=at.device).to(at.dtype)
    caches = torch.zeros(2, 40, at.sizes.num_kv_heads, _PAGE, at.sizes.head_dim, device=at.device, dtype=at.dtype)
    there = caches.cpu()
    query = rotate_and_cache(qkv, norms[0], norms[1], 1e-6, angle.cos(), angle.sin(), caches[0], caches[1], slots)
    expected = rotate_and_cache(
        qkv.cpu(), norms[0].cpu(), norms[1].cpu(), 1e-6, angle.cos().cpu(), angle.sin().cpu(), there[0], there[1],
        slots.cpu(),
    )  # fmt: skip
    return max(_close(query.cpu(), expected, _tolerance(at.dtype)), _close(caches.cpu(), there, _tolerance(at.dtype)))


def _write_quantised(at: At, kept: torch.dtype) -> float:
    key, value = 20 * torch.randn(2, 40, at.sizes.num_kv_heads, at.sizes.head_dim, device=at.device).to(at.dtype)
    shape = (2, 5, at.sizes.num_kv_heads, _PAGE, cached_size(at.sizes.head_dim, kept))
    caches = torch.zeros(shape, device=at.device, dtype=kept)
    slots = torch.randperm(5 * _PAGE, device=at.device)[:40]
    write_kv(key, value, caches[0], caches[1], slots)
    for cache, given in zip(caches, (key, value), strict=True):
        read = from_quantised(cache)[slots // _PAGE, :, slots % _PAGE]
        expected = from_parts(*quantise_heads(given, kept))
        if kept == INT4:  # The GPU rounds the division differently, which may move an element to the adjacent code.
            torch.testing.assert_close(read, expected, rtol=0, atol=float(2.1 * given.abs().max() / 15))
            assert float((read != expected).double().mean()) < 0.01
        else:
            assert torch.equal(read, expected)
    return 0.0


def _norm(at: At) -> float:
    x, residual = torch.randn(2, 7, at.sizes.hidden, device=at.device, dtype=at.dtype)
    weight = torch.rand(at.sizes.hidden, device=at.device).to(at.dtype)
    normed, summed = rms_norm(x, weight, 1e-6, residual=residual)
    expected, expected_sum = rms_norm_reference(x, weight, 1e-6, residual=residual)
    return max(_close(normed, expected, _tolerance(at.dtype)), _close(summed, expected_sum, 1e-6))


def _silu_mul(at: At) -> float:
    gate_up = torch.randn(7, 2 * at.sizes.intermediate, device=at.device, dtype=at.dtype)
    return _close(silu_mul(gate_up), silu_mul_reference(gate_up), _tolerance(at.dtype))


def _sampling(at: At, truncated: bool) -> float:
    """Return the share of draws that differ from the reference's."""
    logits, params = _draws(at, truncated)
    return _few_differ(sample(logits, params), sample_reference(logits, params))


def _sampling_parts(at: At) -> float:
    """Return the fraction of sampled tokens that differ if the vocabulary is split in two parts, as with two ranks."""
    logits, params = _draws(at, truncated=False)
    border = at.sizes.vocab_size // 128 * 64
    parts = [best_in_part(logits[:, :border], params, 0), best_in_part(logits[:, border:], params, border)]
    return _few_differ(best_of_parts(torch.stack(parts)), sample_reference(logits, params))


def _few_differ(found: torch.Tensor, expected: torch.Tensor) -> float:
    differing = float((found != expected).float().mean())
    assert differing <= 1 / len(found), f"{differing:.0%} of the draws differ"
    return differing


def _draws(at: At, truncated: bool) -> tuple[torch.Tensor, SamplingTensors]:
    rows = 33  # odd, so that the columns of a packed upload are not aligned
    floats, ints = (
        torch.ones(rows + 1, device=at.device)[1:],
        torch.zeros(rows + 1, dtype=torch.int32, device=at.device)[1:],
    )
    params = SamplingTensors(
        temperature=floats * 0.7,
        top_k=ints + 50 * truncated,
        top_p=floats * (0.9 if truncated else 1.0),
        min_p=floats * (0.01 if truncated else 0.0),
        seed=torch.arange(rows, device=at.device) << 40,
        choice=ints,
        position=torch.arange(rows, device=at.device).int(),
        any_random=True,
        any_truncation=truncated,
    )
    return 3 * torch.randn(rows, at.sizes.vocab_size, device=at.device), params


def _clamped_swiglu(at: At) -> float:
    gate_up, clamped = 4 * torch.randn(7, 520, device=at.device).to(at.dtype), ClampedSwiglu(1.702, 7.0)
    return _close(gated(gate_up, clamped), gated_reference(gate_up, clamped), _tolerance(at.dtype))


def _weight_only(at: At, form: str) -> float:
    weight = drawn(form, 512, 1024, at.device)
    assert isinstance(weight, WeightOnly)
    errors = []
    for rows in (3, 200):
        x = torch.randn(rows, 1024, device=at.device).to(at.dtype)
        expected = weight_only_linear_reference(x.float(), weight)
        errors.append(_close(weight_only_linear(x, weight), expected, _tolerance(at.dtype)))
    return max(errors)


def _experts(at: At, form: str) -> float:
    """Check experts with biases and the clamped activation, for few and many rows per expert."""
    count, hidden, inner = 4, 512, 384
    layers = ExpertLayers(
        drawn_experts(form, count, 2 * inner, hidden, at.device),
        drawn_experts(form, count, hidden, inner, at.device),
        torch.randn(count, 2 * inner, device=at.device).to(at.dtype),
        torch.randn(count, hidden, device=at.device).to(at.dtype),
        ClampedSwiglu(1.702, 7.0),
    )
    errors = []
    for tokens in (3, 200):
        x = torch.randn(tokens, hidden, device=at.device).to(at.dtype)
        logits = torch.randn(tokens, count, device=at.device)
        found = mix_experts(x, logits, layers, top_k=2, renormalise=True)
        expected = mix_experts_reference(x.float(), logits, layers, top_k=2, renormalise=True)
        errors.append(_close(found, expected, 3e-2 if form.startswith("fp8") else 2 * _tolerance(at.dtype)))
    return max(errors)


def _fp8_linear(at: At, block: tuple[int, int]) -> float:
    codes = torch.randn(512, 1024, device=at.device).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = torch.rand(512 // block[0], 1024 // block[1], device=at.device) + 0.5
    weight = Fp8Weight(codes, scales, block)
    errors = []
    for rows in (3, 200):
        x = torch.randn(rows, 1024, device=at.device).to(at.dtype)
        errors.append(_close(fp8_linear(x, weight), fp8_linear_reference(x.float(), weight), 1e-2))
    return max(errors)


def _mask(at: At) -> float:
    vocab_size = at.sizes.vocab_size
    masks = torch.randint(-(2**31), 2**31, (5, -(-vocab_size // 32)), device=at.device, dtype=torch.int32)
    places, lines = torch.tensor([[6, 0, 3], [1, 4, 0]], device=at.device)
    ours = torch.randn(7, vocab_size, device=at.device, dtype=at.dtype)
    expected = ours.clone()
    mask_tokens(ours, places, masks, lines)
    mask_tokens_reference(expected, places, masks, lines)
    assert torch.equal(ours, expected)
    return 0.0


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


def _copy(at: At, *, pinned: bool) -> float:
    """Copy blocks on the device, and to pinned memory and back, on a separate stream."""
    tensors = [
        torch.randn(20, at.sizes.num_kv_heads, _PAGE, at.sizes.head_dim, device=at.device, dtype=at.dtype)
        for _ in range(3)
    ]
    before = [tensor.clone() for tensor in tensors]
    pool = BlockPool(tensors, at.device)
    there, back = (torch.tensor(columns, device=at.device) for columns in ([[1, 4], [7, 9]], [[7, 9], [11, 12]]))
    accelerator = make_accelerator(at.device)
    if pinned and accelerator is not None:
        host = BlockPool([accelerator.pinned_exactly(tuple(x.shape), x.dtype) for x in tensors], at.device)
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


def _graph(at: At) -> float:
    """Capture two graphs with one pool: a product, a norm, and attention with lengths that the device holds."""
    accelerator = make_accelerator(at.device)
    assert accelerator is not None
    heads = (at.sizes.num_heads, at.sizes.head_dim)
    weight = torch.randn(at.sizes.hidden, heads[0] * heads[1], device=at.device, dtype=at.dtype) / 64
    ones = torch.ones(at.sizes.hidden, device=at.device, dtype=at.dtype)
    caches = torch.randn(2, 300, at.sizes.num_kv_heads, _PAGE, at.sizes.head_dim, device=at.device, dtype=at.dtype)
    x = torch.randn(8, at.sizes.hidden, device=at.device, dtype=at.dtype)
    starts, contexts = torch.arange(9, device=at.device).int(), torch.zeros(8, dtype=torch.int32, device=at.device)
    tables = torch.arange(8 * 37, device=at.device).int().view(8, 37)

    def compute(rows: int) -> torch.Tensor:
        query = (rms_norm(x[:rows], ones, 1e-6) @ weight).view(rows, *heads)
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
