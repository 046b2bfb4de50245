"""Sampling options through the real processes."""

from pathlib import Path

import grpc
import pytest
import torch

from checks.oracle import Oracle
from measure.testbed.checkpoints import make_checkpoint
from measure.testbed.service import serve
from quire.v1 import generation_pb2 as v1
from quire.v1.generation_pb2_grpc import GenerationServiceStub

CACHED = "quire_prefix_cache_hit_tokens_total"
PROMPT = list(range(3, 40))


def request(**options: object) -> v1.GenerateOnceRequest:
    """A request of 16 tokens that the model does not end."""
    sampling, output = (options.get(name, {}) for name in ("sampling", "output"))
    assert isinstance(sampling, dict)
    assert isinstance(output, dict)
    inner = v1.GenerateRequest(
        token_ids=v1.TokenIds(ids=PROMPT),
        sampling=v1.SamplingOptions(**sampling),
        output=v1.OutputOptions(**output),
        stop=v1.StopOptions(max_tokens=16, ignore_eos=True),
    )
    return v1.GenerateOnceRequest(request=inner)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("prefix_cache", ["hash", "radix"])
def test_choices_differ_are_reproducible_and_share_their_prompt(tmp_path: Path, prefix_cache: str) -> None:
    """Choices differ under one seed, are the same in a second run, and compute their prompt once.

    Log-probabilities of prompt and output equal those of `transformers`, although the prompt is cached.
    """
    checkpoint = make_checkpoint("LlamaForCausalLM", tmp_path / "model")
    oracle = Oracle(checkpoint)
    flags = ("--dtype=float32", "--block-size=8", f"--prefix-cache={prefix_cache}")
    with serve(checkpoint, *flags) as served, grpc.insecure_channel(served.grpc) as channel:
        stub = GenerationServiceStub(channel)
        several = request(sampling={"n": 4, "seed": 7}, output={"logprobs": 2, "prompt_logprobs": 0})
        first, second = stub.GenerateOnce(several), stub.GenerateOnce(several)
        alone = stub.GenerateOnce(request(sampling={"seed": 7}))
        cached = served.metric(CACHED)
        fresh = request(sampling={"n": 4})
        fresh.request.token_ids.ids[:] = [9, *PROMPT]
        stub.GenerateOnce(fresh)
        cached = served.metric(CACHED) - cached

    tokens = [list(choice.token_ids) for choice in first.choices]
    assert len({tuple(each) for each in tokens}) == 4
    assert [list(choice.token_ids) for choice in second.choices] == tokens
    assert list(alone.choices[0].token_ids) == tokens[0]
    assert first.usage.completion_tokens == 64
    assert cached >= 3 * (len(PROMPT) // 8) * 8, "three choices take the full blocks of the first one's prompt"
    assert len(first.prompt.logprobs) == len(PROMPT)
    for choice in first.choices:
        with torch.inference_mode():
            reference = oracle.model(torch.tensor([[*PROMPT, *choice.token_ids]])).logits[0].log_softmax(dim=-1)
        for index, entry in enumerate(choice.logprobs):
            line = reference[len(PROMPT) - 1 + index]
            assert entry.token.logprob == pytest.approx(float(line[choice.token_ids[index]]), abs=1e-3)
            assert [top.token_id for top in entry.top] == line.topk(2).indices.tolist()
    for index, entry in enumerate(first.prompt.logprobs[1:], 1):
        assert entry.token.token_id == PROMPT[index]
        assert entry.token.logprob == pytest.approx(float(reference[index - 1, PROMPT[index]]), abs=1e-3)
