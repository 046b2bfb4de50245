"""Structures of the C ABI (`format.h`, `levels.h`, `sampling.h`, `decoder.h`), field by field."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int32, c_int64, c_void_p

import torch

from kernels import kv_quantised

FLOAT32, BFLOAT16, INT8, INT4, FP8 = 0, 1, 2, 3, 4
Q4_0, Q8_0, Q4_K, Q5_K, Q6_K = 5, 6, 7, 8, 9
PARTS = 10
STORE_FLOAT, ADD_FLOAT, STORE_BFLOAT16 = 0, 1, 2

FORMATS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}
KV_FORMATS = {**FORMATS, torch.int8: INT8, torch.uint8: FP8, kv_quantised.INT4: INT4}


class CLinear(Structure):
    """`Linear`."""

    _fields_ = (
        ("format", c_int32),
        ("count", c_int32),
        ("outputs", c_int64),
        ("inputs", c_int64),
        ("packed", c_void_p),
        ("bias", c_void_p),
        ("scales", c_void_p),
        ("sums", c_void_p),
    )


class CAttention(Structure):
    """`Attention`."""

    _fields_ = (
        ("query", c_void_p),
        ("query_stride", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("k_cache", c_void_p),
        ("v_cache", c_void_p),
        ("cache_format", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("block_size", c_int32),
        ("block_tables", c_void_p),
        ("table_stride", c_int64),
        ("query_start", c_void_p),
        ("context_lens", c_void_p),
        ("num_rows", c_int64),
        ("scale", c_float),
        ("soft_cap", c_float),
        ("sliding_window", c_int32),
        ("sinks", c_void_p),
    )


class CLatentAttention(Structure):
    """`LatentAttention`."""

    _fields_ = (
        ("query", c_void_p),
        ("out", c_void_p),
        ("latent_cache", c_void_p),
        ("rotary_cache", c_void_p),
        ("cache_format", c_int32),
        ("num_heads", c_int32),
        ("rank", c_int32),
        ("rotary_dim", c_int32),
        ("block_size", c_int32),
        ("block_tables", c_void_p),
        ("table_stride", c_int64),
        ("query_start", c_void_p),
        ("context_lens", c_void_p),
        ("num_rows", c_int64),
        ("scale", c_float),
    )


class CHeadProducts(Structure):
    """`HeadProducts`."""

    _fields_ = (
        ("format", c_int32),
        ("packed", c_void_p),
        ("tokens", c_int64),
        ("heads", c_int64),
        ("outputs", c_int64),
        ("inputs", c_int64),
        ("x", c_void_p),
        ("x_token_stride", c_int64),
        ("x_head_stride", c_int64),
        ("out", c_void_p),
        ("out_token_stride", c_int64),
        ("out_head_stride", c_int64),
    )


class CSampling(Structure):
    """`Sampling`."""

    _fields_ = (
        ("logits", c_void_p),
        ("rows", c_int64),
        ("stride", c_int64),
        ("vocab", c_int64),
        ("temperature", c_void_p),
        ("top_k", c_void_p),
        ("top_p", c_void_p),
        ("min_p", c_void_p),
        ("seed", c_void_p),
        ("choice", c_void_p),
        ("position", c_void_p),
        ("tokens", c_void_p),
        ("first", c_int64),
        ("sums", c_void_p),
    )


class CDeltaRule(Structure):
    """`DeltaRule`."""

    _fields_ = (
        ("query", c_void_p),
        ("key", c_void_p),
        ("value", c_void_p),
        ("query_stride", c_int64),
        ("key_stride", c_int64),
        ("value_stride", c_int64),
        ("gate", c_void_p),
        ("beta", c_void_p),
        ("out", c_void_p),
        ("state", c_void_p),
        ("places", c_void_p),
        ("format", c_int32),
        ("normalise", c_int32),
        ("rows", c_int64),
        ("tokens", c_int64),
        ("key_heads", c_int64),
        ("value_heads", c_int64),
        ("key_dim", c_int64),
        ("value_dim", c_int64),
    )


class CSelectiveScan(Structure):
    """`SelectiveScan`."""

    _fields_ = (
        ("x", c_void_p),
        ("write", c_void_p),
        ("read", c_void_p),
        ("x_stride", c_int64),
        ("write_stride", c_int64),
        ("read_stride", c_int64),
        ("step", c_void_p),
        ("decay", c_void_p),
        ("skip", c_void_p),
        ("out", c_void_p),
        ("state", c_void_p),
        ("places", c_void_p),
        ("format", c_int32),
        ("out_format", c_int32),
        ("rows", c_int64),
        ("tokens", c_int64),
        ("heads", c_int64),
        ("groups", c_int64),
        ("head_dim", c_int64),
        ("state_dim", c_int64),
    )


class CNorm(Structure):
    """`Norm`."""

    _fields_ = (
        ("x", c_void_p),
        ("weight", c_void_p),
        ("out", c_void_p),
        ("eps", c_float),
        ("format", c_int32),
        ("rounds_twice", c_int32),
        ("rows", c_int64),
        ("dim", c_int64),
    )


class CKvWrite(Structure):
    """`KvWrite`."""

    _fields_ = (
        ("key", c_void_p),
        ("value", c_void_p),
        ("key_token_stride", c_int64),
        ("key_head_stride", c_int64),
        ("value_token_stride", c_int64),
        ("value_head_stride", c_int64),
        ("k_cache", c_void_p),
        ("v_cache", c_void_p),
        ("slots", c_void_p),
        ("tokens", c_int64),
        ("heads", c_int64),
        ("block_size", c_int64),
        ("key_bytes", c_int64),
        ("value_bytes", c_int64),
    )


class CTokenConvolution(Structure):
    """`TokenConvolution`."""

    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("out", c_void_p),
        ("format", c_int32),
        ("silu", c_int32),
        ("tokens", c_int64),
        ("channels", c_int64),
        ("width", c_int64),
    )


class CConvolution(Structure):
    """`Convolution`."""

    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("state", c_void_p),
        ("places", c_void_p),
        ("out", c_void_p),
        ("format", c_int32),
        ("silu", c_int32),
        ("rows", c_int64),
        ("channels", c_int64),
        ("width", c_int64),
    )


class CMixture(Structure):
    """`Mixture`."""

    _fields_ = (
        ("router", CLinear),
        ("gate_up", c_void_p),
        ("down", c_void_p),
        ("shared_gate", CLinear),
        ("top_k", c_int64),
        ("renormalise", c_int64),
    )


class CLayer(Structure):
    """`Layer`."""

    _fields_ = (
        ("input_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("qkv", CLinear),
        ("output", CLinear),
        ("gate_up", CLinear),
        ("down", CLinear),
        ("mixture", c_void_p),
        ("sliding_window", c_int64),
    )


class CDecoder(Structure):
    """`Decoder`."""

    _fields_ = (
        ("num_layers", c_int64),
        ("layers", c_void_p),
        ("head", CLinear),
        ("final_norm", c_void_p),
        ("embedding", c_void_p),
        ("embedding_format", c_int64),
        ("hidden", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("rotary_half", c_int64),
        ("cache_format", c_int64),
        ("block_size", c_int64),
        ("eps", c_float),
        ("scale", c_float),
        ("reduce", c_void_p),
        ("rank", c_int64),
        ("first_token", c_int64),
    )


class CStep(Structure):
    """`Step`."""

    _fields_ = (
        ("num_tokens", c_int64),
        ("num_rows", c_int64),
        ("num_kept", c_int64),
        ("num_logits", c_int64),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("block_tables", c_void_p),
        ("table_stride", c_int64),
        ("groups", c_void_p),
        ("window_slots", c_void_p),
        ("window_tables", c_void_p),
        ("query_start", c_void_p),
        ("context_lens", c_void_p),
        ("k_caches", c_void_p),
        ("v_caches", c_void_p),
        ("kept_index", c_void_p),
        ("logits", c_void_p),
        ("hidden", c_void_p),
    )
