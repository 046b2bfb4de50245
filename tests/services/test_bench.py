"""The front-end benchmark runs through; what it measures is nobody's promise here."""

import json
from pathlib import Path

from services.bench_frontend import BenchOptions, run_bench


def test_the_benchmark_measures_every_scenario(tmp_path: Path) -> None:
    """One short round gives a rate for each scenario, the ratios, and samples of the memory."""
    file = tmp_path / "frontend.json"

    result = run_bench(BenchOptions(json=file, rounds=1, seconds=0.3, stalled_seconds=0.5, stalled_streams=4))

    assert json.loads(file.read_text()) == result
    assert [row["scenario"] for row in result["results"]] == ["bare", "prompt", "lagging"]
    assert all(row["messages_per_s"]["median"] > 0 for row in result["results"])
    assert all(ratio["median"] > 0 for ratio in result["ratios"].values())
    prompt, lagging = result["results"][1:]
    assert prompt["tokens_per_s"] == prompt["messages_per_s"]
    assert lagging["tokens_per_s"]["median"] > lagging["messages_per_s"]["median"]
    assert result["stalled"]["resident_mib"]
