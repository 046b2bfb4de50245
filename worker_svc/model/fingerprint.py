"""What tells two loaded models apart: equal fingerprints mean that either may continue what the other has begun.

A request may move from one worker to another, and blocks of KV are shared by keys that begin with the fingerprint. So
it covers all that decides the numbers: configuration, weights, and the type that they are computed in.

Reading every byte of a large checkpoint a second time would cost a start tens of seconds. Each tensor is sampled
instead, `SAMPLE_BYTES` at its beginning and then at every `STRIDE_BYTES`; its last stride is read to the end, so that a
small tensor is read whole. Models that were trained differently differ in every tensor that was trained; what is not
seen is a change of single values deep inside a large tensor, made by hand.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import torch

from shared.config import ConfigError
from worker_svc.model.weights import weight_files

SAMPLE_BYTES = 4096
STRIDE_BYTES = 1 << 20
_MAX_HEADER = 100 << 20
"""What safetensors itself allows."""


def fingerprint(
    folder: Path,
    dtype: torch.dtype,
    *,
    with_weights: bool,
    kv_dtype: torch.dtype | None = None,
    quantization: str = "none",
) -> str:
    """sha256 (hex) over config.json, the types and each weight file's name, size, header and samples of its tensors.

    Args:
        folder: the checkpoint.
        dtype: what weights and activations are computed in.
        kv_dtype: what KV is kept in; None: `dtype`.
        with_weights: False where the weights are drawn at random, which is then what the fingerprint says of them.
        quantization: form of the weights as they are computed with.

    Raises:
        ConfigError: no weights, or a file that is no safetensors file.
    """
    digest = hashlib.sha256()
    _add(digest, (folder / "config.json").read_bytes())
    _add(digest, str(dtype).encode())
    if kv_dtype not in (None, dtype):
        _add(digest, f"KV {kv_dtype}".encode())
    if quantization != "none":
        _add(digest, quantization.encode())
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
    """Each piece with its length, so that no two lists of pieces look alike."""
    digest.update(len(piece).to_bytes(8, "little"))
    digest.update(piece)


def _pieces(file: Path, opened: BinaryIO) -> Iterator[bytes]:
    """The header, then the samples of each tensor in the order in which they lie in the file."""
    length = int.from_bytes(opened.read(8), "little")
    if length > _MAX_HEADER:
        raise ConfigError(f"model: {file} is damaged: its header claims {length} bytes")
    header = opened.read(length)
    yield header
    try:
        tensors = [entry["data_offsets"] for name, entry in json.loads(header).items() if name != "__metadata__"]
        spans = sorted((int(begin), int(end)) for begin, end in tensors)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ConfigError(f"model: {file} is damaged: its header is not that of a safetensors file") from None
    for begin, end in spans:
        if not 0 <= begin <= end:
            raise ConfigError(f"model: {file} is damaged: a tensor lies at [{begin}, {end})")
        for offset in range(begin, end, STRIDE_BYTES):
            opened.seek(8 + length + offset)
            # A small tensor, and the last part of a large one, is read to its end.
            rest = end - offset
            yield opened.read(rest if rest <= STRIDE_BYTES else SAMPLE_BYTES)
