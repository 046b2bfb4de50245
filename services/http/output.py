"""Output of one chat with one choice: the generator's messages as parsed events, and its end."""

from quire.v1 import generation_pb2 as v1
from services.http.prompts import NewParser
from services.parsers import Content, Event, OutputParser, Reasoning


class ChatOutput:
    """The output so far."""

    def __init__(self, new_parser: NewParser | None) -> None:
        self._new_parser = new_parser
        self._parser: OutputParser | None = None
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.cached_tokens = 0
        """Prompt tokens read from the prefix cache; known at the end."""
        self.reasoning_tokens = 0
        """Output tokens whose text is reasoning."""
        self._reasons = False
        """Whether the last event was reasoning."""
        self.finished: v1.Finished | None = None
        """The end; None before."""

    def begin(self, prompt_tokens: int, *, reasons: bool) -> None:
        """Record the prompt's number of tokens, and whether the output begins within reasoning."""
        self.prompt_tokens = prompt_tokens
        if self._new_parser is not None:
            self._parser = self._new_parser(reasons)

    def take(self, response: v1.GenerateResponse) -> list[Event]:
        """Return the events of the generator's next message."""
        match response.WhichOneof("event"):
            case "delta":
                events = self._parse(response.delta.text)
                if events:
                    self._reasons = isinstance(events[-1], Reasoning)
                self.output_tokens += len(response.delta.token_ids)
                self.reasoning_tokens += len(response.delta.token_ids) if self._reasons else 0
                return events
            case "finished":
                self.finished = response.finished
                self.cached_tokens = response.finished.usage.cached_prompt_tokens
                self.output_tokens = response.finished.usage.completion_tokens
                return self._parser.finish() if self._parser is not None else []
        return []

    def _parse(self, text: str) -> list[Event]:
        if self._parser is None:
            return [Content(text)] if text else []
        return self._parser.push(text)

    @property
    def reached_limit(self) -> bool:
        """Whether the output ended because of its maximum length."""
        return self.finished is not None and self.finished.reason == v1.FINISH_REASON_LENGTH
