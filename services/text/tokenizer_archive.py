"""The tokenizer's files as one archive, for routers that tokenise themselves."""

import hashlib
import io
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CHUNK_BYTES = 1 << 20
"""Chunk size in bytes, below the default message limit of all gRPC implementations (4 MiB)."""

_PATTERNS = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
_NOT_FOR_TEXT = ("model.safetensors.index.json", "quality.json")
_EPOCH = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class TokenizerArchive:
    """A zip archive; equal files give equal bytes."""

    data: bytes
    sha256: str
    """SHA-256 of `data`, hex."""

    def chunks(self) -> Iterator[bytes]:
        """Yield the archive in pieces of at most `CHUNK_BYTES`."""
        for start in range(0, len(self.data), CHUNK_BYTES):
            yield self.data[start : start + CHUNK_BYTES]


def pack_tokenizer(folder: Path) -> TokenizerArchive:
    """Return the tokenizer's files of a checkpoint folder, without weights.

    Raises:
        OSError: a file cannot be read.
    """
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted({path for pattern in _PATTERNS for path in folder.glob(pattern)}):
            if path.is_file() and path.name not in _NOT_FOR_TEXT:
                archive.writestr(zipfile.ZipInfo(path.name, _EPOCH), path.read_bytes(), zipfile.ZIP_DEFLATED)
    data = buffer.getvalue()
    return TokenizerArchive(data, hashlib.sha256(data).hexdigest())
