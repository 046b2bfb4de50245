"""The served model's tokenizer: text and conversations to token ids, and back.

Only `tokenizer.json` and its neighbours are read, never weights; `transformers` is not needed. Long texts go through a
small thread pool, by the library's calls for several texts: those release the GIL, where the ones for a single text
hold it to the end, for seconds with a text of megabytes, and the streams of all others with it. For short texts the way
to a thread and back would cost more than the work. What waits for the threads is bounded in bytes.
"""

import asyncio
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

from tokenizers import Tokenizer

from services.chat import TemplateInput
from services.chat_template import ChatTemplate
from services.detokenizer import Detokenizer, detokenizer_factory, token_reader
from services.errors import RETRY_MS
from shared.config import ConfigError
from shared.errors import OverloadedError

INLINE_CHARACTERS = 512
"""Texts up to this length are encoded on the event loop: about 0.25 ms, what a thread costs under load."""

MAX_BYTES = 64 << 20
"""Default for how much text may be in the thread pool and its queue."""

_THREADS = 2

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")


class TextTokenizer:
    """Tokenizer and chat template of one model."""

    def __init__(self, tokenizer: Tokenizer, chat_template: ChatTemplate | None, max_bytes: int = MAX_BYTES) -> None:
        """Above `max_bytes` in the thread pool and its queue, further texts are refused."""
        # A prompt is the client's: it is never cut or padded, whatever the file says.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._detokenizer = detokenizer_factory(tokenizer)
        self.token_bytes = token_reader(tokenizer)
        """What a token stands for by itself, by its id; not always whole characters."""
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenize")
        self._max_bytes = max_bytes
        self._bytes = 0
        """In the pool; counted down by its threads, so under the lock."""
        self._lock = threading.Lock()

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_chat` works."""
        return self._chat_template is not None

    @property
    def chat_template_source(self) -> str:
        """The text of the chat template; empty without one."""
        return "" if self._chat_template is None else self._chat_template.source

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of plain text.

        Raises:
            OverloadedError: too much text is waiting already; so for the other calls.
        """
        if len(text) <= INLINE_CHARACTERS:
            return self._encode(text, add_special_tokens)
        return await self._in_thread(len(text.encode()), self._encode_long, text, add_special_tokens)

    async def encode_chat(self, conversation: TemplateInput) -> list[int]:
        """The token ids of a conversation; special tokens are the template's business.

        Raises:
            ChatTemplateError: the template refuses the conversation.
        """
        size = conversation.size
        if size <= INLINE_CHARACTERS:
            return self._encode_chat(conversation)
        return await self._in_thread(size, self._encode_chat, conversation)

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of a whole sequence."""
        if len(token_ids) <= INLINE_CHARACTERS:
            return self._decode(token_ids, skip_special_tokens)
        return await self._in_thread(4 * len(token_ids), self._decode_long, token_ids, skip_special_tokens)

    def detokenizer(self, *, skip_special_tokens: bool) -> Detokenizer:
        """The text side of a new stream."""
        return self._detokenizer(skip_special_tokens)

    def close(self) -> None:
        """Lets the threads go."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def _encode_long(self, text: str, add_special_tokens: bool) -> list[int]:
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def _encode_chat(self, conversation: TemplateInput) -> list[int]:
        assert self._chat_template is not None, "validation lets no chat through without a template"
        text = self._chat_template.render(conversation)
        # What a template makes of a short conversation may be long.
        return self._encode(text, False) if len(text) <= INLINE_CHARACTERS else self._encode_long(text, False)

    def _decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def _decode_long(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        (text,) = self._tokenizer.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)
        return str(text)

    async def _in_thread(self, size: int, function: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
        with self._lock:
            # One text that is larger than all may be together is served when nothing else is in hand.
            if self._bytes and self._bytes + size > self._max_bytes:
                raise OverloadedError("too much text is being tokenized already; try again soon", retry_ms=RETRY_MS)
            self._bytes += size

        def done(_: "Future[Result]") -> None:
            with self._lock:
                self._bytes -= size

        # What a caller no longer waits for counts until its thread has really let go of it.
        work = self._pool.submit(function, *arguments)
        work.add_done_callback(done)
        return await asyncio.wrap_future(work)


def load_tokenizer(folder: Path, *, max_bytes: int = MAX_BYTES) -> TextTokenizer:
    """Reads the tokenizer of the model in `folder`; `max_bytes` as in `TextTokenizer`.

    Raises:
        ConfigError: there is no usable tokenizer; the message says what is wrong.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"model: {folder} holds no tokenizer.json; convert the tokenizer to a fast one")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust side raises plain Exception
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
    """The file wins over the entry in the configuration; of several named templates "default" is taken."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    entry = config.get("chat_template") or ""
    if isinstance(entry, list):
        return next((str(one["template"]) for one in entry if one.get("name") == "default"), "")
    return str(entry)


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """ "bos_token" and the like, as text; the files hold either the text or an object with its content."""
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
        raise ConfigError(f"model: {path} is no valid JSON: {error}") from None
    return content if isinstance(content, dict) else {}
