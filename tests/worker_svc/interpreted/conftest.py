"""Nothing here is collected unless the interpreter is on: see `tests/worker_svc/test_device_path.py`."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
