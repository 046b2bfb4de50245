"""Every kernel on the device against its reference, at random sizes; attention's reference is computed in float64.

Compiling a kernel for each size takes longer than running it, so a check stops at its time limit and reports its
progress.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from kernels.activation import silu_mul, silu_mul_reference
from kernels.decode_inputs import DecodeInputs, prepare_decode, prepare_decode_reference
from kernels.kv_quantised import GROUP, INT4, QUANTISED, to_quantised
from kernels.norm import rms_norm, rms_norm_reference
from kernels.paged_attention import paged_attention, paged_attention_reference
from kernels.qkv import rotate_and_cache
from kernels.sampling import SamplingTensors, sample, sample_reference
from kernels.scatter import scatter_words
from measure.gpu.results import Figures

_TOLERANCE = {torch.float32: 2e-4, torch.float16: 6e-3, torch.bfloat16: 4e-2}


def checks(device: torch.device, rounds: int, limit_s: float) -> Iterator[tuple[str, Callable[[], Figures]]]:
    """Return the checks by name. A failing check raises AssertionError with the difference.

    No check begins a round after ``limit_s``.
    """
    for name, check in (
        ("attention", _attention),
        ("norm, rotary, KV write", _qkv),
        ("elementwise", _elementwise),
        ("sampling", _sampling),
        ("decode inputs", _decode_inputs),
    ):
        yield f"check {name}", partial(_repeat, check, device, rounds, limit_s)


def _repeat(
    check: Callable[[torch.device, torch.Generator], float], device: torch.device, rounds: int, limit_s: float
) -> Figures:
    worst, done = 0.0, 0
    deadline = time.monotonic() + limit_s
    with torch.inference_mode():
        while done < rounds and (done == 0 or time.monotonic() < deadline):
            try:
                worst = max(worst, check(device, torch.Generator().manual_seed(done)))
            except Exception as error:
                raise AssertionError(f"round {done}: {error}") from error
            done += 1
    return {"rounds": done, "worst_error": worst}


def _pick(generator: torch.Generator, *choices: int) -> int:
    return choices[int(torch.randint(len(choices), (), generator=generator))]


def _dtype(generator: torch.Generator, device: torch.device) -> torch.dtype:
    kinds = (torch.float32, torch.float16, torch.bfloat16)
    return kinds[_pick(generator, 0, 1, 2) if device.type == "cuda" else 0]


def _compare(ours: torch.Tensor, expected: torch.Tensor, tolerance: float) -> float:
    ours, expected = ours.double(), expected.to(ours.device).double()
    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)
    return float((ours - expected).abs().max()) if ours.numel() else 0.0


def _attention(device: torch.device, generator: torch.Generator) -> float:
    """Check batches of decode and prefill rows: head dimensions, groups, page sizes, windows, caps and KV types."""
    dtype = _dtype(generator, device)
    kv_heads, group = _pick(generator, 1, 2, 8), _pick(generator, 1, 2, 4, 7, 8)
    head_dim, block_size = _pick(generator, 64, 80, 96, 128, 256), _pick(generator, 16, 32, 64, 128)
    rows = _pick(generator, 1, 3, 8)
    contexts = torch.randint(1, 1500, (rows,), generator=generator)
    chunks = torch.where(torch.rand(rows, generator=generator) < 0.6, 1, 1 + contexts // _pick(generator, 1, 3, 9))
    chunks = chunks.minimum(contexts)
    window = _pick(generator, 0, 1, 100) or None
    cap = _pick(generator, 0, 0, 30) or None
    pages = -(-1500 // block_size)
    shape = (2, rows * pages, kv_heads, block_size, head_dim)
    caches = torch.randn(shape, generator=generator).to(dtype)
    kind = _pick(generator, 0, 1, 2, 3)
    if kind == QUANTISED.index(INT4) + 1 and head_dim % GROUP:
        kind = 0
    given = [to_quantised(each, QUANTISED[kind - 1]) for each in caches] if kind else list(caches)
    tables = torch.randperm(rows * pages, generator=generator).view(rows, pages).int()
    query = torch.randn(int(chunks.sum()), kv_heads * group, head_dim, generator=generator).to(dtype)
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), chunks.cumsum(0))).int()
    tensors = (query, *given, tables, starts, contexts.int())
    longest = int(chunks.max())

    def call(attend: Callable[..., torch.Tensor], *given: torch.Tensor) -> torch.Tensor:
        return attend(*given, max_query_len=longest, scale=head_dim**-0.5, sliding_window=window, soft_cap=cap)

    there = [x.to(device) for x in tensors]
    wide = [x if x.dtype in (*QUANTISED, torch.int32) else x.double() for x in there]
    ours = call(paged_attention, *there)
    # When the CPU kernels compute chunks, they round queries and the elements of int8 and int4 to bfloat16.
    rounded = device.type == "cpu" and given[0].dtype in (torch.int8, INT4)
    return _compare(ours, call(paged_attention_reference, *wide), 3e-2 if rounded else _TOLERANCE[dtype])


def _qkv(device: torch.device, generator: torch.Generator) -> float:
    """Compare the fused kernel with the separate CPU operations in the same dtype."""
    dtype = _dtype(generator, device)
    tokens, heads, kv_heads = _pick(generator, 1, 7, 300), _pick(generator, 4, 32), _pick(generator, 1, 4)
    head_dim, block_size = _pick(generator, 64, 80, 128), _pick(generator, 16, 128)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, generator=generator).to(dtype)
    norms = torch.rand(2, head_dim, generator=generator).to(dtype) if _pick(generator, 0, 1) else (None, None)
    angle = torch.randn(tokens, head_dim // 2, generator=generator)
    slots = torch.randperm(20 * block_size + tokens, generator=generator)[:tokens]
    blocks = -(-(20 * block_size + tokens) // block_size)
    caches = torch.zeros(2, blocks, kv_heads, block_size, head_dim, dtype=dtype)
    there = caches.to(device)

    def call(to: torch.device, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        moved = [None if x is None else x.to(to) for x in norms]
        angles = (angle.cos().to(to), angle.sin().to(to))
        return rotate_and_cache(qkv.to(to), moved[0], moved[1], 1e-6, *angles, k_cache, v_cache, slots.to(to))

    expected = call(torch.device("cpu"), caches[0], caches[1])
    error = _compare(call(device, there[0], there[1]), expected, _TOLERANCE[dtype])
    return max(error, _compare(there, caches, _TOLERANCE[dtype]))


def _elementwise(device: torch.device, generator: torch.Generator) -> float:
    """Check RMSNorm with fused addition, and the gated activation."""
    dtype = _dtype(generator, device)
    shape = (_pick(generator, 1, 33, 700), _pick(generator, 96, 1024, 4096, 5120))
    x, residual = torch.randn(2, *shape, generator=generator).to(dtype)
    weight = torch.rand(shape[1], generator=generator).to(dtype)
    normed, summed = rms_norm(x.to(device), weight.to(device), 1e-6, residual=residual.to(device))
    expected, expected_sum = rms_norm_reference(x, weight, 1e-6, residual=residual)
    error = max(_compare(normed, expected, _TOLERANCE[dtype]), _compare(summed, expected_sum, 1e-6))
    return max(error, _compare(silu_mul(x.to(device)), silu_mul_reference(x), _TOLERANCE[dtype]))


def _sampling(device: torch.device, generator: torch.Generator) -> float:
    """Return the fraction of sampled tokens that differ from the reference.

    Rounding may change a token near a boundary.
    """
    rows, vocab_size = 64, _pick(generator, 1000, 32000, 128256)
    logits = 3 * torch.randn(rows, vocab_size, generator=generator)

    def some(values: torch.Tensor, off: float) -> torch.Tensor:
        return torch.where(torch.rand(rows, generator=generator) < 0.5, values, off)

    columns: dict[str, torch.Tensor] = {
        "temperature": some(0.3 + torch.rand(rows, generator=generator), 0.0),
        "top_k": some(torch.randint(1, 100, (rows,), generator=generator), 0).int(),
        "top_p": some(torch.rand(rows, generator=generator), 1.0),
        "min_p": some(0.2 * torch.rand(rows, generator=generator), 0.0),
        "seed": torch.randint(-(2**62), 2**62, (rows,), generator=generator),
        "choice": torch.randint(0, 4, (rows,), generator=generator).int(),
        "position": torch.randint(0, 100_000, (rows,), generator=generator).int(),
    }
    params = SamplingTensors(
        **{name: column.to(device) for name, column in columns.items()}, any_random=True, any_truncation=True
    )
    logits = logits.to(device)
    differing = float((sample(logits, params) != sample_reference(logits, params)).float().mean())
    assert differing <= 2 / rows, f"{differing:.1%} of the draws differ"
    return differing


def _decode_inputs(device: torch.device, generator: torch.Generator) -> float:
    """Check that inputs made on the device, and words scattered there, equal the reference."""
    rows, max_blocks, block_size = _pick(generator, 1, 40, 256), _pick(generator, 3, 2500), _pick(generator, 16, 128)
    lane_rows = torch.randperm(rows, generator=generator).int()
    lane_rows[torch.rand(rows, generator=generator) < 0.2] = -1
    computed = torch.randint(0, max_blocks * block_size, (rows,), generator=generator).int()
    last_token = torch.randint(0, 100_000, (rows + 1,), generator=generator)
    tables = torch.randint(0, 1 << 20, (rows, max_blocks), generator=generator).int()

    def call(prepare: Callable[..., None], to: torch.device) -> list[torch.Tensor]:
        wide = torch.zeros(4, rows, dtype=torch.int64, device=to)
        out = DecodeInputs(
            wide[0], wide[1], wide[2], wide[3],
            torch.zeros(rows, dtype=torch.int32, device=to), torch.zeros_like(tables, device=to),
        )  # fmt: skip
        counts = computed.to(to, copy=True)
        prepare(lane_rows.to(to), counts, last_token.to(to), tables.to(to), block_size, out)
        return [wide, out.context_lens, out.block_tables, counts]

    for ours, expected in zip(call(prepare_decode, device), call(prepare_decode_reference, torch.device("cpu")),
                              strict=True):  # fmt: skip
        assert torch.equal(ours.cpu(), expected)
    changes = torch.stack((torch.randperm(5000, generator=generator), torch.arange(5000))).int()[:, :3000].contiguous()
    state = torch.zeros(5000, dtype=torch.int32, device=device)
    scatter_words(state, changes.to(device))
    assert torch.equal(state.cpu()[changes[0].long()], changes[1])
    return 0.0
