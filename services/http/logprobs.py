"""Log-probabilities in the forms of OpenAI's chat, OpenAI's completions and vLLM's `prompt_logprobs`."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from quire.v1 import generation_pb2 as v1
from services.text.detokenizer import Detokenizer

_MIN_LOGPROB = -9999.0
"""Represents minus infinity, which JSON lacks; OpenAI uses the same value."""


class TextOffsets:
    """Start of each token in the text, in characters.

    A token starts after all characters that earlier tokens have completed, regardless of message boundaries. A token
    that continues a character has that character's offset. A token without text takes no characters.
    """

    def __init__(self, detokenizer: Detokenizer, start: int) -> None:
        """Create offsets for a text that begins at character `start` of the response."""
        self._detokenizer = detokenizer
        self._length = start

    def of(self, token_ids: Iterable[int]) -> list[int]:
        """Return the offsets of the next tokens."""
        return [self._begin(token_id) for token_id in token_ids]

    def _begin(self, token_id: int) -> int:
        begin = self._length
        self._length += len(self._detokenizer.push((token_id,)))
        return begin


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Requested form of log-probabilities.

    Args:
        top: alternatives per token.
        tokens_as_ids: name tokens by their ids.
        token_bytes: maps a token id to its bytes.
        detokenizer: creates the detokenizer of one text.
    """

    top: int
    tokens_as_ids: bool
    token_bytes: Callable[[int], bytes]
    detokenizer: Callable[[], Detokenizer]

    def offsets(self, start: int = 0) -> TextOffsets:
        """Return the offsets of a choice whose first token begins at `start` characters."""
        return TextOffsets(self.detokenizer(), start)

    def of_chat(self, positions: Sequence[v1.TokenLogprobs]) -> dict[str, Any]:
        """Return the form of chat completions."""
        return {"content": [self._position(each) for each in positions]}

    def of_text(self, positions: Sequence[v1.TokenLogprobs], offsets: list[int]) -> dict[str, Any]:
        """Return the completions format; `offsets` are the token positions in the response."""
        tokens, scores, tops = [], [], []
        for position in positions:
            known = position.token.rank > 0
            name = self._name(position.token)
            tokens.append(name)
            scores.append(_finite(position.token.logprob) if known else None)
            top = {self._name(each): _finite(each.logprob) for each in position.top}
            tops.append(top if known else None)
        return {
            "tokens": tokens,
            "token_logprobs": scores,
            "top_logprobs": tops if self.top else None,
            "text_offset": offsets,
        }

    def echo_steps(self, prompt: v1.Prompt) -> Iterator[dict[str, Any]]:
        """Yield the completions format for each token of an echoed prompt; the first token has no log-probability."""
        offsets = self.offsets()
        for token_id, position in zip(prompt.token_ids, prompt.logprobs, strict=True):
            if not position.HasField("token"):
                position.token.token_id, position.token.bytes = token_id, self.token_bytes(token_id)
            yield self.of_text((position,), offsets.of((token_id,)))

    def _position(self, position: v1.TokenLogprobs) -> dict[str, Any]:
        top = [self._scored(token) for token in position.top[: self.top]]
        return {**self._scored(position.token), "top_logprobs": top}

    def _scored(self, token: v1.ScoredToken) -> dict[str, Any]:
        return {"token": self._name(token), "logprob": _finite(token.logprob), "bytes": list(token.bytes)}

    def _name(self, token: v1.ScoredToken) -> str:
        return f"token_id:{token.token_id}" if self.tokens_as_ids else token.bytes.decode(errors="replace")


def joined_steps(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the completions format for a text, joined from its tokens."""
    return {
        name: None if steps[0][name] is None else [value for step in steps for value in step[name]] for name in steps[0]
    }


def prompt_logprobs(prompt: v1.Prompt) -> Iterator[dict[str, Any] | None]:
    """Yield vLLM's form for each token: alternatives by token id; None for the first token."""
    return (_by_id(each) if each.token.rank else None for each in prompt.logprobs)


def _by_id(position: v1.TokenLogprobs) -> dict[str, Any]:
    return {
        str(token.token_id): {
            "logprob": _finite(token.logprob),
            "rank": token.rank,
            "decoded_token": token.bytes.decode(errors="replace"),
        }
        for token in (*position.top, position.token)
    }


def _finite(logprob: float) -> float:
    return max(logprob, _MIN_LOGPROB)
