"""Container probe: checks whether the main loop of the process still runs.

    QUIRE_PULSE_FILE=/run/quire/pulse python -m quire_server.probe 60

The probe fails while there is no pulse file (the process is still loading), or if the last update is older than 60
seconds. In a group of ranks, only rank 0 has a pulse file. The probe succeeds on other ranks, which restart together
with rank 0.
"""

import os
import sys
import time
from pathlib import Path

from quire_server.entry import add_packages


def main(arguments: list[str]) -> int:
    """Return the exit code for a maximum age of the last beat, in seconds."""
    if os.environ.get("RANK", "0") != "0":
        return 0
    add_packages()
    from shared.pulse import ENVIRONMENT

    try:
        age = time.time() - Path(os.environ.get(ENVIRONMENT, "")).stat().st_mtime
    except OSError as error:
        print(f"pulse: {error}; the process has not started its main loop", file=sys.stderr)
        return 1
    if age > float(arguments[0]):
        print(f"pulse: the last beat was {age:.0f} s ago; the main loop hangs", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
