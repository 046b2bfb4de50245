"""The command `quire` as it is installed.

The server's packages have common names (`services`, `shared`, `kernels`, …). In the wheel they are in the private
folder `_packages`, so that they neither hide nor are hidden by an application's packages with the same names. This
module adds that folder to the import path of this process and, through the environment, of its children. In a source
tree, the folder does not exist and the packages are imported directly.
"""

import os
import signal
import sys
from pathlib import Path

_PACKAGES = Path(__file__).parent / "_packages"


def add_packages() -> None:
    """Make the server's packages importable."""
    if _PACKAGES.is_dir():
        sys.path.insert(0, str(_PACKAGES))
        inherited = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(_PACKAGES), *([inherited] if inherited else [])])


def main() -> int:
    """Run the command line; return its exit code."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Until the command runs, Ctrl-C ends the process at once, because imports need no cleanup and no message.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    add_packages()
    from quire_server.cli.main import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
