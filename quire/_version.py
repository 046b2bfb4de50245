"""The version of the installed client, or of the source tree."""

from importlib.metadata import PackageNotFoundError, version


def _installed() -> str:
    for name in ("quire-client", "quire-server"):  # an editable install of the source tree has the second name only
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "0.0.0+source"  # run from a source tree that was never installed


__version__ = _installed()
