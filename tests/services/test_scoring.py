"""Document relevance at the front end: what is computed for a request, and what its client gets."""

import asyncio
import json
import math
import struct
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import AddedToken, Tokenizer

from measure.frontend.echo_core import EchoFrontend
from protos.quire.link.v1 import link_pb2
from protos.quire.plan.v1 import plan_pb2
from services.calls import scoring
from services.calls.scoring import MAX_DOCUMENTS
from services.text.judge import Judge
from services.text.tokenizer import load_tokenizer
from shared.columns import from_column, to_column
from shared.config import ConfigError
from tests.services.stack import MODEL, Stack, TestCore, running_stack
from tests.services.tokenizers_for_tests import byte_level, write_model

QUERY = "the fox"
DOCUMENTS = ["a dog", "the quick brown fox", "the sea"]
SIMILAR = {QUERY: (1.0, 0.0), "a dog": (0.0, 2.0), "the quick brown fox": (3.0, 4.0), "the sea": (-1.0, 0.0)}
"""Vectors of texts."""
COSINES = [0.0, 0.6, -1.0]


def with_answers() -> Tokenizer:
    """Return a tokenizer with the tokens of answers."""
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in ("yes", "no")])
    return tokenizer


YES, NO = MODEL.vocab_size, MODEL.vocab_size + 1


def served(*, hidden_size: int = 0, vocab_size: int = MODEL.vocab_size) -> link_pb2.ServedModel:
    """The served model with other figures."""
    model = link_pb2.ServedModel()
    model.CopyFrom(MODEL)
    model.hidden_size, model.vocab_size = hidden_size, vocab_size
    return model


class VectorCore(TestCore):
    """A core that embeds the texts of `SIMILAR`."""

    def __init__(self, address: str) -> None:
        super().__init__(address, model=served(hidden_size=2))

    def submit(self, frontend: EchoFrontend, submission: link_pb2.Submission, answer: link_pb2.CoreMessage) -> None:
        """Ends the request with the vector of its text."""
        text = byte_level().decode(from_column(submission.token_ids).tolist())
        vector = struct.pack("<2f", *SIMILAR.get(text, (1.0, 1.0)))
        answer.ends.add(stream=submission.stream, reason=link_pb2.END_REASON_EMBEDDED, embedding=vector)


class JudgeCore(TestCore):
    """A core whose model answers yes with the log-probability -len(document), and no with -3.

    Answers less likely than `TOP` are not among the most likely tokens.
    """

    TOP = -9.0

    def __init__(self, address: str) -> None:
        super().__init__(address, model=served(vocab_size=MODEL.vocab_size + 2))

    def submit(self, frontend: EchoFrontend, submission: link_pb2.Submission, answer: link_pb2.CoreMessage) -> None:
        """Answers with the likeliest of the allowed tokens, and its score."""
        scores = {YES: -float(len(document_of(submission))), NO: -3.0}
        params = plan_pb2.SamplingParams.FromString(submission.sampling)
        assert (params.temperature, params.logprobs, submission.max_tokens) == (0.0, 20, 1)
        token = max(from_column(params.allowed_token_ids).tolist(), key=lambda each: scores[each])
        top = {each: score for each, score in scores.items() if score >= self.TOP}
        columns = plan_pb2.TokenScores(
            logprobs=struct.pack("<f", scores[token]),
            ranks=to_column([1]),
            top_token_ids=to_column(list(top)),
            top_logprobs=struct.pack(f"<{len(top)}f", *top.values()),
        )
        stream = submission.stream
        tokens = link_pb2.CoreMessage(incarnation=self.incarnation)
        tokens.scores.add(stream=stream, first_index=0, scores=columns.SerializeToString())
        tokens.streams, tokens.first_indices, tokens.counts = to_column([stream]), to_column([0]), to_column([1])
        tokens.tokens = to_column([token])
        frontend.backlog.append(tokens.SerializeToString())
        answer.ends.add(stream=stream, reason=link_pb2.END_REASON_LENGTH, completion_tokens=1)


def prompt_of(submission: link_pb2.Submission) -> str:
    """The text of a request's prompt."""
    return str(with_answers().decode(from_column(submission.token_ids).tolist()))


def document_of(submission: link_pb2.Submission) -> str:
    """The document in a question."""
    return prompt_of(submission).partition("<Document>: ")[2].partition("\nassistant:")[0]


async def answered(stack: Stack, path: str, body: dict[str, Any]) -> Any:
    """The answer to a request."""
    answer = await stack.http.post(path, json={"model": MODEL.name, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_documents_are_sorted_by_the_cosine_of_their_embeddings(tmp_path: Path) -> None:
    """Every path of /rerank sorts documents by relevance; equal ones keep their order.

    The bodies of vLLM, Cohere (both versions) and Jina work: documents as texts or objects, with the number of results.
    """

    async def check() -> None:
        async with running_stack(tmp_path, core=VectorCore) as stack:
            bodies: list[tuple[str, dict[str, Any]]] = [
                ("/rerank", {}),
                ("/v1/rerank", {"top_n": 2, "return_documents": False, "max_chunks_per_doc": 10}),
                ("/v2/rerank", {"top_n": 9, "max_tokens_per_doc": 4096}),
                ("/v1/rerank", {"documents": [{"text": each, "title": "x"} for each in DOCUMENTS], "top_n": 0}),
            ]
            for path, body in bodies:
                got = await answered(stack, path, {"query": QUERY, "documents": DOCUMENTS, **body})
                expected = [1, 0, 2][: body.get("top_n") or None]
                assert [each["index"] for each in got["results"]] == expected, path
                scores = [each["relevance_score"] for each in got["results"]]
                assert scores == pytest.approx([COSINES[index] for index in expected], abs=1e-6)
                texts = [each.get("document") for each in got["results"]]
                shown = body.get("return_documents", True)
                assert texts == [{"text": DOCUMENTS[index]} if shown else None for index in expected]
                assert got["model"] == MODEL.name
                assert got["usage"]["total_tokens"] == got["usage"]["prompt_tokens"] > 0
            equal = await answered(stack, "/rerank", {"query": QUERY, "documents": ["x", "a dog", "y", "x"]})
            assert [each["index"] for each in equal["results"]] == [0, 2, 3, 1]

    asyncio.run(check())


def test_scores_have_the_order_of_their_texts(tmp_path: Path) -> None:
    """One text is compared with each of the others, or two lists in pairs, as in vLLM."""

    async def check() -> None:
        async with running_stack(tmp_path, core=VectorCore) as stack:
            for path, first, second, expected in (
                ("/score", QUERY, DOCUMENTS, COSINES),
                ("/v1/score", [QUERY], DOCUMENTS, COSINES),
                ("/v1/score", [QUERY, QUERY, "a dog"], DOCUMENTS, [0.0, 0.6, 0.0]),
                ("/v1/score", QUERY, "the sea", [-1.0]),
            ):
                got = await answered(stack, path, {"text_1": first, "text_2": second})
                assert (got["object"], got["usage"]["completion_tokens"]) == ("list", 0)
                assert [(each["index"], each["object"]) for each in got["data"]] == [
                    (index, "score") for index in range(len(expected))
                ]
                assert [each["score"] for each in got["data"]] == pytest.approx(expected, abs=1e-6)
            got = await answered(stack, "/score", {"text_1": DOCUMENTS, "text_2": DOCUMENTS})
            assert all(1 - 1e-6 <= each["score"] <= 1 for each in got["data"]), "no cosine exceeds 1"

    asyncio.run(check())


def test_pooling_gives_vectors_in_the_form_of_vllm(tmp_path: Path) -> None:
    """/pooling gives the vectors of /v1/embeddings under the names of vLLM."""

    async def check() -> None:
        async with running_stack(tmp_path, core=VectorCore) as stack:
            got = await answered(stack, "/pooling", {"input": ["a dog", "the quick brown fox"], "task": "embed"})
            assert [(each["object"], each["index"]) for each in got["data"]] == [("pooling", 0), ("pooling", 1)]
            assert [each["data"] for each in got["data"]] == [[0.0, 1.0], pytest.approx([0.6, 0.8])]
            assert got["id"].startswith("pool-")

    asyncio.run(check())


def test_a_model_that_answers_yes_or_no_gives_probabilities(tmp_path: Path) -> None:
    """With yes-no, a score is the probability of "yes" compared with "no", as the next token after the question.

    One request is computed for a pair, and a second one only if the less likely answer is not among the top tokens.
    """

    async def check() -> None:
        async with running_stack(
            tmp_path, core=JudgeCore, tokenizer=with_answers(), score_method="yes-no", generation_config="none"
        ) as stack:
            documents = ["a", "fox", "the quick brown fox"]
            got = await answered(stack, "/score", {"text_1": QUERY, "text_2": documents})
            expected = [math.exp(-len(each)) / (math.exp(-len(each)) + math.exp(-3)) for each in documents]
            assert [each["score"] for each in got["data"]] == pytest.approx(expected, rel=1e-6)
            assert sorted(document_of(each) for each in stack.core.submissions) == sorted([*documents, documents[-1]])
            once = {prompt_of(each): each.num_prompt_tokens for each in stack.core.submissions}
            assert got["usage"]["prompt_tokens"] == sum(once.values())

            ranked = await answered(
                stack, "/rerank", {"query": QUERY, "documents": documents, "instruction": "find foxes"}
            )
            assert [each["index"] for each in ranked["results"]] == [0, 1, 2]
            question = prompt_of(stack.core.submissions[-1])
            assert question.startswith("system: Judge whether the Document meets")
            assert f"user: <Instruct>: find foxes\n<Query>: {QUERY}\n<Document>: " in question
            assert question.endswith("\nassistant:")

            cut = await answered(
                stack, "/rerank", {"query": QUERY, "documents": ["the quick brown fox"], "max_tokens_per_doc": 1}
            )
            assert document_of(stack.core.submissions[-1]) == "the"
            assert cut["results"][0]["document"] == {"text": "the quick brown fox"}

    asyncio.run(check())


@pytest.mark.parametrize("method", ["embedding", "yes-no"])
@pytest.mark.parametrize(
    ("path", "body", "param", "what"),
    [
        ("/rerank", {"query": "x", "documents": []}, "documents", "must not be empty"),
        ("/rerank", {"query": "x", "documents": ["a"] * (MAX_DOCUMENTS + 1)}, "documents", "at most 1024"),
        ("/rerank", {"query": "x", "documents": ["a", {"image": "u"}]}, "documents[1].text", "missing"),
        ("/rerank", {"query": "x", "documents": ["a", "a " * 5000]}, "documents[1]", "too long"),
        ("/rerank", {"query": "x", "documents": ["a"], "rank_fields": ["title"]}, "rank_fields[0]", "must be 'text'"),
        ("/rerank", {"query": "x", "documents": ["a"], "top": 1}, "top", "did you mean 'top_n'"),
        ("/score", {"text_1": ["x", "y"], "text_2": ["a", "b", "c"]}, "text_1", "must be one text, or one for each"),
        ("/score", {"text_1": "x", "text_2": ["a", "a " * 5000]}, "text_2[1]", "too long"),
        ("/score", {"text_1": "x", "text_2": "a " * 5000}, "text_2", "too long"),
        ("/score", {"text_1": "x"}, "text_2", "missing"),
        ("/pooling", {"input": "x", "task": "classify"}, "task", "must be 'embed'"),
    ],
)
def test_an_error_names_the_text(
    tmp_path: Path, method: str, path: str, body: dict[str, Any], param: str, what: str
) -> None:
    """A wrong field is 400 with its name as the client wrote it, by both methods."""

    async def check() -> None:
        core = VectorCore if method == "embedding" else JudgeCore
        async with running_stack(tmp_path, core=core, tokenizer=with_answers(), score_method=method) as stack:
            answer = await stack.http.post(path, json=body)
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] == param
            assert what in answer.json()["error"]["message"]

    asyncio.run(check())


@pytest.mark.parametrize(
    ("method", "fields"),
    [
        ("embedding", {"instruction": "find foxes"}),
        ("yes-no", {"pooling": "mean"}),
        ("yes-no", {"truncate_prompt_tokens": 5}),
    ],
)
def test_a_field_of_the_other_method_is_refused(tmp_path: Path, method: str, fields: dict[str, Any]) -> None:
    """A field that the server's method does not know is not ignored."""

    async def check() -> None:
        core = VectorCore if method == "embedding" else JudgeCore
        async with running_stack(tmp_path, core=core, tokenizer=with_answers(), score_method=method) as stack:
            answer = await stack.http.post("/rerank", json={"query": "x", "documents": ["a"], **fields})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == next(iter(fields))
            assert f"score method {method}" in answer.json()["error"]["message"]

    asyncio.run(check())


def test_a_long_query_counts_once_for_each_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With yes-no, the whole text of all questions is bounded, so a small body cannot cause much work."""
    monkeypatch.setattr(scoring, "MAX_TEXT_BYTES", 1000)

    async def check() -> None:
        async with running_stack(tmp_path, core=JudgeCore, tokenizer=with_answers(), score_method="yes-no") as stack:
            body = {"query": "x" * 99, "documents": ["a"] * 10}
            await answered(stack, "/rerank", body)
            before = len(stack.core.submissions)
            refused = await stack.http.post("/rerank", json={**body, "documents": ["a"] * 11})
            assert refused.status_code == 400
            assert "1100 bytes of text" in refused.json()["error"]["message"]
            assert len(stack.core.submissions) == before

    asyncio.run(check())


@pytest.mark.parametrize("method", ["embedding", "yes-no"])
def test_a_client_that_leaves_ends_every_part(tmp_path: Path, method: str) -> None:
    """All documents' requests end when the client disconnects; those that have not started never do."""

    async def check() -> None:
        model = served(hidden_size=2, vocab_size=MODEL.vocab_size + 2)
        async with running_stack(
            tmp_path,
            core=lambda address: TestCore(address, limit=0, model=model),
            tokenizer=with_answers(),
            score_method=method,
        ) as stack:
            body = {"query": QUERY, "documents": [f"a dog {index}" for index in range(300)]}
            leaving = asyncio.create_task(stack.http.post("/rerank", json=body))
            await stack.core.saw(lambda core: len(core.submissions) == 128)
            leaving.cancel()
            with pytest.raises((asyncio.CancelledError, httpx.HTTPError)):
                await leaving
            await stack.core.saw(lambda core: len(from_column(b"".join(core.cancelled))) == 128)
            assert not stack.frontend.link._streams
            assert len(stack.core.submissions) == 128

    asyncio.run(check())


class FailingCore(TestCore):
    """A core that computes nothing but the failure of one document."""

    def __init__(self, address: str) -> None:
        super().__init__(address, limit=0, model=served(vocab_size=MODEL.vocab_size + 2))

    def submit(self, frontend: EchoFrontend, submission: link_pb2.Submission, answer: link_pb2.CoreMessage) -> None:
        """Ends the request for the document "bad"."""
        if document_of(submission) == "bad":
            answer.ends.add(stream=submission.stream, reason=link_pb2.END_REASON_ROW_FAILED, message="NaN")
        else:
            super().submit(frontend, submission, answer)


def test_a_failed_part_ends_the_call(tmp_path: Path) -> None:
    """If one part fails, the call returns no score, and the other parts end."""

    async def check() -> None:
        async with running_stack(tmp_path, core=FailingCore, tokenizer=with_answers(), score_method="yes-no") as stack:
            failed = await stack.http.post("/rerank", json={"query": QUERY, "documents": ["a", "bad", "b"]})
            assert failed.status_code == 500
            await stack.core.saw(lambda core: len(from_column(b"".join(core.cancelled))) == 2)
            assert not stack.frontend.link._streams

    asyncio.run(check())


def test_the_method_needs_a_model_that_can_answer(tmp_path: Path) -> None:
    """yes-no needs a chat template and one token per answer; otherwise a front end does not start."""
    for folder, tokenizer, template, what in (
        ("no_tokens", byte_level(), {}, "a token for 'yes'"),
        ("no_template", with_answers(), {"chat_template": None}, "a chat template"),
    ):
        loaded = load_tokenizer(write_model(tmp_path / folder, tokenizer, **template))
        with pytest.raises(ConfigError, match=f"score_method: yes-no needs a model with {what}; use --score-method"):
            Judge.of(loaded)


def test_a_template_for_rerankers_writes_the_question_itself(tmp_path: Path) -> None:
    """A template with messages of the roles query and document gets the two texts and the instruction."""
    template = (
        "{{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}|"
        "{{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}"
    )
    judge = Judge.of(load_tokenizer(write_model(tmp_path, with_answers(), chat_template=template)))

    def turns(instruction: str) -> list[tuple[str, str]]:
        return [(each.role, each.content) for each in judge.question("q", "d", instruction).messages]

    assert turns("") == [("query", "q"), ("document", "d")]
    assert turns("find") == [("system", "find"), ("query", "q"), ("document", "d")]
    assert json.loads(judge.question("q", "d", "").template_variables_json) == {"enable_thinking": False}
