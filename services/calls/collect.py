"""Collects the streamed messages for one request into a single response."""

from quire.v1 import generation_pb2 as v1
from services.calls.parts import joined


class Collector:
    """Collects messages from `Generate`. `response` is available after `Finished` has arrived."""

    def __init__(self) -> None:
        self._response = v1.GenerateOnceResponse()
        self._texts: dict[int, list[str]] = {}
        self._parts: dict[int, list[v1.OutputPart]] = {}
        self._choices: dict[int, v1.Choice] = {}
        self._finished: v1.Finished | None = None

    async def send(self, message: v1.GenerateResponse) -> None:
        """Add the next message."""
        match message.WhichOneof("event"):
            case "delta":
                delta = message.delta
                choice = self._choice(delta.choice)
                choice.token_ids.extend(delta.token_ids)
                choice.logprobs.extend(delta.logprobs)
                self._texts[delta.choice].append(delta.text)
                self._parts[delta.choice].extend(delta.parts)
            case "prompt":
                self._response.prompt.CopyFrom(message.prompt)
            case "choice_finished":
                finished = message.choice_finished
                self._choice(finished.choice).finished.CopyFrom(finished)
            case "finished":
                self._finished = message.finished

    def response(self) -> v1.GenerateOnceResponse:
        """Return the complete response."""
        response, finished = self._response, self._finished
        assert finished is not None, "an answer ends with `finished`"
        first = self._choice(0)
        if not first.HasField("finished"):  # A call with one choice ends with `Finished`.
            first.finished.reason = finished.reason
            first.finished.completion_tokens = finished.usage.completion_tokens
            match finished.WhichOneof("stop"):
                case "stop_string":
                    first.finished.stop_string = finished.stop_string
                case "stop_token_id":
                    first.finished.stop_token_id = finished.stop_token_id
        for index in sorted(self._choices):
            choice = self._choices[index]
            choice.text = "".join(self._texts[index])
            choice.parts.extend(joined(self._parts[index]))
            response.choices.append(choice)
        response.usage.CopyFrom(finished.usage)
        response.timings.CopyFrom(finished.timings)
        response.request_id, response.model = finished.request_id, finished.model
        return response

    def _choice(self, index: int) -> v1.Choice:
        if index not in self._choices:
            self._choices[index] = v1.Choice(index=index)
            self._texts[index] = []
            self._parts[index] = []
        return self._choices[index]
