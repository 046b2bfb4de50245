"""Is this grammar one that a worker can use? Compiled once at the door, as a worker would, before anybody waits for it.

What a client sends is bounded in size and depth before it is looked at, compiled in a thread of its own, and refused by
the name of its field. What passed is remembered, so that a schema which every request of a client carries is checked
once.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

from protos.quire.link.v1 import link_pb2
from protos.quire.plan.v1 import plan_pb2
from quire.v1 import generation_pb2 as v1
from services.errors import RETRY_MS
from shared.errors import FieldViolation, InvalidRequestError, OverloadedError
from shared.grammars import GrammarError, GrammarTokenizer, check_text, compile_grammar, lark_of_choices, lark_of_ebnf

MAX_CHOICE_STRINGS = 4096
MAX_WAITING = 64
"""Grammars that may wait for the thread."""
TIMEOUT_S = 5.0
"""Longest time that a request waits for its grammar to be checked."""

_REMEMBERED = 1024


class GrammarChecker:
    """Checks the grammars of one front-end process."""

    def __init__(self, tokenizer_file: Path) -> None:
        self._file = tokenizer_file
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._known: OrderedDict[bytes, None] = OrderedDict()
        """Digests of grammars that are fine, with the model that they are fine for."""
        self._tokenizer: tuple[str, GrammarTokenizer] | None = None
        self._turn = asyncio.Lock()
        """Whoever has the thread. It is asked for here and not in the pool's queue, where who has left would stay."""
        self._waiting = 0

    async def check(self, grammar: v1.Grammar, model: link_pb2.ServedModel) -> bytes:
        """The grammar as workers take it, serialized.

        Raises:
            InvalidRequestError: it cannot be used.
            OverloadedError: too many are being checked already.
        """
        field = f"grammar.{grammar.WhichOneof('kind')}"
        overloaded = OverloadedError("too many grammars are being checked already; try again soon", retry_ms=RETRY_MS)
        if self._waiting >= MAX_WAITING:
            raise overloaded
        self._waiting += 1
        has_begun = False
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._turn.acquire()
                has_begun = True
                work = asyncio.get_running_loop().run_in_executor(self._pool, self._check, grammar, model)
                work.add_done_callback(self._ended)
                return await asyncio.shield(work)  # a thread cannot be interrupted: it keeps its turn to the end
        except GrammarError as error:
            raise InvalidRequestError(FieldViolation(field, str(error))) from None
        except TimeoutError:
            if not has_begun:
                raise overloaded from None
            raise InvalidRequestError(FieldViolation(field, f"takes longer than {TIMEOUT_S:g} s to compile")) from None
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """Lets the thread go."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _ended(self, work: "asyncio.Future[bytes]") -> None:
        self._turn.release()
        if not work.cancelled():
            work.exception()  # whoever waited for it may have left

    def _check(self, grammar: v1.Grammar, model: link_pb2.ServedModel) -> bytes:
        wanted = _to_plan(grammar)
        serialized = wanted.SerializeToString(deterministic=True)
        key = sha256(model.fingerprint.encode() + serialized).digest()
        if key in self._known:
            self._known.move_to_end(key)
            return serialized
        if self._tokenizer is None or self._tokenizer[0] != model.fingerprint:
            tokenizer = GrammarTokenizer(self._file, model.vocab_size, model.eos_token_ids)
            self._tokenizer = model.fingerprint, tokenizer
        compile_grammar(wanted, self._tokenizer[1])
        self._known[key] = None
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return serialized


def check_grammar(request: v1.GenerateRequest) -> Iterator[FieldViolation]:
    """What is wrong with a request's grammar, as far as it can be seen without compiling it."""
    if not request.HasField("grammar"):
        return
    grammar = request.grammar
    kind = grammar.WhichOneof("kind")
    if kind is None:
        yield FieldViolation("grammar", "missing; give one of `json_schema`, `regex`, `ebnf`, `choice`, `json_object`")
        return
    if kind == "choice":
        choices = list(grammar.choice.choices)
        if not 0 < len(choices) <= MAX_CHOICE_STRINGS or not all(choices):
            yield FieldViolation(
                "grammar.choice.choices", f"must be 1 to {MAX_CHOICE_STRINGS} strings, none of them empty"
            )
    elif kind == "json_object" and not grammar.json_object:
        yield FieldViolation("grammar.json_object", "false is no grammar; leave `grammar` unset")
    elif kind != "json_object" and not getattr(grammar, kind):
        yield FieldViolation(f"grammar.{kind}", "is empty")
    if request.stop.min_tokens:
        yield FieldViolation("stop.min_tokens", "cannot be combined with `grammar`, which decides when the output ends")


def _to_plan(grammar: v1.Grammar) -> plan_pb2.Grammar:
    match grammar.WhichOneof("kind"):
        case "json_schema":
            check_text(grammar.json_schema)
            return plan_pb2.Grammar(json_schema=grammar.json_schema)
        case "regex":
            return plan_pb2.Grammar(regex=grammar.regex)
        case "ebnf":
            return plan_pb2.Grammar(lark=lark_of_ebnf(grammar.ebnf))
        case "choice":
            return plan_pb2.Grammar(lark=lark_of_choices(grammar.choice.choices))
        case _:
            return plan_pb2.Grammar(json_schema='{"type": "object"}')
