"""Tokenizer of the served model: text and conversations to token ids, and back.

Only `tokenizer.json` and related files are read, not weights; `transformers` is not needed. Short texts are encoded
directly, because a thread would cost more than the encoding.

Long texts are encoded in a small thread pool with the library's batch calls, which release the GIL. The calls for a
single text hold the GIL and would block all streams for seconds if the text has megabytes. The total text size in the
pool and its queue is limited, with a share for each principal. Principals take turns using the threads.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

from tokenizers import Tokenizer

from services.access.principals import CURRENT
from services.access.shares import MOST, Share, Turns
from services.text.chat import TemplateInput
from services.text.chat_template import ChatTemplate
from services.text.detokenizer import Detokenizer, detokenizer_factory, token_reader
from shared.config import ConfigError
from shared.grammars import is_special
from shared.json_text import describe_json_error
from shared.memory import return_free_memory

INLINE_CHARACTERS = 512
"""Maximum length of texts that are encoded on the event loop.

This takes about 0.25 ms, as long as starting a thread under load.
"""
_INLINE_AT_ONCE = 8 * INLINE_CHARACTERS
"""Maximum size of texts that are encoded on the event loop before it runs other work."""
_LEAST = 64
"""Size as which a shorter text counts, because each text takes some time."""

MAX_BYTES = 64 << 20
"""Default limit of text in the thread pool and its queue, bytes."""

_THREADS = 2
"""Threads for long texts."""

_LARGE_BYTES = 64 << 10
"""Text size in bytes from which memory is released after tokenisation; a byte of text takes about 200 bytes."""

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")


class TextTokenizer:
    """Tokenizer and chat template of one model."""

    def __init__(self, tokenizer: Tokenizer, chat_template: ChatTemplate | None, max_bytes: int = MAX_BYTES) -> None:
        """Create the tokenizer; `max_bytes` limits the text in the thread pool and its queue."""
        # Never truncate or pad a client's prompt, even if tokenizer.json requests it.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._detokenizer = detokenizer_factory(tokenizer)
        self.token_bytes = token_reader(tokenizer)
        """Maps a token id to the token's bytes, which may be a part of a character."""
        added = tokenizer.get_added_tokens_decoder().items()
        self.special_tokens: Mapping[str, int] = {
            token.content: i for i, token in added if is_special(token.content, special=token.special)
        }
        """For each special-token text, the token id; grammars can match these tokens only by id."""
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenize")
        self._turns = Turns(_THREADS)
        self._inline = 0
        """Size of the texts that were encoded on the event loop since it last ran other work."""
        self.text_bytes = Share("bytes of text in tokenization", max_bytes, weight=MOST)
        """Text in the pool and its queue."""

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_chat` works."""
        return self._chat_template is not None

    @property
    def has_strict_template(self) -> bool:
        """Whether the chat template prescribes the order of roles (`ChatTemplate.is_strict`)."""
        return self._chat_template is not None and self._chat_template.is_strict

    @property
    def chat_template_source(self) -> str:
        """Source of the chat template; empty if there is none."""
        return "" if self._chat_template is None else self._chat_template.source

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of plain text.

        Raises:
            OverloadedError: too much text of the caller's is waiting; also raised by the other methods.
        """
        if self._is_inline(len(text)):
            return self._encode(text, add_special_tokens)
        return await self._in_thread(len(text.encode()), self._encode_long, text, add_special_tokens)

    def single_token(self, text: str) -> int | None:
        """Return a short text's token; None if the text has several tokens."""
        ids = self._encode(text, False)
        return ids[0] if len(ids) == 1 else None

    async def beginning(self, text: str, count: int) -> str:
        """Return the text of the first tokens, at most `count`, without an incomplete character at the end."""
        ids = await self.encode(text, add_special_tokens=False)
        if len(ids) <= count:
            return text
        return (await self.decode(ids[:count], skip_special_tokens=False)).rstrip("\ufffd")

    async def encode_chat(self, conversation: Callable[[], TemplateInput], size: int) -> list[int]:
        """Return the token ids of a conversation; the template adds special tokens.

        Args:
            conversation: returns the template's input, which may take long for a large conversation.
            size: the approximate number of characters.

        Raises:
            ChatTemplateError: the template rejects the conversation.
        """
        if self._is_inline(size):
            return self._encode_chat(conversation)
        return await self._in_thread(size, self._encode_chat, conversation)

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        if self._is_inline(len(token_ids)):
            return self._decode(token_ids, skip_special_tokens)
        return await self._in_thread(4 * len(token_ids), self._decode_long, token_ids, skip_special_tokens)

    def detokenizer(self, *, skip_special_tokens: bool, shown: tuple[str, ...] = ()) -> Detokenizer:
        """Return a detokenizer for a new stream; `shown` are special tokens that are never skipped."""
        return self._detokenizer(skip_special_tokens, shown)

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _is_inline(self, size: int) -> bool:
        """Return whether a text is encoded on the event loop: it is short, and few were since the loop ran other work.

        A call may have thousands of short texts.
        """
        if size > INLINE_CHARACTERS or self._inline >= _INLINE_AT_ONCE:
            return False
        if not self._inline:
            asyncio.get_running_loop().call_soon(self._ran_other_work)
        self._inline += max(size, _LEAST)
        return True

    def _ran_other_work(self) -> None:
        self._inline = 0

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def _encode_long(self, text: str, add_special_tokens: bool) -> list[int]:
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def _encode_chat(self, conversation: Callable[[], TemplateInput]) -> list[int]:
        assert self._chat_template is not None, "validation lets no chat through without a template"
        text = self._chat_template.render(conversation())
        # A template may render a short conversation as a long text.
        return self._encode(text, False) if len(text) <= INLINE_CHARACTERS else self._encode_long(text, False)

    def _decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def _decode_long(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        (text,) = self._tokenizer.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)
        return str(text)

    async def _in_thread(self, size: int, function: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
        principal, share = CURRENT.get().name, self.text_bytes
        # Accept a text that exceeds every share if no other text is waiting.
        size = min(size, share.largest_part)
        if not share.take(principal, size):
            raise share.exhausted()
        try:
            await self._turns.acquire(principal)
        except asyncio.CancelledError:
            share.give_back(principal, size)
            raise

        def ended(work: "asyncio.Future[Result]") -> None:
            self._turns.release()
            share.give_back(principal, size)
            if not work.cancelled():
                work.exception()  # The caller may have been cancelled.

        def run() -> Result:
            try:
                return function(*arguments)
            finally:
                if size >= _LARGE_BYTES:
                    return_free_memory()

        # Count a cancelled call until its thread is done with the text.
        work = asyncio.get_running_loop().run_in_executor(self._pool, run)
        work.add_done_callback(ended)
        return await asyncio.shield(work)


def load_tokenizer(folder: Path, *, max_bytes: int = MAX_BYTES) -> TextTokenizer:
    """Load the tokenizer of the model in `folder`; `max_bytes` as in `TextTokenizer`.

    Raises:
        ConfigError: the folder contains no usable tokenizer.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"model: {folder} contains no tokenizer.json; convert the tokenizer to a fast one")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # The Rust extension raises plain Exception.
        raise ConfigError(f"model: {path} cannot be read: {error}") from None
    config = _read_json(folder / "tokenizer_config.json")
    special_tokens = _special_tokens(config | _read_json(folder / "special_tokens_map.json"))
    source = _template_source(folder, config)
    try:
        template = ChatTemplate(source, special_tokens) if source else None
    except ValueError as error:
        raise ConfigError(f"model: {folder}: {error}") from None
    return TextTokenizer(tokenizer, template, max_bytes)


def _template_source(folder: Path, config: Mapping[str, Any]) -> str:
    """Return the chat template. A file overrides the configuration. Of several templates, "default" is used."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    entry = config.get("chat_template") or ""
    if isinstance(entry, list):
        return next((str(one["template"]) for one in entry if one.get("name") == "default"), "")
    return str(entry)


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of fields that end in "_token"; each field is a text or an object with the text."""
    contents = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in config.items()
        if name.endswith("_token")
    }
    return {name: content for name, content in contents.items() if isinstance(content, str)}


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"model: {path}: {describe_json_error(error)}") from None
    return content if isinstance(content, dict) else {}
