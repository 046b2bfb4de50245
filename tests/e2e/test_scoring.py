"""Relevance scores of real services, compared with those that `transformers` computes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModel, AutoModelForCausalLM

from measure.testbed.checkpoints import make_checkpoint
from measure.testbed.service import Served, Service, serve

QUERY = "the quick brown fox"
DOCUMENTS = ["the lazy dog", "the quick brown fox jumps", "one sings in the rain", "the quick brown fox jumps " * 20]
QUESTION = (
    "<|system|>Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note"
    ' that the answer can only be "yes" or "no".<|end|><|user|><Instruct>: {instruction}\n<Query>: {query}\n'
    "<Document>: {document}<|end|><|assistant|>"
)
"""Qwen3-Reranker's question in the checkpoint's chat template."""
SEARCH = "Given a web search query, retrieve relevant passages that answer the query"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small checkpoint that has the tokens "yes" and "no"."""
    folder = make_checkpoint("Qwen3ForCausalLM", tmp_path_factory.mktemp("model"))
    path = folder / "tokenizer.json"
    text = path.read_text()
    for unused, word in (("<|pad|>", "yes"), ("<|start|>", "no")):
        assert json.dumps(unused) in text
        text = text.replace(json.dumps(unused), json.dumps(word))
    path.write_text(text)
    return folder


@pytest.fixture(scope="module")
def by_answers(checkpoint: Path) -> Iterator[Served]:
    """Yield a service that scores by the answers yes and no."""
    with serve(checkpoint, "--dtype=float32", "--score-method=yes-no", "--max-num-batched-tokens=32") as served:
        yield served


def post(served: Service, path: str, **body: Any) -> Any:
    """Return the answer of a service."""
    answer = httpx.post(f"http://{served.http}{path}", json=body, trust_env=False, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_answers_have_the_probabilities_of_the_model(by_answers: Served, checkpoint: Path) -> None:
    """The score is the softmax over the logits of "yes" and "no" behind the question, from the first time on.

    A second call reads cached prefixes and gives the same scores; /rerank sorts by them.
    """
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    answers = torch.tensor([tokenizer.token_to_id(word) for word in ("yes", "no")])
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")

    def probability(document: str, instruction: str = SEARCH) -> float:
        text = QUESTION.format(query=QUERY, document=document, instruction=instruction)
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1].double()
        return float(torch.softmax(logits[answers], 0)[0])

    expected = [probability(document) for document in DOCUMENTS]
    assert max(expected) - min(expected) > 0.05, "the oracle can tell the documents apart"
    for _ in range(2):
        scored = post(by_answers, "/v1/score", text_1=QUERY, text_2=DOCUMENTS)
        assert [each["score"] for each in scored["data"]] == pytest.approx(expected, rel=2e-3, abs=1e-5)
    ranked = post(by_answers, "/v2/rerank", query=QUERY, documents=DOCUMENTS)["results"]
    assert [each["index"] for each in ranked] == sorted(range(len(DOCUMENTS)), key=lambda index: -expected[index])
    other = post(by_answers, "/v1/score", text_1=QUERY, text_2=DOCUMENTS[0], instruction="find dogs")
    assert other["data"][0]["score"] == pytest.approx(probability(DOCUMENTS[0], "find dogs"), rel=2e-3, abs=1e-5)


def test_embeddings_have_the_cosine_of_the_model(demo: Service) -> None:
    """The score is the cosine between the hidden states after the last tokens of the two texts."""
    folder = Path(__file__).parents[2] / "shared" / "demo_model"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model: Any = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")

    def vector(text: str) -> torch.Tensor:
        with torch.inference_mode():
            states: torch.Tensor = model(torch.tensor([tokenizer.encode(text).ids])).last_hidden_state
        return states[0, -1].double()

    expected = [float(torch.cosine_similarity(vector(QUERY), vector(each), dim=0)) for each in DOCUMENTS]
    scored = post(demo, "/score", text_1=QUERY, text_2=DOCUMENTS)
    assert [each["score"] for each in scored["data"]] == pytest.approx(expected, abs=2e-3)
    ranked = post(demo, "/rerank", query=QUERY, documents=DOCUMENTS, top_n=1)["results"]
    assert ranked[0]["relevance_score"] == max(each["score"] for each in scored["data"])


def test_a_prompt_without_output_has_the_log_probabilities_of_the_model(demo: Service) -> None:
    """`max_tokens` 0 with `echo` returns each prompt token's log-probability, given the tokens before it."""
    folder = Path(__file__).parents[2] / "shared" / "demo_model"
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("Once upon a time there was a dog").ids
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1)
    expected = [float(logprobs[position, token]) for position, token in enumerate(ids[1:])]

    answer = post(demo, "/v1/completions", prompt=[ids, ids[:3]], max_tokens=0, echo=True, logprobs=1)
    for choice, length in zip(answer["choices"], (len(ids), 3), strict=True):
        scored = choice["logprobs"]["token_logprobs"]
        assert (scored[0], len(scored)) == (None, length)
        assert scored[1:] == pytest.approx(expected[: length - 1], abs=5e-3)
    assert (answer["usage"]["completion_tokens"], answer["usage"]["prompt_tokens"]) == (0, len(ids) + 3)
