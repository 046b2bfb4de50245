"""The version of the installed package, the one that pyproject.toml states."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("quire")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0.0.0+source"
