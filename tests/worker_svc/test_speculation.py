"""Speculation in the engine: the output is that without it, whatever is proposed and whatever happens to the rows."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checks.driver import GREEDY, Driver, collect, launch, make_engine
from kernels.native.serving import native
from measure.testbed.checkpoints import VOCAB_SIZE, make_checkpoint
from protos.quire.plan.v1 import plan_pb2
from services.streams.logprobs import read_scores
from shared.columns import to_column
from tests.worker_svc.fake_accelerator import FakeAccelerator
from worker_svc.execution.engine import Engine
from worker_svc.interface.arrays import IntArray
from worker_svc.interface.plan import Plan
from worker_svc.rows.table import RowTable

DEMO = Path("shared/demo_model")
EOS = 2
COUNT = 40
MOST = 5
PATTERN = r"[ab]{6}-\d{24}\."
REGEX = plan_pb2.Grammar(regex=PATTERN).SerializeToString()

SAMPLINGS = {
    "greedy": GREEDY,
    "random": plan_pb2.SamplingParams(temperature=1.0, top_p=0.9, seed=1 << 60, choice=1),
    "truncated": plan_pb2.SamplingParams(temperature=0.7, top_k=20, top_p=1, min_p=0.01, seed=7),
    "typical": plan_pb2.SamplingParams(temperature=0.9, top_p=1, typical_p=0.8, seed=3),
    "penalties": plan_pb2.SamplingParams(
        temperature=0.8, top_p=1, seed=5, repetition_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.3
    ),
    "words": plan_pb2.SamplingParams(
        temperature=0.5, top_p=1, seed=9, bad_words=[to_column([22, 29]), to_column([351, 226, 22])],
        bias_token_ids=to_column([22, 351]), bias_values=np.array([4.0, 4.0], "<f4").tobytes(),
    ),
    "min_tokens": plan_pb2.SamplingParams(
        temperature=1.0, top_p=1, seed=11, min_tokens=COUNT // 2, stop_token_ids=to_column([22, 31, 226, 204])
    ),
    "logprobs": plan_pb2.SamplingParams(temperature=0.6, top_p=1, seed=13, logprobs=3, prompt_logprobs=1),
    "grammar": plan_pb2.SamplingParams(temperature=1.5, top_p=1, seed=15, stop_token_ids=to_column([EOS])),
    "grammar and penalties": plan_pb2.SamplingParams(
        temperature=1.0, top_p=1, seed=17, stop_token_ids=to_column([EOS]), frequency_penalty=1.0
    ),
}  # fmt: skip
"""Requests with different options, by name."""


class Guesser:
    """A proposer that knows the answers, and gives wrong tokens among the right ones."""

    def __init__(self, table: RowTable, answers: Sequence[list[int]], seed: int = 0, wrong: float = 0.2) -> None:
        self._table = table
        self._answers = answers
        self._rng = np.random.default_rng(seed)
        self._wrong = wrong

    def propose(self, rows: IntArray, most: IntArray) -> list[list[int]]:
        """Some of the next tokens of each row."""
        return [self._guess(row, count) for row, count in zip(rows.tolist(), most.tolist(), strict=True)]

    def prefill(self, rows: IntArray, lengths: IntArray) -> None:
        """Nothing is computed."""

    def follow(self, plan: Plan) -> None:
        """Nothing is kept."""

    def clear(self) -> None:
        """Nothing is kept."""

    def _guess(self, row: int, count: int) -> list[int]:
        known = list(self._table.known_tokens(row))
        answer = next(each for each in self._answers if each[: len(known)] == known)
        tokens = answer[len(known) : len(known) + int(self._rng.integers(0, count + 1))]
        return [
            int(self._rng.integers(0, VOCAB_SIZE)) if self._rng.random() < self._wrong else token for token in tokens
        ]


def guess(engine: Engine, answers: Sequence[list[int]], **options: Any) -> None:
    """Makes the engine propose with a `Guesser`."""
    engine._proposer = Guesser(engine._rows, answers, **options)


@pytest.fixture(scope="module")
def engine() -> Engine:
    """Return an engine that speculates, over the model with a tokenizer."""
    return make_engine(
        DEMO, dtype="float32", max_num_seqs=6, block_size=8, speculation="ngram", speculative_tokens=MOST
    )


def prompt_of(name: str) -> list[int]:
    """The prompt of a request, different for each name."""
    return [5, 6, 7, 8, len(name), 5, 6, 7, 8, ord(name[0])]


def admit(driver: Driver, name: str, known: list[int] | None = None) -> int:
    """Admits the request of this name, again if it is known already."""
    prompt = prompt_of(name)
    row = driver.admit(known or prompt, sampling=SAMPLINGS[name])
    driver.plan.admissions[-1].num_prompt_tokens = len(prompt)
    if name.startswith("grammar"):
        driver.plan.admissions[-1].grammar = REGEX
    return row


def own_scores(driver: Driver, row: int) -> list[float]:
    """Log-probabilities of the tokens that the row sampled in the last step."""
    found = [scores for scores in driver.last_result.scores if scores.row == row and not scores.prompt_index]
    return [scored.logprob for scores in found for scored in read_scores(scores.scores)]


@pytest.fixture(scope="module")
def reference(engine: Engine) -> dict[str, tuple[list[int], list[float]]]:
    """The tokens of each request without speculation, and the log-probabilities of its output."""
    answers = {}
    for name in SAMPLINGS:
        engine.reset()
        driver = Driver(engine)
        row = admit(driver, name)
        driver.chunk(row, driver.rows[row].num_known)
        scores: list[float] = []
        while len(driver.rows[row].tokens) < driver.rows[row].num_known + COUNT + MOST:
            driver.step()
            scores += own_scores(driver, row)
        answers[name] = (driver.rows[row].tokens, scores)
    return answers


@pytest.mark.parametrize("seed", range(4))
def test_output_is_that_without_speculation(
    engine: Engine, reference: dict[str, tuple[list[int], list[float]]], seed: int
) -> None:
    """Requests with all options give their tokens and log-probabilities, with right and wrong drafts beside others.

    Rows are held, taken out and admitted again, and their limits change; so do the rows beside them.
    """
    engine.reset()
    guess(engine, [tokens for tokens, _ in reference.values()], seed=seed)
    driver = Driver(engine, seed=seed)
    rng = driver.rng
    waiting: list[tuple[str, list[int] | None]] = [(str(name), None) for name in rng.permutation(list(SAMPLINGS))]
    name_of: dict[int, str] = {}
    scores: dict[str, list[float]] = {name: [] for name in SAMPLINGS}
    recomputed = 0
    while waiting or name_of:
        while waiting and driver.free_rows():
            name, known = waiting.pop(0)
            name_of[admit(driver, name, known)] = name
        for row in list(name_of):
            state = driver.rows[row]
            if state.in_prefill:
                driver.chunk(row, int(rng.integers(1, state.num_known - state.computed + 1)))
            elif state.held or rng.random() < 0.05:
                (driver.release if state.held else driver.hold)(row)
            if rng.random() < (0.1 if state.draft_limit else 0.5):
                driver.speculate(row, int(rng.integers(0, MOST + 1)))
        driver.step()
        for row, name in list(name_of.items()):
            scores[name] += own_scores(driver, row)
            expected, _ = reference[name]
            tokens = driver.rows[row].tokens
            end = len(prompt_of(name)) + COUNT
            assert tokens[:end] == expected[: min(len(tokens), end)], name
            if len(tokens) >= end:
                driver.leave(row)
                del name_of[row]
            elif rng.random() < 0.02 and not driver.rows[row].in_prefill:
                waiting.append((name, driver.leave(row)))
                del name_of[row]
                recomputed += 1

    for name, (_, expected_scores) in reference.items():
        assert scores[name][:COUNT] == pytest.approx(expected_scores[: min(COUNT, len(scores[name]))], abs=1e-4)
    assert len(scores["logprobs"]) >= COUNT
    assert recomputed
    assert 0.2 < driver.num_accepted / driver.num_drafted < 0.9


@pytest.mark.parametrize(("quantization", "kv"), [("none", "auto"), ("int8", "int8"), ("int4", "auto")])
def test_the_native_kernels_give_the_same_bits(quantization: str, kv: str) -> None:
    """With the CPU's kernels each token has the log-probability, to the last bit, that it has without drafts."""
    if native() is None:
        pytest.skip("the native kernels are not built")
    engine = make_engine(
        DEMO, dtype="bfloat16", max_num_seqs=2, speculation="ngram", quantization=quantization, kv_cache_dtype=kv
    )
    outputs: list[tuple[list[int], list[float]]] = []
    for limit in (0, 8):
        engine.reset()
        if outputs:
            guess(engine, [outputs[0][0]])
        driver = Driver(engine)
        row = driver.admit([5, 6, 7] * 10, sampling=SAMPLINGS["logprobs"])
        driver.chunk(row, 30)
        driver.speculate(row, limit)
        scores: list[float] = []
        while len(driver.rows[row].tokens) < 30 + 120:
            driver.step()
            scores += own_scores(driver, row)
        outputs.append((driver.rows[row].tokens[:150], scores[:120]))

    assert outputs[0] == outputs[1]
    assert driver.num_accepted > 50


def test_grammars_hold_with_wrong_drafts(engine: Engine, reference: dict[str, tuple[list[int], list[float]]]) -> None:
    """The reference of the test above is a match of the grammar, and then the end of sequence."""
    tokenizer = pytest.importorskip("tokenizers").Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    output = reference["grammar"][0][len(prompt_of("grammar")) :]

    assert re.fullmatch(PATTERN, tokenizer.decode(output[: output.index(EOS)]))


@pytest.mark.parametrize("length", [48, 61])
def test_drafts_end_with_the_longest_sequence(engine: Engine, length: int) -> None:
    """A row with right drafts reaches `max_model_len` exactly, with the tokens that it has without drafts."""
    tight = make_engine(
        DEMO, dtype="float32", max_num_seqs=2, block_size=16, max_model_len=64, speculation="ngram",
        speculative_tokens=8,
    )  # fmt: skip
    answers: list[list[int]] = []
    for limit in (0, 8):
        tight.reset()
        driver = Driver(tight)
        if answers:
            guess(tight, [[*answers[0], 0, 0, 0, 0, 0, 0, 0, 0, 0]], wrong=0.0)
        row = driver.admit([3] * length)
        driver.speculate(row, limit)
        driver.chunk(row, length)
        while len(driver.rows[row].tokens) < 64:
            driver.step()
        answers.append(driver.rows[row].tokens)

    assert answers[0] == answers[1]
    assert driver.num_accepted > 0


def test_a_step_has_no_more_tokens_than_its_limit(tmp_path: Path) -> None:
    """Drafts take what the decode rows and the chunks of the step leave."""
    folder = make_checkpoint("LlamaForCausalLM", tmp_path)
    engine = make_engine(folder, max_num_seqs=4, max_num_batched_tokens=12, speculation="ngram", speculative_tokens=8)
    answer = [7, 8, 9, *Driver(engine).generate([7, 8, 9], 60)]
    engine.reset()
    guess(engine, [answer], wrong=0.0)
    driver = Driver(engine)
    for _ in range(3):
        row = driver.admit([7, 8, 9])
        driver.chunk(row, 3)
        driver.speculate(row, 8)
    driver.step()
    late = driver.admit([4] * 30)
    for chunk in (9, 8, 1, 0):
        if chunk:
            driver.chunk(late, chunk)
        driver.step()
        assert driver.last_result.timings.num_tokens <= 12
        assert sum(from_counts(driver)) <= 9 - chunk
    assert driver.num_drafted > 0


def from_counts(driver: Driver) -> list[int]:
    """Drafts of each row in the last step."""
    return [int(count) for count in np.frombuffer(driver.last_result.draft_counts, "<i4")]


def test_a_row_that_can_sample_nothing_fails_where_it_does_without_drafts(engine: Engine) -> None:
    """A failure at a draft is found when the row's base token gets there; the tokens before it are delivered."""
    sampling = plan_pb2.SamplingParams(
        temperature=1.0, top_p=1, seed=3, min_tokens=100, stop_token_ids=to_column([EOS])
    )
    outputs: list[list[int]] = []
    for limit in (0, MOST):
        engine.reset()
        if outputs:
            guess(engine, [[*outputs[0], 9, 9, 9, 9, 9, 9]], wrong=0.0)
        driver = Driver(engine)
        row = driver.admit([5, 6, 7], sampling=sampling)
        driver.plan.admissions[0].grammar = plan_pb2.Grammar(regex="[ab]{16}").SerializeToString()
        driver.speculate(row, limit)
        driver.chunk(row, 3)
        while not driver.last_result.failures:
            driver.step()
        (failure,) = driver.last_result.failures
        assert (failure.row, failure.kind) == (row, plan_pb2.ROW_FAILURE_KIND_NO_TOKEN_ALLOWED)
        assert not driver.last_result.rows
        outputs.append(driver.rows[row].tokens)

    assert outputs[0] == outputs[1]
    assert driver.num_accepted > 0


def test_logits_that_are_not_finite_behind_an_accepted_draft_fail_only_their_row(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens before them are delivered, and the other row continues."""
    engine.reset()
    driver = Driver(engine)
    prompts = [[5, 6, 7, 8], [9, 8, 7]]
    answers = [prompt + driver.generate(prompt, 30) for prompt in prompts]
    engine.reset()
    driver = Driver(engine)
    guess(engine, answers, wrong=0.0)
    rows = [driver.admit(prompt) for prompt in prompts]
    for row, prompt in zip(rows, prompts, strict=True):
        driver.chunk(row, len(prompt))
        driver.speculate(row, MOST)
    forward = engine._model.forward

    def broken(input_ids: torch.Tensor, positions: torch.Tensor, *rest: Any) -> torch.Tensor:
        logits: torch.Tensor = forward(input_ids, positions, *rest)
        kept = positions if rest[-1] is None else positions[rest[-1]]
        if len(engine._rows.decode_rows()) == 2:
            logits[(kept == 15).nonzero().flatten()[:1]] = torch.nan
        return logits

    monkeypatch.setattr(engine._model, "forward", broken)
    while len(driver.rows[rows[1]].tokens) < 30:
        driver.step()
        for failure in driver.last_result.failures:
            assert (failure.row, failure.kind) == (rows[0], plan_pb2.ROW_FAILURE_KIND_NOT_FINITE)

    assert driver.rows[rows[0]].tokens == answers[0][:16]
    assert driver.rows[rows[1]].tokens[:30] == answers[1][:30]


@pytest.mark.parametrize("chunks", [False, True])
def test_two_plans_in_flight_with_drafts_and_graphs(tmp_path: Path, chunks: bool) -> None:
    """On an accelerator a step waits for the tokens of a step with drafts before it; other steps keep their graphs."""
    folder = make_checkpoint("LlamaForCausalLM", tmp_path)
    sampled = plan_pb2.SamplingParams(temperature=1.0, top_p=0.9, seed=1 << 60, frequency_penalty=0.5)
    requests = [([1, 2, 3], GREEDY), ([4] * 20, sampled), ([1, 2] * 9, GREEDY)]
    plain = Driver(make_engine(folder, max_num_seqs=4))
    answers = [prompt + plain.generate(prompt, 80, sampling=sampling) for prompt, sampling in requests]
    device = FakeAccelerator()
    engine = make_engine(folder, accelerator=device, max_num_seqs=4, speculation="ngram", speculative_tokens=MOST)
    guess(engine, answers)
    driver = Driver(engine)
    for prompt, sampling in requests:
        driver.chunk(driver.admit(prompt, sampling=sampling), len(prompt))
    launch(engine, driver.finish_plan())
    drafted = []
    for step in range(40):
        if step % 10 == 5:
            for row in range(3):
                driver.speculate(row, MOST if step % 20 == 5 else 0)
        if step == 8:
            driver.hold(1)
        if step == 22:
            driver.release(1)
        if chunks and step == 6:
            driver.admit([9] * 30)
        if chunks and 6 <= step < 16:
            driver.chunk(3, 3)
        device.log.clear()
        launch(engine, driver.finish_plan())
        driver.take(collect(engine))
        drafted.append((len(driver.last_result.draft_counts) > 0, [line for line in device.log if "replay" in line]))
    driver.take(collect(engine))

    for row, answer in enumerate(answers):
        tokens = driver.rows[row].tokens
        assert tokens[: len(answer)] == answer[: len(tokens)]
        assert len(tokens) > len(requests[row][0]) + 30
    assert driver.num_accepted > 10
    assert any(is_drafted for is_drafted, _ in drafted)
    assert sum(bool(replays) for _, replays in drafted) > 10


class Constant:
    """A proposer that always proposes the same tokens."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def propose(self, rows: IntArray, most: IntArray) -> list[list[int]]:
        """The same tokens for each row."""
        return [self._tokens[:count] for count in most.tolist()]

    def prefill(self, rows: IntArray, lengths: IntArray) -> None:
        """Nothing is computed."""

    def follow(self, plan: Plan) -> None:
        """Nothing is kept."""

    def clear(self) -> None:
        """Nothing is kept."""


def test_sampled_output_has_the_distribution_of_output_without_speculation(tmp_path: Path) -> None:
    """A chi-square test finds no difference between outputs with drafts and outputs of other seeds without.

    It compares how often each token is the second, and how often each is the third.
    """
    folder = make_checkpoint("LlamaForCausalLM", tmp_path, std=0.1)
    engine = make_engine(folder, dtype="float32", max_num_seqs=64, speculation="ngram", speculative_tokens=2)
    likely = np.bincount([tokens[1] for tokens in samples(engine, 256, 0, 0)]).argmax()
    engine._proposer = Constant([int(likely), int(likely)])
    num_samples = 4096
    plain, drafted = (np.array(samples(engine, num_samples, limit, 10_000 * (limit + 1))) for limit in (0, 2))

    for place in (1, 2):
        counts = np.stack([np.bincount(tokens[:, place], minlength=VOCAB_SIZE) for tokens in (plain, drafted)])
        often = counts.sum(0) >= 20
        table = np.concatenate((counts[:, often], counts[:, ~often].sum(1, keepdims=True)), axis=1)
        expected = table.sum(0) / 2
        statistic = float(((table - expected) ** 2 / expected).sum())
        degrees = table.shape[1] - 1
        assert degrees >= 10
        # Wilson-Hilferty approximation of the quantile at 1 - 1e-4.
        limit = degrees * (1 - 2 / (9 * degrees) + 3.72 * (2 / (9 * degrees)) ** 0.5) ** 3
        assert statistic < limit, f"place {place}: {statistic:.1f} with {degrees} degrees of freedom"


def samples(engine: Engine, count: int, limit: int, first_seed: int) -> list[list[int]]:
    """Three sampled tokens of each of `count` requests with the same prompt and other seeds."""
    found = []
    drafted = 0
    for first in range(first_seed, first_seed + count, 64):
        engine.reset()
        driver = Driver(engine)
        for seed in range(first, first + 64):
            row = driver.admit([5, 6, 7], sampling=plan_pb2.SamplingParams(temperature=1.0, top_p=1, seed=seed))
            driver.chunk(row, 3)
            driver.speculate(row, limit)
        while min(len(row.tokens) for row in driver.rows.values()) < 6:
            driver.step()
        found += [row.tokens[3:6] for row in driver.rows.values()]
        drafted += driver.num_accepted
    assert bool(drafted) == bool(limit)
    return found
