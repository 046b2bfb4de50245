"""Choice of the instruction-set level for the native CPU kernels.

A level can be used if the library was compiled with it, the processor supports its instructions, and it passes a
self-test. The self-test compares small products and attention with float64 results, and takes about a millisecond at
start. If the self-test fails, a warning is logged and the next lower level is tried.
"""

from __future__ import annotations

import logging
import os
from functools import cache

from torch.utils._python_dispatch import _disable_current_modes

from kernels.native.library import Native, native_levels
from kernels.native.selftest import failure

_SERVING = ("amx", "avx512", "avx2")  # best first; omits the portable level, which is slower than torch
_VARIABLE = "QUIRE_CPU_KERNELS"
_log = logging.getLogger(__name__)


@cache
def native() -> Native | None:
    """Return this process's native kernels, chosen at the first call; None to use torch."""
    wanted = os.environ.get(_VARIABLE, "auto")
    if wanted == "off":
        return None
    levels = {candidate.level_name: candidate for candidate in native_levels()}
    names = _SERVING if wanted == "auto" else (wanted,)
    for name in names:
        if name not in levels:
            continue
        with _disable_current_modes():  # The caller may have enabled a torch mode that changes dtypes.
            reason = failure(levels[name])
        if reason is None:
            return levels[name]
        _log.warning("native CPU kernels: level %s failed its self-test and is not used: %s", name, reason)
    if wanted != "auto":
        _log.warning(
            "%s: level %r is not available on this machine, so torch is used; set it to auto to choose the best level",
            _VARIABLE,
            wanted,
        )
    return None
