"""Identity of the core's code. The same code makes the same plans from the same record."""

import hashlib
from functools import cache
from pathlib import Path

import scheduler_svc.core as core


@cache
def code_hash() -> str:
    """Return a hash of the core's source files."""
    folder = Path(core.__file__).parent
    hasher = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        hasher.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return hasher.hexdigest()[:16]
