"""Loading a model's tokenizer, encoding off the loop, and chat templates in their sandbox."""

import asyncio
import gc
import itertools
import json
import subprocess
import sys
import time
import weakref
from collections.abc import Awaitable
from functools import partial
from pathlib import Path

import pytest

from quire.v1 import generation_pb2 as v1
from services.access.principals import CURRENT, Principal
from services.text.chat import TemplateInput, chat_size, template_input
from services.text.chat_template import ChatTemplate, ChatTemplateError
from services.text.tokenizer import INLINE_CHARACTERS, load_tokenizer
from shared.config import ConfigError
from shared.errors import OverloadedError
from tests.services.tokenizers_for_tests import BOS, byte_level, write_model

CHAT = v1.ChatInput(messages=[v1.ChatMessage(role="user", content="hi")], omit_generation_prompt=True)


def test_short_and_long_texts_encode_alike(tmp_path: Path) -> None:
    """A text encoded in a thread has the same ids as one encoded on the loop."""
    tokenizer = load_tokenizer(write_model(tmp_path, byte_level()))
    text = "the fox " * INLINE_CHARACTERS

    ids = asyncio.run(tokenizer.encode(text))

    assert ids == byte_level().encode(text).ids
    assert asyncio.run(tokenizer.encode("fox"))[0] == BOS
    assert asyncio.run(tokenizer.encode("fox", add_special_tokens=False))[0] != BOS
    assert asyncio.run(tokenizer.decode(ids, skip_special_tokens=True)) == text


def test_more_text_than_may_wait_is_refused(tmp_path: Path) -> None:
    """While a long text is tokenised, another one above the bound is refused and a short one is not.

    A text that alone exceeds the bound is tokenised when no other is.
    """
    tokenizer = load_tokenizer(write_model(tmp_path, byte_level()), max_bytes=1000)
    text = "the fox " * 100_000

    async def main() -> None:
        calls = [tokenizer.encode(each) for each in (text, text, "the fox")]
        first, second, short = await asyncio.gather(*calls, return_exceptions=True)
        again = await tokenizer.encode(text)

        assert first == again
        assert isinstance(second, OverloadedError)
        assert isinstance(short, list)

    asyncio.run(main())


def test_principals_take_turns_in_tokenization(tmp_path: Path) -> None:
    """A principal whose long texts fill its share delays another principal's text by about one text."""
    tokenizer = load_tokenizer(write_model(tmp_path, byte_level()), max_bytes=100_000)
    text, order = "the fox " * 1000, list[str]()

    async def encode(principal: str) -> None:
        CURRENT.set(Principal(principal))
        try:
            await tokenizer.encode(text)
            order.append(principal)
        except OverloadedError:
            order.append(f"{principal} refused")

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for principal in ["greedy"] * 12 + ["modest"]:
                group.create_task(encode(principal))
        assert tokenizer.text_bytes.num_held() == 0

    asyncio.run(main())

    refused = [each for each in order if "refused" in each]
    assert refused == ["greedy refused"]
    assert order.index("modest") <= len(refused) + 5


def test_a_long_text_does_not_block_the_event_loop(tmp_path: Path) -> None:
    """While a text of megabytes is tokenised or detokenised, the event loop continues to turn.

    It is never blocked for half of the time that the work takes.
    """
    tokenizer = load_tokenizer(write_model(tmp_path, byte_level()))
    text = "the quick brown fox jumps over the lazy dog. " * 40_000

    async def longest_standstill(work: Awaitable[object]) -> float:
        task = asyncio.ensure_future(work)
        turns = [time.perf_counter()]
        while not task.done():
            await asyncio.sleep(0)
            turns.append(time.perf_counter())
        standstill = max(after - before for before, after in itertools.pairwise(turns))
        return standstill / (turns[-1] - turns[0])

    async def main() -> None:
        assert await longest_standstill(tokenizer.encode(text)) < 0.5
        chat = v1.ChatInput(messages=[v1.ChatMessage(role="user", content=text)])
        assert await longest_standstill(tokenizer.encode_chat(partial(template_input, chat), chat_size(chat))) < 0.5
        ids = await tokenizer.encode(text)
        assert await longest_standstill(tokenizer.decode(ids, skip_special_tokens=True)) < 0.5

    asyncio.run(main())


def test_many_short_texts_do_not_block_the_event_loop(tmp_path: Path) -> None:
    """A call with 2,048 inputs encodes them one after the other; other work runs in between."""
    tokenizer = load_tokenizer(write_model(tmp_path, byte_level()))

    async def main() -> None:
        turns = 0

        def turn() -> None:
            nonlocal turns
            turns += 1
            asyncio.get_running_loop().call_soon(turn)

        turn()
        for _ in range(100):
            assert len(await tokenizer.encode("x" * INLINE_CHARACTERS)) >= 1
        assert turns > 10

    asyncio.run(main())
    tokenizer.close()


def test_a_prompt_is_never_cut_or_padded(tmp_path: Path) -> None:
    """Truncation and padding that a tokenizer file asks for are ignored."""
    folder = write_model(tmp_path, byte_level())
    content = json.loads((folder / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(content))

    ids = asyncio.run(load_tokenizer(folder).encode("the quick brown fox jumps"))

    assert len(ids) > 4


@pytest.mark.parametrize("length", [2, 2000])
def test_a_conversation_goes_through_the_template(tmp_path: Path, length: int) -> None:
    """The template writes the special tokens; the tokenizer adds none."""
    tokenizer = load_tokenizer(write_model(tmp_path, byte_level()))
    conversation = template_input(v1.ChatInput(messages=[v1.ChatMessage(role="user", content="x" * length)]))

    ids = asyncio.run(tokenizer.encode_chat(lambda: conversation, length))

    assert ids.count(BOS) == 1
    assert byte_level().decode(ids, skip_special_tokens=True) == f"user: {'x' * length}\nassistant:"


def test_a_template_file_wins_over_the_configuration(tmp_path: Path) -> None:
    """chat_template.jinja is used when it is there."""
    folder = write_model(tmp_path, byte_level())
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}!")

    ids = asyncio.run(load_tokenizer(folder).encode_chat(partial(template_input, CHAT), chat_size(CHAT)))

    assert byte_level().decode(ids) == "hi!"


def test_a_model_may_have_no_template(tmp_path: Path) -> None:
    """Then chat is not offered."""
    assert not load_tokenizer(write_model(tmp_path, byte_level(), chat_template=None)).has_chat_template


def test_chat_templates_have_the_usual_functions() -> None:
    """Special tokens, tojson without HTML escapes, loop controls, generation blocks and trimmed blocks work."""
    source = (
        "{{ bos_token }}\n"
        "{% for m in messages %}\n"
        "    {% if loop.index > 1 %}{% break %}{% endif %}\n"
        "{% generation %}{{ m | tojson }}{% endgeneration %}\n"
        "{% endfor %}{{ strftime_now('%Y') | length }}"
    )
    template = ChatTemplate(source, {"bos_token": "<s>"})

    text = template.render(template_input(v1.ChatInput(messages=[v1.ChatMessage(role="user", content="<é>")] * 2)))

    assert text == '<s>\n{"role": "user", "content": "<é>"}4'


def test_tools_and_variables_reach_the_template() -> None:
    """Tools, tool calls with their arguments as objects, and further variables are there under their usual names."""
    source = (
        "{{ tools[0].function.name }} {{ mood }} "
        "{% for m in messages %}{{ m.tool_calls[0].function.arguments.city if m.tool_calls else m.tool_call_id }} "
        "{% endfor %}"
    )
    call = '[{"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{\\"city\\": \\"Ulm\\"}"}}]'
    chat = v1.ChatInput(
        messages=[
            v1.ChatMessage(role="assistant", tool_calls_json=call),
            v1.ChatMessage(role="tool", content="rain", tool_call_id="c"),
        ],
        tools_json='[{"type": "function", "function": {"name": "weather"}}]',
        template_variables_json='{"mood": "calm"}',
    )

    assert ChatTemplate(source, {}).render(template_input(chat)) == "weather calm Ulm c "


@pytest.mark.parametrize("length", [1, INLINE_CHARACTERS])
def test_half_a_surrogate_pair_in_the_json_of_a_conversation_can_be_encoded(tmp_path: Path, length: int) -> None:
    """A model whose output is truncated within an emoji writes half a pair; the client sends it back."""
    source = (
        "{% for m in messages %}{{ m.content }}{{ m.tool_calls | tojson }}{% endfor %}{{ tools[0].name }} {{ mood }}"
    )
    arguments = '{"mood": "\\ud83d\\ude00 \\ud83d"}'
    message = v1.ChatMessage(role="assistant", content="x" * length)
    message.tool_calls_json = json.dumps([{"function": {"name": "f", "arguments": arguments}}])
    chat = v1.ChatInput(
        messages=[message], tools_json='[{"name": "\\uDE00"}]', template_variables_json='{"mood": "\\ud83d"}'
    )
    tokenizer = load_tokenizer(write_model(tmp_path, byte_level(), chat_template=source))

    ids = asyncio.run(tokenizer.encode_chat(partial(template_input, chat), chat_size(chat)))

    text = asyncio.run(tokenizer.decode(ids, skip_special_tokens=False))
    assert text.endswith('{"mood": "\N{GRINNING FACE} \ufffd"}}}]\ufffd \ufffd')


def test_a_final_message_can_be_continued() -> None:
    """Nothing that the template writes after it is in the prompt."""
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}<user>"
    chat = v1.ChatInput(
        messages=[v1.ChatMessage(role="user", content="Hi"), v1.ChatMessage(role="assistant", content="Hello, ")],
        continue_final_message=True,
    )

    assert ChatTemplate(source, {}).render(template_input(chat)) == "<user>Hi</s><assistant>Hello,"


def test_a_rendered_conversation_is_freed_at_once() -> None:
    """Macros make cycles, which would retain megabytes of messages until the next garbage collection."""

    class Messages(list[dict[str, str]]):
        """A list with weak references."""

    source = "{% macro show(m) %}{{ m.content }}{{ eos }}{% endmacro %}{% for m in messages %}{{ show(m) }}{% endfor %}"
    template, messages = ChatTemplate(source, {}), Messages([{"role": "user", "content": "Hi"}])
    conversation = TemplateInput(
        messages=messages, variables={}, add_generation_prompt=True, continue_final_message=False
    )
    freed = weakref.ref(messages)
    gc.disable()
    try:
        assert template.render(conversation) == "Hi"
        del conversation, messages

        assert freed() is None
    finally:
        gc.enable()


TOKENIZE_AND_PRINT_GROWTH = """
import asyncio
import resource
import sys
from pathlib import Path
from services.text.tokenizer import load_tokenizer

def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()

async def main():
    tokenizer = load_tokenizer(Path(sys.argv[1]))
    await tokenizer.encode("x " * 1000)
    before = resident()
    await tokenizer.encode("some words " * 200_000)
    print(resident() - before)

asyncio.run(main())
"""


def test_the_memory_of_a_long_text_is_returned(tmp_path: Path) -> None:
    """Tokenising 2 MB of text takes about 400 MB in small blocks. The last 64 MB of a thread's heap may remain."""
    model = write_model(tmp_path, byte_level())

    command = [sys.executable, "-c", TOKENIZE_AND_PRINT_GROWTH, str(model)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)

    assert int(result.stdout) < 96 << 20


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ messages.append(1) }}", "unsafe|SecurityError|not safely"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_a_template_that_fails_is_an_error_of_the_request(source: str, message: str) -> None:
    """Refusals, mistakes and attempts to leave the sandbox all end as one kind of error."""
    template = ChatTemplate(source, {})

    with pytest.raises(ChatTemplateError, match=message):
        template.render(template_input(CHAT))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "contains no tokenizer.json"),
        ("tokenizer.json", "{}", "cannot be read"),
        ("tokenizer_config.json", "{", "invalid JSON at line 1 column 2"),
        ("chat_template.jinja", "{% if %}", "does not compile"),
    ],
)
def test_an_unusable_tokenizer_is_one_clear_line(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    """Whatever is wrong with the files, the error names it in one line."""
    folder = write_model(tmp_path, byte_level())
    (folder / name).unlink(missing_ok=True)
    if content is not None:
        (folder / name).write_text(content)

    with pytest.raises(ConfigError, match=message) as error:
        load_tokenizer(folder)

    assert "\n" not in str(error.value)
