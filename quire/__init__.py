"""The public face of Quire: the Python client, its errors, and (in `quire.cli`) the command line.

    from quire import Client

    with Client("127.0.0.1:50051") as client:
        generation = client.generate("Once upon a time", max_tokens=64)
        for delta in generation:
            print(delta.text, end="", flush=True)
        print(generation.finished)

Nothing here imports torch. `client` and `aio` are the clients, blocking and for asyncio; what they take and give is in
`types`, what they share in the modules with an underscore. `cli` is the command line, `serve` and `batch` are what is
behind two of its commands, `bench` measures through the client. The generated code of the APIs is `quire.v1` and
`quire.admin.v1`.
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
    """Loads a name on first use, so that `quire --help` does not wait for grpc."""
    if name not in __all__:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES.get(name, "quire.types")), name)
