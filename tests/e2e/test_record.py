"""The flight record of a whole service: complete, without text, and replayed bit for bit."""

import json
import re
import subprocess
import time
from pathlib import Path

import pytest

from measure.testbed.service import QUIRE, serve
from records.reader import read
from records.replay import entries, replay
from scheduler_svc.core.interface import events as ev
from tests.records.test_timeline import Timeline


@pytest.mark.every(3)
def test_a_service_records_itself_without_text(tmp_path: Path) -> None:
    """`quire serve` records by default; the record replays, has the workers' timings, and holds no token ids.

    A simulation with other settings serves the same requests and generates as many tokens.
    """
    began = time.time()
    folder = tmp_path / "quire" / "record" / "any"
    prompts = [f"Once upon a time there were {count} foxes" for count in range(6)]
    with serve("demo", environ={"XDG_STATE_HOME": str(tmp_path)}) as served:
        for prompt in prompts:
            command = [*QUIRE, "generate", prompt, "--max-tokens=12", f"--target={served.grpc}"]
            subprocess.run(command, check=True, capture_output=True, timeout=120)
        listed = subprocess.run(
            [*QUIRE, "record", "ls", str(folder)], check=True, capture_output=True, text=True, timeout=120
        )
        assert "replay can start here: yes" in listed.stdout
        assert served.metric("quire_record_writes") == 1

    found = list(entries(read(folder)))
    arrivals = [entry.what for entry in found if isinstance(entry.what, ev.RequestArrived)]
    answers = [entry for entry in found if isinstance(entry.what, ev.StepDone)]
    outcome = replay(read(folder))
    replayed = subprocess.run([*QUIRE, "replay", str(folder)], capture_output=True, text=True, timeout=120)
    simulated = subprocess.run(
        [*QUIRE, "replay", str(folder), "--set", "max_num_seqs=2", "--workers=3", "--json"],
        check=True, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    exported = subprocess.run(
        [*QUIRE, "record", "export", str(folder)], check=True, capture_output=True, text=True, timeout=120
    )
    file = tmp_path / "timeline.pftrace"
    drawn = subprocess.run(
        [*QUIRE, "record", "export", str(folder), "--perfetto", str(file)], check=True, capture_output=True, timeout=120
    )
    timeline = Timeline.parse(file.read_bytes())

    assert outcome.difference is None
    assert replayed.returncode == 0
    assert re.match(r"equal: \d+ entries", replayed.stdout)
    runs = json.loads(simulated.stdout)
    assert [runs[name]["requests"] for name in ("recorded", "simulated", "changed")] == [len(prompts)] * 3
    assert runs["workers"] == {"recorded": 1, "changed": 3}
    assert runs["step_times"]["steps"] <= len(answers)
    tokens = [runs[name]["output_tokens_per_s"] * runs[name]["duration_s"] for name in ("recorded", "changed")]
    assert tokens[0] == pytest.approx(tokens[1])
    assert len(arrivals) == outcome.ends == len(prompts)
    assert not any(arrival.token_ids.any() or arrival.spec.sampling.strip(b"\0") for arrival in arrivals)
    assert not any(entry.what.tokens.any() for entry in answers if isinstance(entry.what, ev.StepDone))
    # A plan that only names ended rows computes nothing.
    timings = [entry.timings for entry in answers]
    assert all(each is not None and (each.forward_us > 0 or not each.num_tokens) for each in timings)
    assert any(each is not None and each.num_tokens for each in timings)
    assert drawn.stdout
    assert sum(not each.depth for _, each in timeline.rows()) == len(prompts)
    computed = [step for _, step in timeline.steps() if step.name != "no tokens"]
    assert all(step.arguments["forward_us"] and step.end > step.start for step in computed)
    assert sum(int(step.arguments["rows"]) for step in computed) == sum(len(step.flows) for step in computed)
    ((shown, _), *_) = timeline.wall_clock
    assert began < shown / 1e9 < time.time()
    assert len([json.loads(line) for line in exported.stdout.splitlines()]) == len(found)
