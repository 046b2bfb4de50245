"""Features in pairs through real processes: every value of each with every value of each other, in few services.

The features are speculation, quantised weights, quantised KV, both prefix caches, preemption by recomputation and by
swapping, tensor parallelism, and grammars. The tokens are those of one engine with the same weights and KV types and
nothing else: teacher-forced, with ties of rounding to eight bits. How many drafts there are depends on measured times.
Tensor parallelism beside quantised weights is left out, because each rank has scales of its own; so is a draft model
beside it, which is refused.
"""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernels.native.serving import native
from protos.quire.plan.v1 import plan_pb2
from quire import Client
from services.streams.logprobs import read_scores
from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.e2e.harness import serve
from tests.e2e.load import draw_prompts, generate_all
from tests.worker_svc.driver import Driver, make_engine
from worker_svc.execution.engine import Engine

pytestmark = pytest.mark.release

FEATURES = {
    "speculation": ("ngram", "draft", "off"),
    "quantization": ("none", "int8", "int4"),
    "kv_cache_dtype": ("auto", "int8"),
    "prefix_cache": ("hash", "radix"),
    "preemption": ("recompute", "swap"),
    "ranks": ("1", "2"),
    "grammar": ("none", "regex"),
}
COUNT = 40
PATTERN = r"[ab]{8}-\d{8}"
ROUNDED_TIE = 0.1
"""KV and activations in eight bits may be rounded either way, which moves logits."""
Case = dict[str, str]


def possible(case: Case) -> bool:
    """Whether a worker can serve this combination with tokens that one engine has too."""
    return case["ranks"] == "1" or (case["quantization"] == "none" and case["speculation"] != "draft")


def pairs(case: Case) -> set[tuple[tuple[str, str], tuple[str, str]]]:
    """All pairs of values in a case."""
    return set(itertools.combinations(case.items(), 2))


def covering() -> Iterator[Case]:
    """Cases that together have every possible pair, chosen greedily."""
    names = list(FEATURES)
    cases = [dict(zip(names, values, strict=True)) for values in itertools.product(*FEATURES.values())]
    cases = [case for case in cases if possible(case)]
    missing = set().union(*map(pairs, cases))
    while missing:
        best = max(cases, key=lambda case: len(pairs(case) & missing))
        missing -= pairs(best)
        yield best


@pytest.mark.parametrize("case", list(covering()), ids=lambda case: "-".join(case.values()))
def test_tokens_are_those_of_one_engine(case: Case, tmp_path: Path) -> None:
    """Greedy tokens under memory pressure are the engine's, and texts with a grammar match it."""
    if native() is None:
        pytest.skip("the native kernels are not built")
    checkpoint = make_checkpoint("LlamaForCausalLM", tmp_path / "model")
    common, *tails = draw_prompts((30, 1, 3, 9, 17, 28, 5, 12, 20, 2), VOCAB_SIZE, seed=3)
    prompts = [common[: 30 - 2 * index] + tail * 2 for index, tail in enumerate(tails)]
    flags = [f"--{name.replace('_', '-')}={case[name]}" for name in list(FEATURES)[:4]]
    if case["speculation"] == "draft":
        sibling = make_checkpoint("LlamaForCausalLM", tmp_path / "draft", num_hidden_layers=1)
        flags.append(f"--draft-model={sibling}")
    with serve(
        checkpoint,
        *flags,
        "--dtype=float32",
        "--num-threads=1",
        "--block-size=8",
        "--max-num-batched-tokens=64",
        "--max-tokens-in-paged-kv-cache=168",
        f"--swap-space={'1MiB' if case['preemption'] == 'swap' else '0'}",
        f"--tensor-parallel-size={case['ranks']}",
    ) as served:
        answers = generate_all(served.grpc, prompts, [COUNT] * len(prompts))
        if case["grammar"] == "regex":
            with Client(served.grpc) as client:
                for seed in range(3):
                    text = client.generate("ab", regex=PATTERN, max_tokens=60, temperature=1.0, seed=seed).result().text
                    assert re.fullmatch(PATTERN, text)
        assert served.metric("quire_preemptions_total") > 0
        assert served.metric("quire_kv_blocks", state="held") == 0
    engine = make_engine(
        checkpoint,
        dtype="float32",
        max_num_seqs=1,
        quantization=case["quantization"],
        kv_cache_dtype=case["kv_cache_dtype"],
    )
    near_ties = sum(judge(engine, answer.prompt, answer.tokens) for answer in answers)
    assert near_ties * 50 < COUNT * len(prompts)


def judge(engine: Engine, prompt: list[int], answer: list[int]) -> int:
    """Asserts that each token is the engine's, given those before it, or nearly as likely; returns how many are not."""
    assert len(answer) == COUNT
    known, near_ties = prompt, 0
    sampling = plan_pb2.SamplingParams(logprobs=2)
    while rest := (prompt + answer)[len(known) :]:
        engine.reset()
        driver = Driver(engine)
        row = driver.admit(known, sampling=sampling)
        driver.chunk(row, len(known))
        for token in rest:
            driver.step()
            (scores,) = driver.last_result.scores
            (scored,) = read_scores(scores.scores)
            if driver.rows[row].tokens[-1] != token:
                logprob = dict(scored.top).get(token)
                assert logprob is not None
                assert logprob > scored.logprob - ROUNDED_TIE
                near_ties += 1
                known = [*driver.rows[row].tokens[:-1], token]
                break
        else:
            break
    return near_ties
