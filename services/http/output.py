"""Output of one chat with one choice: its parts, and its end."""

from collections.abc import Callable, Iterable

from quire.v1 import generation_pb2 as v1


class ChatOutput:
    """The output so far."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        """Create the output; `token_bytes` maps a token id to its bytes."""
        self._token_bytes = token_bytes
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.cached_tokens = 0
        """Prompt tokens read from the prefix cache; known at the end."""
        self.reasoning_tokens = 0
        """Output tokens up to the end of the reasoning; known at the end."""
        self._token_ids: list[int] = []
        self._reasoning_bytes = 0
        self.finished: v1.Finished | None = None
        """The end; None before."""

    def take(self, response: v1.GenerateResponse) -> Iterable[v1.OutputPart]:
        """Return the parts in the generator's next message."""
        match response.WhichOneof("event"):
            case "delta":
                delta = response.delta
                self.output_tokens += len(delta.token_ids)
                self._token_ids += delta.token_ids
                self._reasoning_bytes += sum(len(part.reasoning.encode()) for part in delta.parts)
                return delta.parts
            case "finished":
                self.finished = response.finished
                self.cached_tokens = response.finished.usage.cached_prompt_tokens
                self.output_tokens = response.finished.usage.completion_tokens
                self.reasoning_tokens = self._tokens_of(self._reasoning_bytes)
        return ()

    def _tokens_of(self, size: int) -> int:
        """Return how many tokens the first bytes of the output are, however the output was cut into messages."""
        count = 0
        while size > 0 and count < len(self._token_ids):
            size -= len(self._token_bytes(self._token_ids[count]))
            count += 1
        return count

    @property
    def reached_limit(self) -> bool:
        """Whether the output ended because of its maximum length."""
        return self.finished is not None and self.finished.reason == v1.FINISH_REASON_LENGTH
