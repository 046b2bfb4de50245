"""Fingerprint of a loaded model: workers with equal fingerprints compute the same results.

A request may move between workers with equal fingerprints, and the keys of shared KV blocks contain the fingerprint. It
therefore covers everything that affects the results: configuration, weights and dtypes.

Hashing every byte of a large checkpoint would add tens of seconds to the start. Instead, each tensor is sampled:
`SAMPLE_BYTES` at every `STRIDE_BYTES`. The last stride is read completely, and so are small tensors. Training changes
all values of a tensor, so samples detect it. A manual change of single values in a large tensor may be missed.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import torch

from shared.config import ConfigError
from worker_svc.model import gguf
from worker_svc.model.weights import weight_files

SAMPLE_BYTES = 4096
STRIDE_BYTES = 1 << 20
_MAX_HEADER = 100 << 20
"""Limit of a header in bytes, as in safetensors itself."""


def fingerprint(
    folder: Path,
    dtype: torch.dtype,
    *,
    with_weights: bool,
    kv_dtype: torch.dtype | None = None,
    quantization: str = "none",
    long_rope: bool = False,
) -> str:
    """Return the SHA-256 (hex) of config.json, the dtypes, and each weight file's name, size, header and samples.

    Args:
        folder: the checkpoint.
        dtype: type of weights and activations.
        kv_dtype: type of the KV cache; None means `dtype`.
        with_weights: whether the weights are read from the checkpoint; False if they are random.
        quantization: quantization of the weights at load: "none", "int8" or "int4".
        long_rope: whether the long factors of a longrope scaling apply to all lengths.

    Raises:
        ConfigError: there are no weights, or a file is damaged.
    """
    digest = hashlib.sha256()
    _add(digest, (folder / "config.json").read_bytes())
    _add(digest, str(dtype).encode())
    if kv_dtype not in (None, dtype):
        _add(digest, f"KV {kv_dtype}".encode())
    if quantization != "none":
        _add(digest, quantization.encode())
    if long_rope:
        _add(digest, b"long factors")
    if not with_weights:
        _add(digest, b"random weights")
        return digest.hexdigest()
    for file in weight_files(folder):
        _add(digest, file.name.encode())
        _add(digest, str(file.stat().st_size).encode())
        with file.open("rb") as opened:
            for piece in _pieces(file, opened):
                _add(digest, piece)
    return digest.hexdigest()


def _add(digest: "hashlib._Hash", piece: bytes) -> None:
    """Add a piece with its length, so that different lists of pieces have different digests."""
    digest.update(len(piece).to_bytes(8, "little"))
    digest.update(piece)


def _pieces(file: Path, opened: BinaryIO) -> Iterator[bytes]:
    """Yield the header, then each tensor's samples in file order; for a GGUF file, samples of the whole file."""
    if file.suffix == gguf.SUFFIX:
        yield from _samples(opened, 0, file.stat().st_size)
        return
    length = int.from_bytes(opened.read(8), "little")
    if length > _MAX_HEADER:
        raise ConfigError(
            f"model: {file} is damaged: its header has a length of {length} bytes; download the file again"
        )
    header = opened.read(length)
    yield header
    try:
        tensors = [entry["data_offsets"] for name, entry in json.loads(header).items() if name != "__metadata__"]
        spans = sorted((int(begin), int(end)) for begin, end in tensors)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ConfigError(
            f"model: {file} is damaged: it has no valid safetensors header; download the file again"
        ) from None
    for begin, end in spans:
        if not 0 <= begin <= end:
            raise ConfigError(
                f"model: {file} is damaged: a tensor has the byte range [{begin}, {end}); download the file again"
            )
        yield from _samples(opened, 8 + length + begin, 8 + length + end)


def _samples(opened: BinaryIO, begin: int, end: int) -> Iterator[bytes]:
    """Yield samples from a byte range; a small range, and the end of a large one, is read completely."""
    for offset in range(begin, end, STRIDE_BYTES):
        opened.seek(offset)
        rest = end - offset
        yield opened.read(rest if rest <= STRIDE_BYTES else SAMPLE_BYTES)
