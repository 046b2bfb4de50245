"""`quire serve --speculation ngram`: the tokens of the model, in fewer steps."""

import asyncio
import subprocess
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from checks.oracle import Oracle, Tally
from measure.testbed.checkpoints import make_checkpoint
from measure.testbed.service import QUIRE, serve
from quire import Client
from records.reader import read
from records.replay import entries, replay
from records.whatif.answer import compare, from_record
from scheduler_svc.core.interface import events as ev
from shared.model_path import resolve_model
from tests.e2e.load import Answer
from tests.e2e.test_worker_death import Kill, _run_with_a_kill

FLAGS = ("--dtype=float32", "--num-threads=1", "--speculation=ngram", "--speculative-tokens=6")


def test_tokens_are_the_models_and_drafts_are_counted(tmp_path: Path) -> None:
    """Repetitive texts advance by several tokens per step, in spite of memory pressure and the worker's death.

    The tokens are the oracle's, `explain` and the metrics have the drafts, and the record replays and is simulated.
    """
    checkpoint = resolve_model("demo", weights=True)
    oracle = Oracle(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    questions = [f"What is {number} + 4? " * 4 for number in range(4)]
    answers = [Answer(tokenizer(question)["input_ids"], 150) for question in questions]
    flags = (*FLAGS, "--max-tokens-in-paged-kv-cache=600")
    with serve("demo", *flags, environ={"XDG_STATE_HOME": str(tmp_path)}) as served:
        asyncio.run(_run_with_a_kill(served, answers, Kill()))
        num_requests = len(answers)
        for question in questions:  # A request has no drafts while they cost more than they save.
            num_requests += 1
            with Client(served.grpc) as client:
                result = client.generate(question, max_tokens=100, temperature=0, ignore_eos=True).result()
            explained = subprocess.run(
                [*QUIRE, "explain", result.finished.request_id, f"--target={served.grpc}"],
                capture_output=True,
                text=True,
                check=True,
            )
            if "drafts accepted" in explained.stdout:
                break
        drafted = served.metric("quire_draft_tokens_total")
        accepted = served.metric("quire_accepted_draft_tokens_total")
        alias = served.metric("vllm:spec_decode_num_accepted_tokens_total")
        assert served.metric("quire_kv_blocks", state="held") == 0

    tally = Tally()
    for answer in answers:
        assert len(answer.tokens) == 150
        oracle.check_greedy(answer.prompt, answer.tokens, tally)
    assert tally.near_ties * 1000 < tally.tokens, tally
    assert 0 < accepted <= drafted
    assert accepted == alias
    assert "drafts accepted" in explained.stdout
    folder = tmp_path / "quire" / "record" / "any"
    steps = [entry.what for entry in entries(read(folder)) if isinstance(entry.what, ev.StepDone)]
    assert sum(int(step.counts.sum()) - len(step.rows) for step in steps if step.counts is not None) > 0
    assert replay(read(folder)).difference is None
    found = compare(from_record(folder), ["speculation=off"])
    assert found.recorded is not None
    assert found.changed is not None
    assert found.recorded.requests == found.simulated.figures.requests == found.changed.figures.requests == num_requests
    assert found.recorded.accepted_draft_tokens > 0
    assert found.changed.figures.draft_tokens == 0


@pytest.mark.release
def test_log_probabilities_seeds_and_grammars_are_those_without_drafts(tmp_path: Path) -> None:
    """Sampling with a seed, log-probabilities and a grammar give the same answers with and without speculation."""
    checkpoint = make_checkpoint("LlamaForCausalLM", tmp_path / "model")
    found = []
    for speculation in ("off", "ngram"):
        with (
            serve(checkpoint, "--dtype=float32", "--num-threads=1", f"--speculation={speculation}") as served,
            Client(served.grpc) as client,
        ):
            sampled = [
                client.generate(token_ids=[20, 30] * 10, max_tokens=120, temperature=0.7, seed=seed, logprobs=1,
                                ignore_eos=True)
                for seed in range(2)
            ]  # fmt: skip
            shaped = client.generate("x", regex="(ab){20}", max_tokens=60, temperature=1.0, seed=1).result()
            results = [each.result() for each in sampled]
            found.append(
                (
                    [result.token_ids for result in results],
                    [[round(each.token.logprob, 3) for each in result.logprobs] for result in results],
                    shaped.text,
                )
            )
    assert found[0][0] == found[1][0]
    assert found[0][1] == [pytest.approx(values, abs=2e-3) for values in found[1][1]]
    assert found[0][2] == found[1][2]
