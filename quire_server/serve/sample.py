"""First example for a newcomer: the streamed tokens of one prompt, and how to call the server."""

from quire.aio import AsyncClient
from quire.errors import QuireError
from quire_server.serve.supervisor import Addresses

PROMPT = "Once upon a time"
_MAX_TOKENS = 80


async def show_sample(addresses: Addresses, token: str) -> None:
    """Send one prompt through gRPC, print the answer as it streams, then print how to call the server.

    Args:
        addresses: where the service listens.
        token: bearer token for the call; empty for none.
    """
    print(f"\n  {PROMPT}", end="", flush=True)
    async with AsyncClient(addresses.grpc, token=token) as client:
        try:
            generation = client.generate(PROMPT, max_tokens=_MAX_TOKENS, temperature=0.7, seed=1)
            async for delta in generation:
                print(delta.text.replace("\n", "\n  "), end="", flush=True)
        except QuireError as error:
            print(f"\n  (the sample failed: {error.code}: {error.message})", end="")
        else:
            finished = generation.finished
            assert finished is not None  # A stream without `finished` raises an error.
            rate = finished.usage.completion_tokens / max(finished.timings.total_s, 1e-9)
            print(
                f"\n\n  {finished.usage.completion_tokens} tokens, first after"
                f" {finished.timings.first_token_s:.2f} s, {rate:.0f} tokens/s",
                end="",
            )
    print(_how_to_call(addresses), flush=True)


def _how_to_call(addresses: Addresses) -> str:
    return f"""

gRPC at {addresses.grpc}, HTTP at http://{addresses.http} (/health, /ready, /metrics). Ctrl-C ends it.
Call it from another shell:

  .venv/bin/quire generate "Once upon a time" --max-tokens 64 --target {addresses.grpc}

  .venv/bin/python -c 'from quire import Client
  for delta in Client("{addresses.grpc}").generate("Once upon a time", max_tokens=64):
      print(delta.text, end="", flush=True)'

  grpcurl -plaintext -d '{{"text": "Once upon a time", "stop": {{"maxTokens": 64}}}}' \\
      {addresses.grpc} quire.v1.GenerationService/Generate

Console: http://{addresses.http}/
curl http://{addresses.http}/v1/completions -H 'Content-Type: application/json' -d '{{"prompt": "Hi", "max_tokens": 9}}'
"""
