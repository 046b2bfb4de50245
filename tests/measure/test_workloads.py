"""Workloads have the lengths, prefixes and turns that they promise, each session a function of seed and number."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from measure.load.traces import PUBLISHED, Recorded, Trace, read_trace
from measure.load.workloads import (
    UNITS,
    Drawn,
    Lengths,
    Mixed,
    Session,
    TraitMix,
    Turn,
    Workload,
    read_prompts,
)
from shared.config import ConfigError

FIXED = Lengths.fixed


def _turns(workload: Workload, count: int) -> list[Turn]:
    sessions = [workload.session(index) for index in range(count)]
    return [turn for session in sessions if session for turn in session.turns]


@pytest.mark.parametrize(
    ("text", "mean", "low", "high"),
    [("128", 128, 128, 128), ("64-512", 288, 64, 512), ("lognormal:300:1.5", 300, 1, 1e9)],
)
def test_lengths_have_their_mean_and_bounds(text: str, mean: float, low: int, high: float) -> None:
    """The mean of 20,000 draws is within 5 %, every draw within the bounds."""
    rng = np.random.default_rng(1)
    drawn = [Lengths.parse(text).draw(rng) for _ in range(20_000)]

    assert np.mean(drawn) == pytest.approx(mean, rel=0.05)
    assert low <= min(drawn)
    assert max(drawn) <= high


@pytest.mark.parametrize("text", ["", "0", "9-3", "x", "lognormal:5", "lognormal:5:0", "lognormal:0:1", "-4"])
def test_an_invalid_distribution_is_refused(text: str) -> None:
    """It raises ValueError, which the command line reports."""
    with pytest.raises(ValueError, match=r".*"):
        Lengths.parse(text)


@given(index=st.integers(0, 10**9), seed=st.integers(0, 2**31))
def test_a_session_is_a_function_of_seed_and_number(index: int, seed: int) -> None:
    """No other session needs to be made before it; neighbours and other seeds differ."""
    workload = Drawn(Lengths(8, 64), Lengths(1, 9), seed, turns=Lengths(1, 3), pause_s=1.0)

    assert workload.session(index) == workload.session(index)
    assert workload.session(index) != workload.session(index + 1)
    assert workload.session(index) != Drawn(Lengths(8, 64), Lengths(1, 9), seed + 1, Lengths(1, 3)).session(index)
    assert all(0 <= unit < UNITS for turn in workload.session(index).turns for unit in turn.prompt)


def test_shared_prefixes_are_shared_and_the_rest_is_not() -> None:
    """Each prompt is one of the prefixes plus its own part of the input length; prefixes are used about equally."""
    turns = _turns(Drawn(FIXED(20), FIXED(1), prefixes=3, prefix_tokens=50), 300)
    prefixes = [turn.prompt[:50] for turn in turns]

    assert {len(turn.prompt) for turn in turns} == {70}
    assert len(set(prefixes)) == 3
    assert all(60 <= prefixes.count(each) <= 140 for each in set(prefixes))
    assert len({turn.prompt[50:] for turn in turns}) == 300


def test_a_session_has_turns_with_pauses_between_them() -> None:
    """Pauses are before the second turn and later ones, with the given mean; only the first turn has the prefix."""
    workload = Drawn(FIXED(4), FIXED(2), turns=Lengths(1, 5), pause_s=3.0, prefix_tokens=6)
    sessions = [workload.session(index) for index in range(2000)]
    pauses = [turn.pause_s for session in sessions for turn in session.turns[1:]]

    assert {len(session.turns) for session in sessions} == {1, 2, 3, 4, 5}
    assert {session.turns[0].pause_s for session in sessions} == {0.0}
    assert np.mean(pauses) == pytest.approx(3.0, rel=0.05)
    assert {len(turn.prompt) for session in sessions for turn in session.turns[1:]} == {4}


def test_a_mix_has_its_shares() -> None:
    """A tenth of the sessions are long ones."""
    turns = _turns(Mixed(Drawn(FIXED(8), FIXED(4)), Drawn(FIXED(900), FIXED(4)), 0.1), 3000)

    assert sum(len(turn.prompt) == 900 for turn in turns) / 3000 == pytest.approx(0.1, abs=0.02)


def test_traits_have_their_weights() -> None:
    """Tenants, priorities and cancellations occur as often as asked for; without a mix there are none."""
    mix = TraitMix({"a": 3, "b": 1}, {0: 9, 5: 1}, cancel_ratio=0.2, seed=4)
    traits = [mix.draw(index) for index in range(5000)]

    assert traits == [mix.draw(index) for index in range(5000)]
    assert sum(each.tenant == "a" for each in traits) / 5000 == pytest.approx(0.75, abs=0.03)
    assert sum(each.priority == 5 for each in traits) / 5000 == pytest.approx(0.1, abs=0.02)
    assert sum(each.cancel_at is not None for each in traits) / 5000 == pytest.approx(0.2, abs=0.02)
    assert {(each.tenant, each.priority, each.cancel_at) for each in map(TraitMix().draw, range(50))} == {("", 0, None)}


@pytest.mark.parametrize(
    ("name", "inputs", "outputs", "cv"),
    [
        ("azure-conversation", 1155, 211, 1.09),
        ("azure-code", 2048, 28, 13.2),
        ("mooncake-conversation", 12_035, 343, 1.0),
    ],
)
def test_generators_have_the_published_statistics(name: str, inputs: float, outputs: float, cv: float) -> None:
    """Mean lengths within 7 % and the CV of the arrivals' gaps."""
    published = PUBLISHED[name]
    turns = _turns(published.workload(seed=2), 3000 if inputs < 10_000 else 1000)

    assert np.mean([len(turn.prompt) for turn in turns]) == pytest.approx(inputs, rel=0.07)
    assert np.mean([turn.output_tokens for turn in turns]) == pytest.approx(outputs, rel=0.07)
    assert published.arrivals(3.0).burstiness == pytest.approx(1 / cv**2)
    assert published.arrivals(3.0).rate == 3.0


def test_coding_agents_have_the_published_statistics() -> None:
    """Lengths, pauses and numbers of turns have the medians and means; all sessions share the system prompt."""
    agents = PUBLISHED["coding-agents"].workload(seed=3)
    sessions = [agents.session(index) for index in range(300)]
    turns = [turn for session in sessions if session for turn in session.turns[1:]]

    assert np.median([len(session.turns) for session in sessions if session]) == pytest.approx(16, rel=0.2)
    assert np.median([len(turn.prompt) for turn in turns]) == pytest.approx(710, rel=0.07)
    assert np.mean([len(turn.prompt) for turn in turns]) == pytest.approx(1400, rel=0.07)
    assert np.mean([turn.output_tokens for turn in turns]) == pytest.approx(523, rel=0.07)
    assert max(turn.pause_s for turn in turns) == 60.0
    assert np.mean([turn.pause_s > 20 for turn in turns]) == pytest.approx(0.14, abs=0.03)
    assert len({session.turns[0].prompt[:12_000] for session in sessions if session}) == 1


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_published_lengths_are_scaled(name: str) -> None:
    """A tenth of the lengths suits a model with a tenth of the context; the numbers of turns stay."""
    sizes = [
        [len(turn.prompt) for turn in _turns(PUBLISHED[name].workload(seed=2, scale=scale), 100)] for scale in (1, 0.1)
    ]

    assert len(sizes[1]) == len(sizes[0])
    assert np.mean(sizes[1]) == pytest.approx(np.mean(sizes[0]) / 10, rel=0.01)


def _ideal_hit_share(prompts: Iterable[Sequence[int]], block_tokens: int = 16) -> float:
    """Return the share of prompt tokens that a prefix cache without limit would have found, in whole blocks."""
    known: set[int] = set()
    total = found = 0
    for prompt in prompts:
        total += len(prompt)
        key = 0
        for end in range(block_tokens, len(prompt) + 1, block_tokens):
            key = hash((key, *prompt[end - block_tokens : end]))
            if key in known:
                found += block_tokens
            known.add(key)
    return found / total


def test_the_mooncake_generator_has_the_published_ideal_hit_share() -> None:
    """An unlimited prefix cache would find 36.6 % of the prompt tokens, within two points."""
    turns = _turns(PUBLISHED["mooncake-conversation"].workload(seed=5), 400)

    assert _ideal_hit_share(turn.prompt for turn in turns) == pytest.approx(0.366, abs=0.02)


@pytest.mark.parametrize(
    "stamps",
    [
        ("2023-11-16 18:15:46.6805900", "2023-11-16 18:15:47.6805900"),
        ("2024-05-10 00:00:00.009930+00:00", "2024-05-10 00:00:01.009930+00:00"),
    ],
    ids=["2023", "2024"],
)
def test_azure_traces_are_read(tmp_path: Path, stamps: tuple[str, str]) -> None:
    """Both years' files: the arrivals, and prompts of the recorded lengths."""
    path = tmp_path / "trace.csv"
    path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{stamps[1]},7,3\n{stamps[0]},374,44\n")
    trace = read_trace(path)

    assert list(trace.arrivals(speed=2.0).times(0)) == pytest.approx([0.0, 0.5])
    assert [(len(turn.prompt), turn.output_tokens) for turn in _turns(trace, 3)] == [(374, 44), (7, 3)]


def test_mooncake_traces_are_read_with_their_shared_blocks(tmp_path: Path) -> None:
    """Prompts with equal hashes share these blocks and nothing else."""
    rows = [
        {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]},
        {"timestamp": 3000, "input_length": 1500, "output_length": 6, "hash_ids": [1, 2, 4]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trace = read_trace(path)
    first, second = _turns(trace, 2)

    assert list(trace.arrivals().times(0)) == [0.0, 3.0]
    assert (len(first.prompt), len(second.prompt)) == (1100, 1500)
    assert first.prompt[:1024] == second.prompt[:1024]
    assert first.prompt[1024:] != second.prompt[1024:1100]


def test_a_prompt_longer_than_its_blocks_is_filled() -> None:
    """A prompt has its recorded length, even if it has too many or too few block hashes."""
    assert len(_turns(Trace((Recorded(0.0, 700, 1, (9,)),)), 1)[0].prompt) == 700


@pytest.mark.parametrize(
    ("content", "problem"),
    [("", "no request"), ("a,b\n1,2\n", "line 2: not a row of an Azure"), ('{"timestamp": 1}\n', "line 1: not a line")],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, content: str, problem: str) -> None:
    """The message names the line and the expected fields."""
    path = tmp_path / "trace"
    path.write_text(content)
    with pytest.raises(ConfigError, match=problem):
        read_trace(path)


def test_prompts_are_read_from_json_lines(tmp_path: Path) -> None:
    """Texts and token ids, with a limit of their own or the default."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Once", "max_tokens": 3}\n\n{"prompt_token_ids": [5, 6]}\n')
    workload = read_prompts(path, 64)

    assert workload.session(0) == Session((Turn((), 3, text="Once"),))
    assert workload.session(1) == Session((Turn((5, 6), 64),))
    assert workload.session(2) is None


@pytest.mark.parametrize(
    "line", ['{"prompt": ', "[]", "{}", '{"prompt": "a", "prompt_token_ids": [1]}', '{"prompt_token_ids": ["x"]}']
)
def test_an_invalid_prompt_names_its_line(tmp_path: Path, line: str) -> None:
    """The message has the file, the line and what to write."""
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "Once"}}\n{line}\n')
    with pytest.raises(ConfigError, match=r"prompts.jsonl, line 2: "):
        read_prompts(path, 64)
