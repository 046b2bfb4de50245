"""Output of one chat with one choice: its parts, and its end."""

from collections.abc import Iterable

from quire.v1 import generation_pb2 as v1


class ChatOutput:
    """The output so far."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.cached_tokens = 0
        """Prompt tokens read from the prefix cache; known at the end."""
        self.reasoning_tokens = 0
        """Output tokens whose text is reasoning."""
        self._reasons = False
        """Whether the last part was reasoning."""
        self.finished: v1.Finished | None = None
        """The end; None before."""

    def take(self, response: v1.GenerateResponse) -> Iterable[v1.OutputPart]:
        """Return the parts in the generator's next message."""
        match response.WhichOneof("event"):
            case "delta":
                delta = response.delta
                if delta.parts:
                    self._reasons = delta.parts[-1].WhichOneof("kind") == "reasoning"
                self.output_tokens += len(delta.token_ids)
                self.reasoning_tokens += len(delta.token_ids) if self._reasons else 0
                return delta.parts
            case "finished":
                self.finished = response.finished
                self.cached_tokens = response.finished.usage.cached_prompt_tokens
                self.output_tokens = response.finished.usage.completion_tokens
        return ()

    @property
    def reached_limit(self) -> bool:
        """Whether the output ended because of its maximum length."""
        return self.finished is not None and self.finished.reason == v1.FINISH_REASON_LENGTH
