"""A service without requests stays as it is."""

import time
from pathlib import Path

import pytest

from measure.testbed.checkpoints import make_checkpoint
from measure.testbed.service import serve
from quire import Client

SILENCE_S = 1.5


@pytest.mark.every(3)
def test_an_idle_worker_stays_in_its_epoch(tmp_path: Path) -> None:
    """An idle worker stays in its epoch, because the scheduler's pings count as signs of life.

    It is idle for several times its limit of silence, says Hello only once, and then serves in the same epoch.
    """
    checkpoint = make_checkpoint("LlamaForCausalLM", tmp_path / "model")
    with serve(checkpoint, f"--worker-silence-s={SILENCE_S}") as served:
        # Sleep, because the test measures idle time and no event ends it.
        time.sleep(3 * SILENCE_S)
        with Client(served.grpc) as client:
            client.generate("a", max_tokens=3, ignore_eos=True).result()
        served.process.terminate()
        served.wait()
        events = served.log_lines()

    assert len([event for event in events if event["event"] == "worker joined"]) == 1
    assert [event for event in events if event["event"] == "session lost; reconnecting"] == []
    (welcomed,) = {event["epoch"] for event in events if event["event"] == "welcomed"}
    assert welcomed == next(event["epoch"] for event in events if event["event"] == "worker joined")
