"""Prompts in the form that a protocol requires: token ids, a text, or chat messages. Pure.

A workload's units become token ids or words. With words, the number of tokens depends on the server's tokenizer. A
probe yields a `TextScale`, which brings this number close to the requested one. Reports contain the server's own count.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from measure.load.workloads import Turn

Message: TypeAlias = dict[str, str]
Prompt: TypeAlias = tuple[int, ...] | str | tuple[Message, ...]

FIRST_ID = 16
"""Lowest token id that is used. Lower ids are often special tokens."""
_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem"
    " hand part place case week company system program question work number night point home water room mother area"
    " money story fact month lot right study book eye job word business issue side kind head house service friend"
    " father power hour game line end member law car city name team minute idea body back parent face others level"
    " office door health person art war history party result change morning reason girl guy moment air teacher force"
    " education foot boy age policy music market sense nation plan college interest death course someone experience"
    " behind reach local six remain effect suggest class control raise care perhaps late hard field else pass former"
    " sell major sometimes require along development report role better economic effort decide rate strong possible"
    " heart drug leader light voice wife whole police mind finally return free military price less according decision"
    " explain son hope develop view relationship carry town road drive arm true federal break difference thank receive"
    " value international building action full model join season society tax director position player agree especially"
    " record pick wear paper special space ground form support event official whose matter everyone center couple site"
)  # fmt: skip
WORDS = tuple(_WORDS.split())
"""Words for texts. Most tokenizers have one token for each; the bundled model's needs about two."""


class Style(enum.Enum):
    """Form of a prompt."""

    TOKENS = "tokens"
    TEXT = "text"
    CHAT = "chat"


@dataclass(frozen=True, slots=True)
class TextScale:
    """Tokens that a server counts per word, and per prompt."""

    per_word: float = 1.0
    fixed: float = 0.0
    """Tokens of a prompt in addition to its words, such as a chat template or a start token."""

    @classmethod
    def of_probes(cls, short: tuple[int, int], long: tuple[int, int]) -> "TextScale":
        """Return the scale from two probes, each given as its words and the tokens that the server counted."""
        per_word = (long[1] - short[1]) / (long[0] - short[0])
        if per_word <= 0:
            return cls()
        return cls(per_word, max(short[1] - per_word * short[0], 0.0))


@dataclass(frozen=True, slots=True)
class Prompts:
    """Makes prompts for one server."""

    style: Style = Style.TOKENS
    vocab_size: int = 1000
    """Token ids lie in [FIRST_ID, vocab_size)."""
    scale: TextScale = TextScale()


PROBE_WORDS = (50, 250)
"""Lengths of the two probe texts."""


def probe(style: Style, count: int) -> Prompt:
    """Return a prompt with the given number of words or token ids."""
    match style:
        case Style.TOKENS:
            return tuple(range(FIRST_ID, FIRST_ID + count))
        case Style.CHAT:
            return ({"role": "user", "content": words(range(count))},)
        case Style.TEXT:
            return words(range(count))


def words(units: Sequence[int]) -> str:
    return " ".join(WORDS[unit % len(WORDS)] for unit in units)


class Conversation:
    """The prompts of one session. Each contains the whole conversation before it."""

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts
        self._ids: list[int] = []
        self._text = ""
        self._messages: list[Message] = []

    def ask(self, turn: Turn) -> Prompt:
        """Return the prompt of the next turn."""
        match self._prompts.style:
            case Style.TOKENS if not turn.text:
                span = max(self._prompts.vocab_size - FIRST_ID, 1)
                self._ids += (FIRST_ID + unit % span for unit in turn.prompt)
                return tuple(self._ids)
            case Style.CHAT:
                self._messages.append({"role": "user", "content": self._new_text(turn, first=not self._messages)})
                return tuple(self._messages)
        self._text += (" " if self._text else "") + self._new_text(turn, first=not self._text)
        return self._text

    def answered(self, text: str, token_ids: Sequence[int]) -> None:
        """Append the response to the conversation."""
        self._ids += token_ids
        self._text += text
        self._messages.append({"role": "assistant", "content": text})

    def _new_text(self, turn: Turn, *, first: bool) -> str:
        if turn.text:
            return turn.text
        scale = self._prompts.scale
        count = round((len(turn.prompt) - (scale.fixed if first else 0.0)) / scale.per_word)
        return words(turn.prompt[: max(count, 1)])
