"""Disk jobs of the scheduler and settings of the disk cache: what the worker accepts, and what it refuses by name."""

from collections.abc import Callable
from pathlib import Path

import pytest

from checks.driver import make_engine
from measure.testbed.checkpoints import make_checkpoint
from protos.quire.plan.v1 import plan_pb2
from shared.columns import to_column
from shared.config import ConfigError
from worker_svc.interface.disk import DiskAction, DiskBlock, DiskReport
from worker_svc.interface.errors import PlanError
from worker_svc.interface.limits import Limits
from worker_svc.link.decoding import decode_disk_job
from worker_svc.link.encoding import encode_disk_report

LIMITS = Limits(
    max_rows=4, max_tokens_per_step=8, max_model_len=64, block_size=8, num_blocks=8, vocab_size=10,
    num_host_blocks=4, num_disk_blocks=6,
)  # fmt: skip


def _job() -> plan_pb2.DiskJob:
    return plan_pb2.DiskJob(
        copy_id=7,
        action=plan_pb2.DISK_ACTION_READ,
        host_blocks=to_column([3, 1]),
        blocks=plan_pb2.DiskBlocks(
            slots=to_column([5, 0]), keys=b"k" * 32 + b"l" * 32, roots=b"r" * 64, is_first=b"\1\0"
        ),
    )


def test_a_job_arrives_as_it_was_sent() -> None:
    """Each block has its host block, slot, key and scope."""
    job = decode_disk_job(_job(), LIMITS)

    assert (job.copy_id, job.action, job.host_blocks.tolist()) == (7, DiskAction.READ, [3, 1])
    assert job.blocks == (
        DiskBlock(5, b"k" * 32, b"r" * 32, is_first=True),
        DiskBlock(0, b"l" * 32, b"r" * 32, is_first=False),
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda job: job.ClearField("action"),
        lambda job: job.ClearField("copy_id"),
        lambda job: setattr(job, "host_blocks", to_column([4, 1])),
        lambda job: setattr(job, "host_blocks", to_column([1, 1])),
        lambda job: setattr(job, "host_blocks", to_column([1])),
        lambda job: setattr(job.blocks, "slots", to_column([6, 0])),
        lambda job: setattr(job.blocks, "slots", to_column([-1, 0])),
        lambda job: setattr(job.blocks, "slots", to_column([5, 5])),
        lambda job: setattr(job.blocks, "keys", b"k" * 63),
        lambda job: setattr(job.blocks, "roots", b""),
        lambda job: setattr(job.blocks, "is_first", b"\1"),
        lambda job: job.ClearField("blocks"),
    ],
)
def test_a_malformed_job_is_refused(change: Callable[[plan_pb2.DiskJob], object]) -> None:
    """A job that violates the protocol raises an error before any block is touched."""
    job = _job()
    change(job)
    with pytest.raises(PlanError):
        decode_disk_job(job, LIMITS)


def test_a_report_is_encoded() -> None:
    """The report lists failed positions, found blocks and refused files."""
    report = DiskReport(
        copy_id=3, failed=(1,), duration_ns=5, found=(DiskBlock(5, b"k" * 32, b"r" * 32, is_first=True),),
        refused={"damaged": 2},
    )  # fmt: skip
    message = encode_disk_report(report)

    assert message.failed == to_column([1])
    assert (message.found.slots, message.found.keys) == (to_column([5]), b"k" * 32)
    assert [(each.reason, each.count) for each in message.refused] == [("damaged", 2)]


def test_the_disk_needs_host_memory(tmp_path: Path) -> None:
    """Blocks pass through host memory, so without it the worker does not start."""
    folder = make_checkpoint("LlamaForCausalLM", tmp_path)
    with pytest.raises(ConfigError, match="host_cache"):
        make_engine(folder, block_size=8, disk_cache=str(tmp_path / "kv"))


def test_a_disk_too_small_for_a_block_is_refused(tmp_path: Path) -> None:
    """A size below one block is an error, not a disk without blocks."""
    folder = make_checkpoint("LlamaForCausalLM", tmp_path)
    with pytest.raises(ConfigError, match="disk_cache_bytes"):
        make_engine(folder, block_size=8, host_cache="1MiB", disk_cache=str(tmp_path / "kv"), disk_cache_bytes="100")


def test_a_model_with_recurrent_state_has_no_disk(tmp_path: Path) -> None:
    """Recurrent states are not copied to the host, so a disk is refused by name."""
    folder = make_checkpoint("MambaForCausalLM", tmp_path)
    with pytest.raises(ConfigError, match="disk_cache"):
        make_engine(folder, block_size=8, disk_cache=str(tmp_path / "kv"))
