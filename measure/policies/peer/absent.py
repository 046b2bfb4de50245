"""Stubs for packages that a scheduler imports but never calls, used if they are not installed."""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any


class _Meta(type):
    """Metaclass for stub classes that have every attribute and work in type hints."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing(name)

    def __or__(cls, other: object) -> Any:
        return cls

    def __ror__(cls, other: object) -> Any:
        return cls

    def __getitem__(cls, key: object) -> Any:
        return cls


class _Module(types.ModuleType):
    """Stub module that has every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = _nothing(name)
        setattr(self, name, found)
        return found


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: frozenset[str]) -> None:
        self._names = names

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> Any:
        """Find every module of the stub packages. This finder is asked last, so installed packages take precedence."""
        if name.partition(".")[0] not in self._names:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Return an empty module."""
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Turn the module into a package with a version."""
        module.__path__ = []
        module.__version__ = "0.0"  # type: ignore[attr-defined]


def stand_in(*names: str) -> None:
    """Make these packages importable if they are not installed."""
    sys.meta_path.append(_Finder(frozenset(names)))


def _nothing(name: str) -> Any:
    return _Meta(name, (), {"__init__": lambda self, *args, **kwargs: None})
