"""Log-probabilities as OpenAI's chat, OpenAI's completions and vLLM's `prompt_logprobs` write them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from quire.v1 import generation_pb2 as v1
from services.detokenizer import Detokenizer

_LEAST = -9999.0
"""JSON knows no infinity; this is what OpenAI writes for a probability of nothing."""


class TextOffsets:
    """Where in a text each of its tokens begins, in characters.

    That is behind all characters that the tokens before it have completed, whichever message brings their text: a token
    that goes on with a character begins where the character does, and one that the text leaves out takes none of it.
    """

    def __init__(self, detokenizer: Detokenizer, start: int) -> None:
        """For the tokens that `detokenizer` makes a text of, `start` characters into the answer."""
        self._detokenizer = detokenizer
        self._length = start

    def of(self, token_ids: Iterable[int]) -> list[int]:
        """Those of the tokens that come next."""
        return [self._begin(token_id) for token_id in token_ids]

    def _begin(self, token_id: int) -> int:
        begin = self._length
        self._length += len(self._detokenizer.push((token_id,)))
        return begin


@dataclass(frozen=True, slots=True)
class Logprobs:
    """What a request wants to see of them.

    Args:
        top: alternatives per token.
        tokens_as_ids: tokens are called by their ids.
        token_bytes: what a token stands for.
        detokenizer: makes what turns the tokens of one text into it.
    """

    top: int
    tokens_as_ids: bool
    token_bytes: Callable[[int], bytes]
    detokenizer: Callable[[], Detokenizer]

    def offsets(self, start: int = 0) -> TextOffsets:
        """The places of a choice's tokens, of which the first begins at `start` characters."""
        return TextOffsets(self.detokenizer(), start)

    def of_chat(self, positions: Sequence[v1.TokenLogprobs]) -> dict[str, Any]:
        """The form of chat completions."""
        return {"content": [self._position(each) for each in positions]}

    def of_text(self, positions: Sequence[v1.TokenLogprobs], offsets: list[int]) -> dict[str, Any]:
        """The form of completions; `offsets` is where in the answer each of these tokens begins."""
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

    def of_echo(self, prompt: v1.Prompt) -> dict[str, Any]:
        """The same of a prompt that is part of the text; its first token has none, but a name."""
        positions = list(prompt.logprobs)
        for token_id, position in zip(prompt.token_ids, positions, strict=True):
            if not position.HasField("token"):
                position.token.token_id, position.token.bytes = token_id, self.token_bytes(token_id)
        return self.of_text(positions, self.offsets().of(prompt.token_ids))

    def _position(self, position: v1.TokenLogprobs) -> dict[str, Any]:
        top = [self._scored(token) for token in position.top[: self.top]]
        return {**self._scored(position.token), "top_logprobs": top}

    def _scored(self, token: v1.ScoredToken) -> dict[str, Any]:
        return {"token": self._name(token), "logprob": _finite(token.logprob), "bytes": list(token.bytes)}

    def _name(self, token: v1.ScoredToken) -> str:
        return f"token_id:{token.token_id}" if self.tokens_as_ids else token.bytes.decode(errors="replace")


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
