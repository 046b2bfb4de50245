"""KV in eight bits: less memory, the same tokens whatever the plans look like."""

from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint
from tests.worker_svc.driver import Driver, make_engine


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small checkpoint."""
    return make_checkpoint("Qwen3ForCausalLM", tmp_path_factory.mktemp("checkpoint"))


def test_eight_bits_hold_four_times_as_many_blocks_as_thirty_two(checkpoint: Path) -> None:
    """The memory for KV that is given holds as many more tokens as they are smaller."""
    wide, narrow = (
        make_engine(checkpoint, kv_cache_dtype=kind, kv_cache_memory="1MiB", max_num_seqs=1024).limits.num_blocks
        for kind in ("auto", "fp8")
    )

    assert narrow in range(4 * wide, 4 * wide + 4)


def test_tokens_do_not_depend_on_chunks(checkpoint: Path) -> None:
    """A prompt computed at once and in pieces gives the same tokens: what is read back is what later tokens see too."""
    prompt = list(range(1, 60))
    answers = []
    for pieces in ([59], [20, 1, 38]):
        driver = Driver(make_engine(checkpoint, kv_cache_dtype="fp8"))
        row = driver.admit(prompt)
        for piece in pieces:
            driver.chunk(row, piece)
            driver.step()
        while len(driver.rows[row].tokens) < len(prompt) + 12:
            driver.step()
        answers.append(driver.leave(row))

    assert answers[0] == answers[1]
