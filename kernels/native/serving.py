"""Which level of the CPU kernels serves.

A level serves when the library was compiled with it, the processor has its instructions, and it passes a self-test:
small products and attention, compared with float64. What fails is left out with a line in the log, and
the next lower level is tried; so a wrong path never serves, at the price of a millisecond at start.
"""

from __future__ import annotations

import logging
import os
from functools import cache

from kernels.native.library import Native, native_levels
from kernels.native.selftest import failure

_SERVING = ("avx512", "avx2")  # best first; the portable level is slower than torch
_VARIABLE = "QUIRE_CPU_KERNELS"
_log = logging.getLogger(__name__)


@cache
def native() -> Native | None:
    """The kernels that serve in this process, chosen when they are first asked for; None: torch does."""
    wanted = os.environ.get(_VARIABLE, "auto")
    if wanted == "off":
        return None
    levels = {candidate.level_name: candidate for candidate in native_levels()}
    names = _SERVING if wanted == "auto" else (wanted,)
    for name in names:
        if name not in levels:
            continue
        reason = failure(levels[name])
        if reason is None:
            return levels[name]
        _log.warning("CPU kernels of level %s left out: %s", name, reason)
    if wanted != "auto":
        _log.warning("%s: level %r is not available here", _VARIABLE, wanted)
    return None
