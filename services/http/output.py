"""Output of one chat with one choice, and the base class that writes it in an API's format."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from quire.v1 import generation_pb2 as v1
from services.access.shares import Slices

Json = dict[str, Any]


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
        """Number of output tokens up to the end of the reasoning; set when the output ends."""
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
        """Return the number of tokens in the first `size` bytes of output, regardless of message boundaries."""
        count = 0
        while size > 0 and count < len(self._token_ids):
            size -= len(self._token_bytes(self._token_ids[count]))
            count += 1
        return count

    @property
    def reached_limit(self) -> bool:
        """Whether the output ended because of its maximum length."""
        return self.finished is not None and self.finished.reason == v1.FINISH_REASON_LENGTH


class ChatAnswer:
    """Base class for writers of chat output. Each API derives a class with its own events. See `runner.ApiAnswer`."""

    def __init__(self, output: ChatOutput) -> None:
        self.output = output
        self._begun = False

    def begin_prompt(self, _prompt: int, token_ids: Sequence[int]) -> None:
        """Record the tokens of the prompt."""
        self.output.prompt_tokens = len(token_ids)

    async def read_prompt(self, _prompt: int, _event: v1.Prompt, _slices: Slices) -> None:
        """Ignore the log-probabilities of the prompt, because these APIs have no field for them."""

    def events(self, _prompt: int, message: v1.GenerateResponse) -> list[Json]:
        """Return the events for the generator's next message, after the first events if it is the first message."""
        first = [] if self._begun else [*self.begin()]
        self._begun = True
        return [*first, *self.write(message)]

    def last(self) -> tuple[Json, ...]:
        """Return no events, because the last message contains the end."""
        return ()

    def begin(self) -> Iterator[Json]:
        """Yield the events before the output."""
        raise NotImplementedError

    def write(self, message: v1.GenerateResponse) -> Iterator[Json]:
        """Yield the events of the generator's next message."""
        raise NotImplementedError
