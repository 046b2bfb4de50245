"""The Python client of Quire.

    from quire import Client

    with Client("127.0.0.1:50051") as client:
        generation = client.generate("Once upon a time", max_tokens=64)
        for delta in generation:
            print(delta.text, end="", flush=True)
        print(generation.finished)

No module here imports numpy, torch or the server. `aio` is the asyncio client. `client` is the blocking client, which
is generated from `aio`. `types` defines the values of both clients, and the modules with an underscore contain their
shared code. The generated code for the APIs is in `quire.v1` and `quire.admin.v1`.
"""

from typing import TYPE_CHECKING

from quire import errors
from quire._version import __version__

if TYPE_CHECKING:
    from quire.aio import AsyncClient, AsyncGeneration
    from quire.client import Client, Generation
    from quire.types import (
        BatchAnswer,
        Choice,
        ChoiceFinished,
        Completion,
        Delta,
        Embeddings,
        Finished,
        FinishReason,
        GenerateOptions,
        Message,
        Model,
        Prompt,
        SchedulingOptions,
        ScoredToken,
        Timings,
        Tokenized,
        TokenLogprobs,
        ToolCall,
        ToolCallDelta,
        Usage,
    )

__all__ = [
    "AsyncClient",
    "AsyncGeneration",
    "BatchAnswer",
    "Choice",
    "ChoiceFinished",
    "Client",
    "Completion",
    "Delta",
    "Embeddings",
    "FinishReason",
    "Finished",
    "GenerateOptions",
    "Generation",
    "Message",
    "Model",
    "Prompt",
    "SchedulingOptions",
    "ScoredToken",
    "Timings",
    "TokenLogprobs",
    "Tokenized",
    "ToolCall",
    "ToolCallDelta",
    "Usage",
    "__version__",
    "errors",
]

_HOMES = {
    "AsyncClient": "quire.aio",
    "AsyncGeneration": "quire.aio",
    "Client": "quire.client",
    "Generation": "quire.client",
}


def __getattr__(name: str) -> object:
    """Import a name on first use, so that `quire --help` does not import grpc."""
    if name not in __all__:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES.get(name, "quire.types")), name)


def __dir__() -> list[str]:
    """List the public names, including those that were not imported yet."""
    return sorted(__all__)
