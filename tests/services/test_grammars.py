"""Grammars at the front door: what is usable passes, what is not costs INVALID_ARGUMENT and nothing else."""

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from unittest.mock import Mock

import grpc
import psutil
import pytest

from protos.quire.link.v1 import link_pb2
from protos.quire.plan.v1 import plan_pb2
from quire.v1 import generation_pb2 as v1
from services.access.principals import CURRENT, Principal
from services.access.shares import make_shares
from services.grammars.checker import QUICK_CPU_S, GrammarChecker
from services.grammars.trial_compiler import Lane, TrialCompiler, TrialUnavailableError, start_trial_compiler
from services.grammars.trial_process import ANSWER, TRIAL, Verdict
from shared.errors import InvalidRequestError, OverloadedError
from shared.grammars import MAX_STRINGS
from tests.services.stack import MODEL, PATIENCE_S, running_stack, tokens_request
from tests.services.test_errors import refused, still_serves
from tests.services.tokenizers_for_tests import byte_level, write_model


def schema(value: object) -> v1.Grammar:
    """A JSON schema."""
    return v1.Grammar(json_schema=json.dumps(value))


def choice(choices: list[str]) -> v1.Grammar:
    """One of several strings."""
    return v1.Grammar(choice=v1.ChoiceGrammar(choices=choices))


def nested(depth: int) -> str:
    """A schema of arrays of arrays."""
    return '{"type":"array","items":' * depth + "{}" + "}" * depth


def chain(length: int) -> str:
    """A Lark grammar whose rules refer to each other in a long chain, which overflows the library's stack."""
    return "start: r0\n" + "\n".join(f'r{n}: "x{n}" r{n + 1} | "y"' for n in range(length)) + f'\nr{length}: "z"'


BAD: list[tuple[str, v1.Grammar, str]] = [
    ("grammar.whitespace", v1.Grammar(regex="a", whitespace=True), "only JSON has whitespace"),
    ("grammar.json_schema", v1.Grammar(json_schema="{"), "invalid JSON at line 1 column 2"),
    ("grammar.json_schema", v1.Grammar(json_schema="[1]"), "use a schema as an object"),
    ("grammar.json_schema", schema({"type": "nonsense"}), "nonsense"),
    ("grammar.json_schema", schema({"type": "string", "minLength": 5, "maxLength": 2}), ""),
    ("grammar.json_schema", schema({"$ref": "http://example.com/schema.json"}), ""),
    ("grammar.json_schema", schema({"$ref": "#"}), "check its references and simplify it"),
    ("grammar.json_schema", schema({"$ref": "#/$defs/missing"}), "missing"),
    ("grammar.json_schema", v1.Grammar(json_schema=nested(3000)), "nest at most"),
    ("grammar.json_schema", schema({"enum": ["x" * 200_000]}), "too long; use at most"),
    ("grammar.json_schema", schema({"enum": list(range(MAX_STRINGS + 1))}), "too many values"),
    ("grammar.json_schema", schema({"type": "array", "minItems": 1_000_000}), "is too large"),
    ("grammar.json_schema", schema({"properties": {"a": {"type": "string", "minLength": 10**9}}}), "is too large"),
    ("grammar.json_schema", schema({"type": "string", "pattern": "^a{100000000}$"}), "too many repetitions"),
    (
        "grammar.json_schema",
        schema({"type": "object", "patternProperties": {"(x{999}){999}": {}}}),
        "too many repetitions",
    ),
    (
        "grammar.json_schema",
        schema({"type": "object", "properties": {f"p{n}": {} for n in range(5000)}}),
        "simplify it",
    ),
    ("grammar.json_schema", schema({"type": "object", "properties": {f"p{n}": {} for n in range(400)}}), "simplify it"),
    (
        "grammar.json_schema",
        schema({"allOf": [{"pattern": f"^(a|b)*a(a|b){{{n}}}$"} for n in range(12)]}),
        "simplify it",
    ),
    ("grammar.json_schema", schema({"type": "integer", "multipleOf": 999_983}), "takes more than 0.25 s"),
    ("grammar.regex", v1.Grammar(regex="("), "unclosed group"),
    ("grammar.regex", v1.Grammar(regex="(" * 3000 + ")" * 3000), "nest at most"),
    ("grammar.regex", v1.Grammar(regex="(?=a)b"), ""),
    ("grammar.regex", v1.Grammar(regex="a{100000000}"), "too many repetitions"),
    ("grammar.regex", v1.Grammar(regex="((a{50}){50}b){50}"), "too many repetitions"),
    ("grammar.regex", v1.Grammar(regex="a?" * 30_000), "takes more than 0.25 s"),
    ("grammar.ebnf", v1.Grammar(ebnf="start: missing"), "missing"),
    ("grammar.ebnf", v1.Grammar(ebnf="no rule at all"), ""),
    ("grammar.ebnf", v1.Grammar(ebnf="root ::= ("), ""),
    ("grammar.ebnf", v1.Grammar(ebnf="start: " + "(" * 500 + '"a"' + ")" * 500), "nest at most"),
    ("grammar.ebnf", v1.Grammar(ebnf='start: "a"~100000000'), "too many repetitions"),
    ("grammar.ebnf", v1.Grammar(ebnf=chain(4000)), "nested too deeply"),
    ("grammar.choice.choices", choice(["a"] * (MAX_STRINGS + 1)), "1 to 2000 strings"),
]


def test_a_grammar_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    """A grammar that cannot be used is refused with its field and the remedy, and the core never receives it.

    The front end still serves, also when the grammar keeps the library busy for minutes or crashes its process.
    """

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            for field, grammar, remedy in BAD:
                request = tokens_request(1, 2, 3)
                request.grammar.CopyFrom(grammar)
                refusal = await refused(stack.generate(request))

                assert refusal.code == grpc.StatusCode.INVALID_ARGUMENT, (field, remedy, refusal.message)
                assert refusal.fields == [field]
                assert remedy in (refusal.message or "")
            assert stack.core.submissions == []
            await still_serves(stack)

    asyncio.run(main())


def test_a_refusal_names_the_field_of_http(tmp_path: Path) -> None:
    """400 with the client's own field name and the remedy."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            body = {"model": "echo", "prompt": "x", "guided_regex": "a{100000000}"}
            response = await stack.http.post("/v1/completions", json=body)

            assert response.status_code == 400
            assert response.json()["error"]["param"] == "guided_regex"
            assert "too many repetitions" in response.json()["error"]["message"]

    asyncio.run(main())


USABLE = {
    "bounded from above": v1.Grammar(regex="(a|b){0,100000}c"),
    "escapes with braces": v1.Grammar(regex=r"\x{1F600}\p{Greek}[{9}]{3}"),
    "one after the other": v1.Grammar(regex="(a{900})b{900}"),
    "large enum": schema({"enum": [f"value {number * 7919}" for number in range(MAX_STRINGS)]}),
    "large choice": choice([f"choice {n * 7919}" for n in range(MAX_STRINGS)]),
    "many properties": schema({"type": "object", "properties": {f"property {n}": {} for n in range(200)}}),
    "deep recursion": schema({"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}}),
}


def test_a_large_grammar_within_the_limits_is_accepted(tmp_path: Path) -> None:
    """Upper bounds cost nothing, and a large schema stays within the limits."""
    write_model(tmp_path, byte_level())

    async def main() -> None:
        checker = new_checker(tmp_path)
        for name, grammar in USABLE.items():
            assert await checker.check(grammar, MODEL), name
        await checker.close()

    asyncio.run(main())


def test_a_grammar_reaches_the_core_in_the_workers_form(tmp_path: Path) -> None:
    """Schemas and expressions are unchanged, choices and EBNF become Lark; the model's end of sequence always ends."""
    grammars = [
        v1.Grammar(json_schema='{"type":"integer"}'),
        v1.Grammar(regex="a+"),
        v1.Grammar(choice=v1.ChoiceGrammar(choices=["ja", 'ne"in'])),
        v1.Grammar(ebnf='root ::= "a" | "b"'),
        v1.Grammar(json_object=True),
    ]

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            for grammar in [*grammars, grammars[0]]:
                request = tokens_request(1, 2, 3, max_tokens=2)
                request.stop.ignore_eos = True
                request.grammar.CopyFrom(grammar)
                await stack.generate(request)

            sent = [plan_pb2.Grammar.FromString(each.grammar) for each in stack.core.submissions]
            assert [each.WhichOneof("kind") for each in sent] == [
                "json_schema", "regex", "lark", "lark", "json_schema", "json_schema",
            ]  # fmt: skip
            assert sent[2].lark == 'start: CHOICE\nCHOICE: "ja" | "ne\\"in"'
            assert stack.core.submissions[0].grammar == stack.core.submissions[5].grammar
            assert all(each.stop_token_ids for each in stack.core.submissions)

    asyncio.run(main())


SHARES = make_shares(1, 1)
WAITING, COSTLY = SHARES.trials.limit // 2, SHARES.costly_trials.limit - 1
"""What one principal may have of either."""


def new_checker(folder: Path) -> GrammarChecker:
    """Return a checker for the tokenizer in a folder."""
    shares = make_shares(1, 1)
    return GrammarChecker(folder / "tokenizer.json", shares.trials, shares.costly_trials)


class ScriptedCompiler:
    """Two real lanes to a compiler that the test controls: it responds when the test releases it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[tuple[str, float]] = []
        """The regular expressions of the trials that have begun, with their CPU time."""
        self.costly: set[str] = set()
        """Those that exceed the CPU time of a first trial."""
        self.go = {"quick": asyncio.Event(), "long": asyncio.Event()}
        self.process = Mock(poll=Mock(return_value=None))
        self._begins = asyncio.Event()
        self._ends: list[asyncio.Task[None]] = []
        monkeypatch.setattr("services.grammars.checker.start_trial_compiler", self._start)

    async def until_begun(self, regex: str) -> None:
        """Wait until a trial of this regular expression has begun."""
        async with asyncio.timeout(PATIENCE_S):
            while regex not in [begun for begun, _ in self.begun]:
                self._begins.clear()
                await self._begins.wait()

    async def _start(self, _file: Path, model: link_pb2.ServedModel) -> TrialCompiler:
        return TrialCompiler(model.fingerprint, await self._lane("quick"), await self._lane("long"), self.process)

    async def _lane(self, name: str) -> Lane:
        ours, theirs = socket.socketpair()
        self._ends.append(asyncio.create_task(self._serve(name, *await asyncio.open_connection(sock=theirs))))
        return Lane(*await asyncio.open_connection(sock=ours))

    async def _serve(self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                cpu_s, length = TRIAL.unpack(await reader.readexactly(TRIAL.size))
                grammar = v1.Grammar.FromString(await reader.readexactly(length))
                self.begun.append((grammar.regex, cpu_s))
                self._begins.set()
                await self.go[name].wait()
                exceeded = name == "quick" and grammar.regex in self.costly
                said = b"" if exceeded else plan_pb2.Grammar(regex=grammar.regex).SerializeToString()
                writer.write(ANSWER.pack(Verdict.EXCEEDED if exceeded else Verdict.USABLE, len(said)) + said)
        writer.close()


def scripted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    test: Callable[[ScriptedCompiler, Callable[[str], "asyncio.Task[bytes]"]], Awaitable[None]],
) -> None:
    """Run a test with a checker whose compiler is scripted."""

    async def main() -> None:
        compiler, checker = ScriptedCompiler(monkeypatch), new_checker(tmp_path)
        await test(compiler, lambda regex: asyncio.create_task(checker.check(v1.Grammar(regex=regex), MODEL)))
        await checker.close()

    asyncio.run(main())


def test_a_cheap_grammar_does_not_wait_for_a_costly_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What exceeds the CPU time of a first trial is tried once more beside the others, and is marked as costly."""

    async def main(compiler: ScriptedCompiler, check: Callable[[str], "asyncio.Task[bytes]"]) -> None:
        compiler.costly = {"costly", "costly, too"}
        compiler.go["quick"].set()
        costly = [check("costly"), check("costly, too")]
        await compiler.until_begun("costly, too")
        cheap = plan_pb2.Grammar.FromString(await check("cheap"))
        compiler.go["long"].set()
        tried = [plan_pb2.Grammar.FromString(await task) for task in costly]

        assert not cheap.costly
        assert [(grammar.regex, grammar.costly) for grammar in tried] == [("costly", True), ("costly, too", True)]
        cpu_s = [cpu_s for regex, cpu_s in compiler.begun if regex == "costly"]
        assert cpu_s[0] == pytest.approx(QUICK_CPU_S)
        assert cpu_s[1] >= 5 * QUICK_CPU_S

    scripted(tmp_path, monkeypatch, main)


def test_costly_grammars_do_not_take_the_places_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bounded number wait for their second trial; one more gets a retry delay, and cheap ones pass."""

    async def main(compiler: ScriptedCompiler, check: Callable[[str], "asyncio.Task[bytes]"]) -> None:
        names = [f"costly {number}" for number in range(COSTLY + 1)]
        compiler.costly = set(names)
        compiler.go["quick"].set()
        *costly, one_more = [check(name) for name in names]
        with pytest.raises(OverloadedError):
            await one_more
        assert await check("cheap")
        compiler.go["long"].set()
        assert len(await asyncio.gather(*costly)) == COSTLY

    scripted(tmp_path, monkeypatch, main)


def test_the_grammars_of_one_principal_leave_room_for_those_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one principal has as many grammars on trial as it may have, the next trial is another principal's."""

    async def main(compiler: ScriptedCompiler, check: Callable[[str], "asyncio.Task[bytes]"]) -> None:
        CURRENT.set(Principal("greedy"))
        greedy = [check(f"greedy {number}") for number in range(WAITING)]
        await compiler.until_begun("greedy 0")
        with pytest.raises(OverloadedError):
            await check("one too many")
        CURRENT.set(Principal("modest"))
        modest = check("modest")
        compiler.go["quick"].set()
        await asyncio.gather(modest, *greedy)

        assert [regex for regex, _ in compiler.begun].index("modest") <= 2

    scripted(tmp_path, monkeypatch, main)


def test_a_grammar_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many requests have it, at the same time or later."""

    async def main(compiler: ScriptedCompiler, check: Callable[[str], "asyncio.Task[bytes]"]) -> None:
        many = [check("a") for _ in range(3 * WAITING)]
        await compiler.until_begun("a")
        compiler.go["quick"].set()
        await asyncio.gather(*many, check("a"))
        await check("a")

        assert len(compiler.begun) == 1

    scripted(tmp_path, monkeypatch, main)


def test_grammars_of_those_who_left_are_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a limited number may wait; a request that ends meanwhile makes room, and its grammar is not compiled."""

    async def main(compiler: ScriptedCompiler, check: Callable[[str], "asyncio.Task[bytes]"]) -> None:
        first = check("first")
        await compiler.until_begun("first")
        leaving = [check(f"leaves {number}") for number in range(WAITING - 1)]
        with pytest.raises(OverloadedError):
            await check("one too many")
        for task in leaving:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        last = check("last")
        compiler.go["quick"].set()
        await asyncio.gather(first, last)

        assert [regex for regex, _ in compiler.begun] == ["first", "last"]

    scripted(tmp_path, monkeypatch, main)


def test_a_request_that_leaves_does_not_confuse_the_next_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result of its started trial is not mistaken for the next one's."""

    async def main(compiler: ScriptedCompiler, check: Callable[[str], "asyncio.Task[bytes]"]) -> None:
        leaving = check("leaving")
        await compiler.until_begun("leaving")
        leaving.cancel()
        last = check("last")
        compiler.go["quick"].set()

        assert plan_pb2.Grammar.FromString(await last).regex == "last"

    scripted(tmp_path, monkeypatch, main)


def test_a_grammar_that_waits_too_long_for_its_trial_may_be_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error blames the front end's load, not the grammar."""
    monkeypatch.setattr("services.grammars.checker.TIMEOUT_S", 0.05)

    async def main(compiler: ScriptedCompiler, check: Callable[[str], "asyncio.Task[bytes]"]) -> None:
        with pytest.raises(OverloadedError):
            await check("slow")
        compiler.go["quick"].set()
        assert await check("slow")

    scripted(tmp_path, monkeypatch, main)


def test_another_process_takes_over_from_one_that_died(tmp_path: Path) -> None:
    """Its trial may be repeated; no process is left when the front end closes."""
    write_model(tmp_path, byte_level())

    async def main() -> None:
        checker = new_checker(tmp_path)
        await checker.check(v1.Grammar(regex="a"), MODEL)
        assert checker._starting is not None
        first = checker._starting.result().process
        os.kill(first.pid, signal.SIGKILL)
        await asyncio.to_thread(first.wait)
        await checker.check(v1.Grammar(regex="b"), MODEL)
        second = checker._starting.result().process
        await checker.close()

        assert first.pid != second.pid
        assert second.poll() is not None

    asyncio.run(main())


async def children_of(compiler: TrialCompiler) -> list[int]:
    """The process ids of the children that serve the lanes."""
    for lane in (compiler.quick, compiler.long):
        await lane.run(v1.Grammar(regex="a").SerializeToString(), 1.0, "")
    return [child.pid for child in psutil.Process(compiler.process.pid).children()]


def test_no_process_outlives_a_front_end_that_died(tmp_path: Path) -> None:
    """They see the sockets closed."""
    write_model(tmp_path, byte_level())

    async def main() -> None:
        compiler = await start_trial_compiler(tmp_path / "tokenizer.json", MODEL)
        children = [os.pidfd_open(pid) for pid in await children_of(compiler)]
        compiler.quick.close()
        compiler.long.close()
        await asyncio.wait_for(asyncio.to_thread(compiler.process.wait), PATIENCE_S)

        assert len(children) == 2
        for child in children:
            with pytest.raises(ProcessLookupError):
                signal.pidfd_send_signal(child, 0)
            os.close(child)

    asyncio.run(main())


def test_a_trial_fails_when_its_process_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not wait for ever; and so it is when no process can be started."""
    write_model(tmp_path, byte_level())

    async def main() -> None:
        compiler = await start_trial_compiler(tmp_path / "tokenizer.json", MODEL)
        for pid in (compiler.process.pid, *await children_of(compiler)):
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(TrialUnavailableError):
            await compiler.quick.run(v1.Grammar(regex="a").SerializeToString(), 1.0, "")
        await compiler.close()
        monkeypatch.setattr("sys.executable", "/nonexistent")
        with pytest.raises(TrialUnavailableError):
            await start_trial_compiler(tmp_path / "tokenizer.json", MODEL)

    asyncio.run(main())


def test_a_model_without_a_tokenizer_for_grammars_refuses_them(tmp_path: Path) -> None:
    """The reason is the served model's, and the process serves on."""

    async def main() -> None:
        checker = new_checker(tmp_path)
        for regex in ("a", "b"):
            with pytest.raises(InvalidRequestError, match="the served model's tokenizer"):
                await checker.check(v1.Grammar(regex=regex), MODEL)
        await checker.close()

    asyncio.run(main())


def test_the_memory_of_tried_grammars_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The grammar used longest ago is forgotten, and tried again when it returns."""
    monkeypatch.setattr("services.grammars.checker._MAX_KNOWN_BYTES", 900)

    async def main(compiler: ScriptedCompiler, check: Callable[[str], "asyncio.Task[bytes]"]) -> None:
        compiler.go["quick"].set()
        for regex in ("a", "b", "a", "c" * 200, "a", "b"):
            await check(regex)

        assert [regex[0] for regex, _ in compiler.begun] == ["a", "b", "c", "b"]

    scripted(tmp_path, monkeypatch, main)
