"""Ahead-of-time compilation of all kernel specialisations that the worker uses, without a GPU.

Triton compiles a kernel for its argument types and compile-time parameter values, normally at the first launch. Here
each case calls an operation's public function with meta tensors, and `record_launches` records the launches. Each
launch is compiled to a cubin for an architecture, and its statistics are reported (`measure.kernels.machine_code`). Any
machine can thus detect a kernel that does not compile or that spills. The launches are the real ones, because they come
from the public functions.

    python -m measure.kernels.aot                 the cases of CI
    python -m measure.kernels.aot --all           every case (half an hour on two cores)
    python -m measure.kernels.aot --json FILE     the table as JSON as well
    python -m measure.kernels.aot --all --only weights --architectures 80,89,90,100,120
                                                  cases whose names contain "weights", for other GPUs

Specialisation follows Triton's rule for launches: an integer 1 becomes a constant; integers divisible by 16 and all
tensors (which the allocator aligns) are marked as divisible, unless the kernel declares the argument as varying.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from kernels._dispatch import HAVE_TRITON, Launch, record_launches
from kernels.activation import ClampedSwiglu, silu_mul
from kernels.block_copy import BlockPool, copy_blocks
from kernels.decode_inputs import DecodeInputs, prepare_decode
from kernels.experts import ExpertLayers, ExpertWeights, mix_experts
from kernels.fp8_linear import Fp8Weight, fp8_linear
from kernels.kv_cache import write_kv
from kernels.kv_quantised import DTYPES as KV_DTYPES
from kernels.kv_quantised import GROUP, INT4, cached_size
from kernels.latent_attention import latent_attention
from kernels.norm import rms_norm
from kernels.paged_attention import paged_attention
from kernels.qkv import rotate_and_cache
from kernels.rotary import apply_rotary
from kernels.sampling import SamplingTensors, sample
from kernels.scatter import scatter_words
from kernels.split_sampling import best_in_part
from kernels.token_masks import mask_tokens
from kernels.weight_only import Kind, Scales, WeightOnly, weight_only_linear
from measure.kernels.machine_code import copies_ahead, disassemble, loop_instructions, num_instructions, resource_usage

ARCHITECTURES = (80, 90)
SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Shared memory limit per program in bytes, by architecture."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_DIMS = (64, 80, 96, 128, 256, 512)
GROUP_SIZES = (1, 4, 8)
BLOCK_SIZES = (8, 16, 32, 128)

_TYPE_NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.uint16: "u16",
    torch.int32: "i32",
    torch.int64: "i64",
}


@dataclass(frozen=True, slots=True)
class Case:
    """One call to an operation; ``call`` runs it on meta tensors."""

    name: str
    call: Callable[[], object]
    in_ci: bool


@dataclass(frozen=True, slots=True)
class Compiled:
    """Resources of one kernel specialisation on one architecture."""

    case: str
    kernel: str
    architecture: int  # compute capability, 90 for sm_90
    registers: int  # per thread
    spill_bytes: int  # per thread; these kernels use local memory only for spills
    shared_bytes: int  # per program
    num_warps: int
    copies_ahead: int | None
    """Number of copy groups that may be unfinished when a pipelined loop continues; None without such a loop."""
    loop_instructions: tuple[int, ...]
    """Instructions of each innermost loop that copies into shared memory."""
    instructions: int
    """Instructions of the whole kernel, each counted once."""


def cases() -> list[Case]:
    """Return the specialisations that the worker uses.

    The cases cover every data type, head dimension, group size and block size of attention, and one or two sizes of
    each other operation.
    """
    found = []
    for dtype, head_dim, group_size, block_size in product(DTYPES, HEAD_DIMS, GROUP_SIZES, BLOCK_SIZES):
        name = f"{_TYPE_NAMES[dtype]}, head_dim {head_dim}, group {group_size}, page {block_size}"
        in_ci = dtype is torch.bfloat16 and head_dim in (64, 128, 256, 512) and (group_size, block_size) == (4, 16)
        in_ci = in_ci or (dtype is torch.float32 and (head_dim, group_size, block_size) == (128, 4, 16))
        call = partial(_attention, head_dim, group_size, block_size, dtype=dtype)
        found.append(Case(f"attention {name}", call, in_ci))
    gemma = partial(_attention, 256, 2, 16, sliding_window=4096, soft_cap=50.0)
    found.append(Case("attention head_dim 256, group 2, page 16, window, cap", gemma, True))
    sinks = partial(_attention, 64, 8, 16, sliding_window=128, with_sinks=True)
    found.append(Case("attention head_dim 64, group 8, page 16, window, sinks", sinks, True))
    few = partial(_attention, 128, 4, 16, num_tokens=100)
    found.append(Case("attention bf16, head_dim 128, group 4, page 16, few tokens", few, True))
    for head_dim in HEAD_DIMS:
        for kind, kv_dtype in KV_DTYPES.items():
            if kind == "int4" and head_dim % GROUP:
                continue
            call = partial(_attention, head_dim, 4, 16, kv_dtype=kv_dtype)
            name = f"attention bf16 over {kind}, head_dim {head_dim}, group 4, page 16"
            found.append(Case(name, call, head_dim == 128 or (head_dim, kind) == (64, "fp8")))
    for num_heads, rank in ((16, 512), (128, 512), (40, 256)):
        for kind, latent_dtype in {"bf16": torch.bfloat16, "fp32": torch.float32, **KV_DTYPES}.items():
            for num_tokens in (4, 512):
                name = f"latent attention over {kind}, {num_heads} heads, rank {rank}, {num_tokens} tokens"
                latent = partial(_latent_attention, num_heads, rank, num_tokens, latent_dtype)
                in_ci = (num_heads, kind, num_tokens) in ((128, "bf16", 512), (16, "fp8", 4))
                found.append(Case(name, latent, in_ci))
    found.append(Case("write_kv 8x128, page 16", _write_kv, True))
    found.append(Case("write_kv 512 and 64, page 16", _write_latent, False))
    found.append(Case("write_kv 8x128, page 16, fp8", partial(_write_kv, torch.uint8), True))
    found.append(Case("write_kv 8x128, page 16, int8", partial(_write_kv, torch.int8), True))
    found.append(Case("write_kv 8x128, page 16, int4", partial(_write_kv, INT4), True))
    found.append(Case("rms_norm 4096, residual", partial(_rms_norm, (4096,), True, 0.0), True))
    found.append(Case("rms_norm 1024", partial(_rms_norm, (1024,), False, 0.0), False))
    found.append(Case("rms_norm heads of 128", partial(_rms_norm, (32, 128), False, 0.0), False))
    found.append(Case("rms_norm 2304, residual, gemma", partial(_rms_norm, (2304,), True, 1.0), False))
    found.append(Case("rotary 32+8 heads of 128", partial(_rotary, 128), True))
    found.append(Case("rotary 32+8 heads of 80, partial", partial(_rotary, 80), False))
    found.append(Case("qkv 32+8 heads of 128, page 16", partial(_qkv, 32, False), True))
    found.append(Case("qkv 32+8 heads of 128, page 16, fp8", partial(_qkv, 32, False, torch.uint8), False))
    found.append(Case("qkv 32+8 heads of 128, page 16, int8", partial(_qkv, 32, False, torch.int8), True))
    found.append(Case("qkv 32+8 heads of 128, page 16, int4", partial(_qkv, 32, False, INT4), True))
    found.append(Case("qkv 16+8 heads of 128, page 16, norms", partial(_qkv, 16, True), True))
    found.append(Case("silu_mul 14336", _silu_mul, True))
    for tokens in (8, 512, 8192):
        in_ci = tokens == 512
        found.append(Case(f"experts 128 of 2048x768, 8 of {tokens} tokens", partial(_experts, 128, 8, tokens), in_ci))
    found.append(Case("experts fp32 8 of 2048x768, 2 of 64 tokens", partial(_experts, 8, 2, 64, torch.float32), False))
    compiled_in_ci = {
        (Kind.INT4, 128, 16),
        (Kind.INT4, 128, 512),
        (Kind.INT8, 128, 512),
    }
    for weights in Kind:
        for group, rows in product((32, 128), (16, 512)):
            call = partial(_weight_only, weights, group, rows)
            name = f"{weights.name.lower()} weights, group {group}, {rows} rows of 4096x4096"
            found.append(Case(name, call, (weights, group, rows) in compiled_in_ci))
    for scale_type, group in ((Scales.E8M0, 32), (Scales.E4M3, 16)):
        for rows in (16, 512):
            call = partial(_weight_only, Kind.FP4, group, rows, scale_type)
            name = f"fp4 weights, group {group}, scales in {scale_type.name.lower()}, {rows} rows of 4096x4096"
            found.append(Case(name, call, (scale_type, rows) in ((Scales.E8M0, 16), (Scales.E4M3, 512))))
    for form in ("mxfp4", "nvfp4", "int4", "e4m3 in blocks"):
        for tokens in (8, 4096):
            name = f"expert weights in {form}, 4 of 32 of 2880x2880, {tokens} tokens"
            in_ci = form in ("nvfp4", "e4m3 in blocks") and tokens == 4096
            found.append(Case(name, partial(_quantised_experts, form, tokens), in_ci))
    for rows in (16, 512):
        blocks = partial(_fp8_linear, 128, rows)
        found.append(Case(f"e4m3 weights in blocks of 128, {rows} rows of 4096x4096", blocks, rows > 16))
        found.append(Case(f"e4m3 weights by output, {rows} rows of 4096x4096", partial(_fp8_linear, 0, rows), False))
    found.append(Case("sample 128256", _sample, True))
    found.append(Case("sample 128256, no truncation", partial(_sample, any_truncation=False), True))
    found.append(Case("sample 128256, greedy", partial(_sample, any_random=False), True))
    found.append(Case("sample 64128 of 128256, no truncation", _sample_part, True))
    found.append(Case("mask_tokens 128256", _mask_tokens, True))
    found.append(Case("copy_blocks", _copy_blocks, True))
    found.append(Case("scatter_words", _scatter_words, True))
    found.append(Case("prepare_decode, page 16", _prepare_decode, True))
    return found


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _attention(
    head_dim: int,
    group_size: int,
    block_size: int,
    *,
    num_tokens: int = 512,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    with_sinks: bool = False,
) -> None:
    kept = kv_dtype or dtype
    cache = _meta(1024, 8, block_size, cached_size(head_dim, kept), dtype=kept)
    paged_attention(
        _meta(num_tokens, 8 * group_size, head_dim, dtype=dtype),
        cache,
        cache,
        _meta(4, 4096 // block_size, dtype=torch.int32),
        _meta(5, dtype=torch.int32),
        _meta(4, dtype=torch.int32),
        max_query_len=num_tokens - 3,
        scale=head_dim**-0.5,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        sinks=_meta(8 * group_size, dtype=torch.float32) if with_sinks else None,
    )


def _latent_attention(num_heads: int, rank: int, num_tokens: int, kv_dtype: torch.dtype) -> None:
    latent_attention(
        _meta(num_tokens, num_heads, rank + 64, dtype=torch.float32 if kv_dtype == torch.float32 else torch.bfloat16),
        _meta(1024, 1, 16, cached_size(rank, kv_dtype), dtype=kv_dtype),
        _meta(1024, 1, 16, cached_size(64, kv_dtype), dtype=kv_dtype),
        _meta(4, 256, dtype=torch.int32),
        _meta(5, dtype=torch.int32),
        _meta(4, dtype=torch.int32),
        max_query_len=max(1, num_tokens - 3),
        scale=0.1,
    )


def _write_latent() -> None:
    latents, rotaries = _meta(1024, 1, 16, 512), _meta(1024, 1, 16, 64)
    write_kv(_meta(32, 1, 512), _meta(32, 1, 64), latents, rotaries, _meta(32, dtype=torch.int64))


def _write_kv(kv_dtype: torch.dtype = torch.bfloat16) -> None:
    cache = _meta(1024, 8, 16, cached_size(128, kv_dtype), dtype=kv_dtype)
    write_kv(_meta(32, 8, 128), _meta(32, 8, 128), cache, cache, _meta(32, dtype=torch.int64))


def _rms_norm(shape: tuple[int, ...], with_residual: bool, weight_offset: float) -> None:
    x, weight = _meta(32, *shape), _meta(shape[-1])
    if with_residual:
        rms_norm(x, weight, 1e-5, residual=_meta(32, *shape), weight_offset=weight_offset)
    else:
        rms_norm(x, weight, 1e-5, weight_offset=weight_offset)


def _rotary(head_dim: int) -> None:
    angles = _meta(32, 32 if head_dim < 128 else 64, dtype=torch.float32)
    apply_rotary(_meta(32, 32, head_dim), _meta(32, 8, head_dim), angles, angles)


def _qkv(num_heads: int, normed: bool, kv_dtype: torch.dtype = torch.bfloat16) -> None:
    norm = _meta(128) if normed else None
    angles, cache = _meta(32, 64, dtype=torch.float32), _meta(1024, 8, 16, cached_size(128, kv_dtype), dtype=kv_dtype)
    slots = _meta(32, dtype=torch.int64)
    rotate_and_cache(_meta(32, (num_heads + 16) * 128), norm, norm, 1e-5, angles, angles, cache, cache, slots)


def _silu_mul() -> None:
    silu_mul(_meta(32, 2 * 14336))


def _experts(count: int, top_k: int, num_tokens: int, dtype: torch.dtype = torch.bfloat16) -> None:
    gate_up, down = _meta(count, 2 * 768, 2048, dtype=dtype), _meta(count, 2048, 768, dtype=dtype)
    x, logits = _meta(num_tokens, 2048, dtype=dtype), _meta(num_tokens, count, dtype=dtype)
    mix_experts(x, logits, ExpertLayers(gate_up, down), top_k=top_k, renormalise=True)


def _quantised_experts(form: str, num_tokens: int) -> None:
    count = 32
    hidden, inner = (3072, 2944) if form == "e4m3 in blocks" else (2880, 2880)

    def layer(outputs: int, inputs: int) -> ExpertWeights:
        if form == "e4m3 in blocks":
            scales = _meta(count, outputs // 128, inputs // 128, dtype=torch.float32)
            return Fp8Weight(_meta(count, outputs, inputs, dtype=torch.uint8), scales, (128, 128))
        kind, group, scale_type = {
            "mxfp4": (Kind.FP4, 32, Scales.E8M0),
            "nvfp4": (Kind.FP4, 16, Scales.E4M3),
            "int4": (Kind.INT4, 64, Scales.FLOAT),
        }[form]
        scales = _meta(
            count, inputs // group, outputs, dtype=torch.uint8 if scale_type is not Scales.FLOAT else torch.bfloat16
        )
        factors = _meta(count, outputs, dtype=torch.float32) if scale_type is Scales.E4M3 else None
        codes = _meta(count, outputs, inputs // 2, dtype=torch.uint8)
        return WeightOnly(kind, inputs, group, codes, scales, None, scale_type, factors)

    layers = ExpertLayers(
        layer(2 * inner, hidden),
        layer(hidden, inner),
        _meta(count, 2 * inner),
        _meta(count, hidden),
        ClampedSwiglu(1.702, 7.0),
    )
    mix_experts(_meta(num_tokens, hidden), _meta(num_tokens, count), layers, top_k=4, renormalise=True)


def _weight_only(kind: Kind, group: int, rows: int, scale_type: Scales = Scales.FLOAT) -> None:
    codes = _meta(4096, 4096 * kind.bits // 8, dtype=torch.int8 if kind is Kind.INT8 else torch.uint8)
    zeros = _meta(4096 // group, 4096, dtype=torch.uint8) if kind is Kind.INT4 else None
    scales = _meta(4096 // group, 4096, dtype=torch.bfloat16 if scale_type is Scales.FLOAT else torch.uint8)
    factors = _meta(4096, dtype=torch.float32) if scale_type is Scales.E4M3 else None
    weight = WeightOnly(kind, 4096, group, codes, scales, zeros, scale_type, factors)
    weight_only_linear(_meta(rows, 4096), weight, _meta(4096))


def _fp8_linear(block: int, rows: int) -> None:
    high, wide = (block, block) if block else (1, 4096)
    scales = _meta(4096 // high, 4096 // wide, dtype=torch.float32)
    weight = Fp8Weight(_meta(4096, 4096, dtype=torch.uint8), scales, (high, wide))
    fp8_linear(_meta(rows, 4096), weight, _meta(4096))


def _sample(any_random: bool = True, any_truncation: bool = True) -> None:
    sample(_meta(32, 128256), _sampling(any_random, any_truncation))


def _sample_part() -> None:
    best_in_part(_meta(32, 64128), _sampling(any_random=True, any_truncation=False), 64128)


def _sampling(any_random: bool, any_truncation: bool) -> SamplingTensors:
    floats = _meta(32, dtype=torch.float32)
    ints = _meta(32, dtype=torch.int32)
    return SamplingTensors(
        temperature=floats,
        top_k=ints,
        top_p=floats,
        min_p=floats,
        seed=_meta(32, dtype=torch.int64),
        choice=ints,
        position=ints,
        any_random=any_random,
        any_truncation=any_truncation,
    )


def _mask_tokens() -> None:
    places, lines = _meta(2, 3, dtype=torch.int64)
    mask_tokens(_meta(32, 128256), places, _meta(64, 4008, dtype=torch.int32), lines)


def _copy_blocks() -> None:
    pool = BlockPool([_meta(64, 8, 16, 128)], torch.device("meta"))
    copy_blocks(pool, pool, _meta(2, 5, dtype=torch.int64))


def _scatter_words() -> None:
    scatter_words(_meta(1 << 20, dtype=torch.int32), _meta(2, 700, dtype=torch.int32))


def _prepare_decode() -> None:
    narrow, wide = _meta(32, dtype=torch.int32), _meta(32, dtype=torch.int64)
    tables = _meta(32, 8193, dtype=torch.int32)
    out = DecodeInputs(wide, wide, wide, wide, narrow, tables)
    prepare_decode(narrow, narrow, _meta(65, dtype=torch.int64), tables, 16, out)


def compile_cases(chosen: Iterable[Case], architectures: Iterable[int] = ARCHITECTURES) -> Iterator[Compiled]:
    """Compile the launches of each case for each architecture; raise if a kernel does not compile."""
    if not HAVE_TRITON:
        raise RuntimeError("triton: not installed; install it to compile the kernels")
    targets = list(architectures)
    seen: set[str] = set()
    for case, architecture in product(chosen, targets):
        with record_launches(architecture) as launches:
            case.call()
        for launch in launches:
            source, options = _source_of(launch)
            key = f"{architecture} {source.hash()} {options}"
            if key not in seen:
                seen.add(key)
                yield _compile(case.name, launch, source, options, architecture)


def _source_of(launch: Launch) -> tuple[Any, dict[str, Any]]:
    """Return the inputs of Triton's compiler for a launch: the source with types and constants, and the options."""
    from triton.compiler import ASTSource

    function = launch.kernel.function
    names = function.arg_names
    values = dict(zip(names, launch.args, strict=False))
    values |= {name: value for name, value in launch.options.items() if name in names}
    options = {name: value for name, value in launch.options.items() if name not in names}
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, (parameter, name) in enumerate(zip(function.params, names, strict=True)):
        value = values[name]
        varies = parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1 and not varies):
            signature[name] = "constexpr"
            constants[(index,)] = value
        elif isinstance(value, torch.Tensor):
            signature[name] = "*" + _TYPE_NAMES[value.dtype]
            if not varies:
                attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[name] = "i32"
            if value % 16 == 0 and not varies:
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    return ASTSource(function, signature, constants, attributes), options


def _compile(case: str, launch: Launch, source: Any, options: dict[str, Any], architecture: int) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget

    binary = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    registers, spill_bytes = resource_usage(binary.asm["cubin"])
    listing = disassemble(binary.asm["cubin"])
    return Compiled(
        case=case,
        kernel=launch.kernel.name,
        architecture=architecture,
        registers=registers,
        spill_bytes=spill_bytes,
        shared_bytes=binary.metadata.shared,
        num_warps=binary.metadata.num_warps,
        copies_ahead=copies_ahead(binary.asm["ttgir"]),
        loop_instructions=loop_instructions(listing),
        instructions=num_instructions(listing),
    )


def main(arguments: list[str] | None = None) -> int:
    """Compile and print the table; return 0 if all kernels compile and fit into the GPU's shared memory."""
    parser = argparse.ArgumentParser(
        prog="python -m measure.kernels.aot", description="Compile the kernels without a GPU."
    )
    parser.add_argument("--all", action="store_true", help="compile every case, not only those of CI")
    parser.add_argument("--only", default="", metavar="TEXT", help="compile cases whose names contain this text")
    parser.add_argument(
        "--architectures", default=",".join(map(str, ARCHITECTURES)), metavar="N,…", help="compute capabilities"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the table as JSON")
    options = parser.parse_args(arguments)

    rows = []
    print(
        f"{'sm':>3} {'regs':>5} {'spill B':>8} {'shared B':>9} {'warps':>6} {'ahead':>6} {'in loops':>12} {'in all':>6}"
        "  kernel"
    )
    chosen = [case for case in cases() if (options.all or case.in_ci) and options.only in case.name]
    for row in compile_cases(chosen, map(int, options.architectures.split(","))):
        rows.append(row)
        print(
            f"{row.architecture:>3} {row.registers:>5} {row.spill_bytes:>8} {row.shared_bytes:>9} {row.num_warps:>6}"
            f" {'' if row.copies_ahead is None else row.copies_ahead:>6}"
            f" {' '.join(map(str, row.loop_instructions)):>12} {row.instructions:>6}  {row.kernel} ({row.case})",
            flush=True,
        )
    if options.json:
        import triton

        lines = ",\n".join(json.dumps(asdict(row)) for row in rows)
        command = " ".join(["python -m measure.kernels.aot", *["--all"] * options.all, "--json FILE"])
        head = json.dumps({"command": command, "triton": triton.__version__})
        options.json.write_text(f'{head[:-1]}, "kernels": [\n{lines}\n]}}\n')
    too_large = [row for row in rows if row.shared_bytes > SHARED_BYTES[row.architecture]]
    for row in too_large:
        print(f"{row.kernel} ({row.case}) cannot be launched: sm_{row.architecture} has too little shared memory")
    return 1 if too_large else 0


if __name__ == "__main__":
    sys.exit(main())
