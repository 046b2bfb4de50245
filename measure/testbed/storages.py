"""The memory that tensors take, found by walking through objects."""

from collections.abc import Iterator
from typing import Any

import torch


def bytes_of(value: object) -> int:
    """Bytes of all distinct storages that an object reaches."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in _tensors(value, set())}
    return sum(storage.nbytes() for storage in storages.values())


def _tensors(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """Every tensor that an object reaches."""
    if id(value) in seen or isinstance(value, type):
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each, seen)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each, seen)
    elif type(value).__module__.startswith(("worker_svc", "kernels", "torch.nn", "transformers")):
        slots = (getattr(value, name, None) for name in getattr(type(value), "__slots__", ()))
        for each in (*getattr(value, "__dict__", {}).values(), *slots):
            yield from _tensors(each, seen)
