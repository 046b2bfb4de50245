"""The benchmarks finish and cannot block; their results are not tested."""

import json
from pathlib import Path

import pytest

from measure.frontend.child import Child, ChildError
from measure.frontend.frontend import BenchOptions, run_bench
from measure.frontend.tracing import run_bench as run_tracing


@pytest.mark.every(3)
def test_the_benchmark_measures_every_scenario(tmp_path: Path) -> None:
    """One short round gives figures for each scenario, the ratios, and samples of the memory."""
    file = tmp_path / "frontend.json"

    result = run_bench(BenchOptions(json=file, rounds=1, seconds=0.3, stalled_seconds=0.5, stalled_streams=4))

    assert json.loads(file.read_text()) == result
    assert [row["scenario"] for row in result["results"]] == ["bare", "prompt", "lagging"]
    for row in result["results"]:
        figures = {name: value for name, value in row.items() if name != "scenario"}
        assert set(figures) == {
            "messages_per_s", "tokens_per_s", "client_cpu_share", "server_cpu_us_per_message",
        }  # fmt: skip
        assert all(figure["min"] > 0 for figure in figures.values())
    assert set(result["ratios"]) == {
        "prompt_messages_per_s_to_bare", "prompt_messages_per_cpu_s_to_bare", "prompt_tokens_per_message",
        "lagging_tokens_per_s_to_bare",
    }  # fmt: skip
    assert all(ratio["median"] > 0 for ratio in result["ratios"].values())
    assert result["stalled"]["resident_mib"]


def test_a_child_that_fails_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    """A child's exit is detected at once, and the error contains its last output."""
    with (
        Child(tmp_path, "measure.frontend.echo_core", "--vocab-size=none") as child,
        pytest.raises(ChildError) as error,
    ):
        child.line()

    assert "measure.frontend.echo_core ended with status 2" in str(error.value)
    assert "--vocab-size: invalid int value" in str(error.value)


def test_a_child_that_says_nothing_is_an_error(tmp_path: Path) -> None:
    """The wait for a line has a limit, and the silent child is ended."""
    address = f"--address=ipc://{tmp_path}/core"
    with Child(tmp_path, "measure.frontend.echo_core", address, "--vocab-size=9") as child:
        assert child.line().startswith("listening")
        with pytest.raises(ChildError, match=r"measure\.frontend\.echo_core printed nothing for 0\.01 s"):
            child.line(0.01)
    with pytest.raises(ChildError, match="ended with status 0"):
        child.line()


@pytest.mark.release  # starts three services
def test_the_cost_of_traces_is_measured_in_turn() -> None:
    """One short round gives figures for each share of sampled requests, beside those without traces."""
    result = run_tracing(rounds=1, seconds=0.5, streams=4)

    assert [row["sampled"] for row in result["results"]] == [0.0, 0.01, 1.0]
    for row in result["results"]:
        assert row["cpu_us_per_token"]["median"] > 0
        assert row["tokens_per_s"]["median"] > 0
        assert row["cpu_to_off"]["median"] > 0
    assert result["results"][0]["cpu_to_off"]["median"] == 1
