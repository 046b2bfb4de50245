"""Log-probabilities as OpenAI's chat, OpenAI's completions and vLLM's `prompt_logprobs` write them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from quire.v1 import generation_pb2 as v1

_LEAST = -9999.0
"""JSON knows no infinity; this is what OpenAI writes for a probability of nothing."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """What a request wants to see of them.

    Args:
        top: alternatives per token.
        tokens_as_ids: tokens are called by their ids.
        token_bytes: what a token stands for.
    """

    top: int
    tokens_as_ids: bool
    token_bytes: Callable[[int], bytes]

    def of_chat(self, positions: Sequence[v1.TokenLogprobs]) -> dict[str, Any]:
        """The form of chat completions."""
        return {"content": [self._position(each) for each in positions]}

    def of_text(self, positions: Sequence[v1.TokenLogprobs], text: str, start: int) -> dict[str, Any]:
        """The form of completions; `text` is what these tokens came out as, `start` where in the answer it begins."""
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
            "text_offset": [start + begin for begin in begins([each.token.bytes for each in positions], text)],
        }

    def of_echo(self, prompt: v1.Prompt) -> dict[str, Any]:
        """The same of a prompt that is part of the text; its first token has none, but a name."""
        positions = list(prompt.logprobs)
        for token_id, position in zip(prompt.token_ids, positions, strict=True):
            if not position.HasField("token"):
                position.token.token_id, position.token.bytes = token_id, self.token_bytes(token_id)
        return self.of_text(positions, prompt.text, 0)

    def _position(self, position: v1.TokenLogprobs) -> dict[str, Any]:
        top = [self._scored(token) for token in position.top[: self.top]]
        return {**self._scored(position.token), "top_logprobs": top}

    def _scored(self, token: v1.ScoredToken) -> dict[str, Any]:
        return {"token": self._name(token), "logprob": _finite(token.logprob), "bytes": list(token.bytes)}

    def _name(self, token: v1.ScoredToken) -> str:
        return f"token_id:{token.token_id}" if self.tokens_as_ids else token.bytes.decode(errors="replace")


def begins(tokens: Iterable[bytes], text: str) -> Iterator[int]:
    """Where in a text each of its tokens begins, in characters.

    A token that the text does not have at its place takes none of it: special ones are left out, and the bytes of a
    character may be spread over tokens, of which the last one lets it out.
    """
    whole, at, characters = text.encode(), 0, 0
    for token in tokens:
        yield characters
        # Some tokenizers drop the space that their first token begins with.
        part = token if whole.startswith(token, at) else token.lstrip(b" ")
        if whole.startswith(part, at):
            at += len(part)
            characters += sum(byte & 0xC0 != 0x80 for byte in part)


def prompt_logprobs(prompt: v1.Prompt) -> list[dict[str, Any] | None]:
    """vLLM's form: alternatives by token id; None for the first token."""
    return [_by_id(each) if each.token.rank else None for each in prompt.logprobs]


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
    return max(logprob, _LEAST)
