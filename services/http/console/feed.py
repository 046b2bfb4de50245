"""Converts parts of a live view to compact JSON for the console.

A step contains only the rows that changed since the worker's previous step, because rows decode for hundreds of steps.
A complete step with a thousand rows would take ten kilobytes, and milliseconds of CPU time in the front end.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from quire.admin.v1 import admin_pb2 as admin

_Rows = dict[int, int]
"""Request number by row."""
_FORGET_S = 60.0
"""Time without a worker in the load after which its rows are dropped, s."""
_KINDS = {number: name.removeprefix("KIND_").lower() for name, number in admin.Incident.Kind.items()}


class Feed:
    """JSON of one viewer's parts, in order."""

    def __init__(self) -> None:
        self._decode: dict[str, _Rows] = {}
        """By worker, the decode rows of its newest step."""
        self._waiting: dict[str, _Rows] = {}
        """Rows that are held out in the newest step, by worker."""
        self._absent: dict[str, float | None] = {}
        """For each worker with steps, when it was first missing from a load, s; None if the newest load includes it."""

    def message(self, part: admin.WatchStepsResponse) -> dict[str, Any]:
        """Return a part as JSON values; absent entries are empty."""
        found: dict[str, Any] = {}
        if part.steps:
            found["steps"] = [self._step(step) for step in part.steps]
        if part.requests:
            found["requests"] = [
                [each.number, each.request_id, each.tenant, each.prompt_tokens, each.max_tokens, each.trace_id]
                for each in part.requests
            ]
        if part.HasField("load"):
            found["load"] = _load(part.load)
            if forgotten := self._forget(part.load):
                found["forgotten"] = forgotten
        if part.HasField("tables"):
            found["tables"] = _tables(part.tables)
        if part.incidents:
            found["incidents"] = [
                {
                    "time": _seconds(each.time),
                    "kind": _KINDS.get(each.kind, "unknown"),
                    "worker": each.worker_id,
                    "request": each.request_id,
                    "detail": each.detail,
                }
                for each in part.incidents
            ]
        if part.dropped_steps:
            found["dropped"] = part.dropped_steps
        return found

    def _forget(self, load: admin.SchedulerLoad) -> list[str]:
        """Drop workers that left some time ago; return their names, so that the page also drops them."""
        now, present = _seconds(load.time), {each.worker_id for each in load.workers}
        for name, since in self._absent.items():
            self._absent[name] = None if name in present else now if since is None else since
        left = [name for name, since in self._absent.items() if since is not None and now - since >= _FORGET_S]
        for name in left:
            for known in (self._absent, self._decode, self._waiting):
                known.pop(name, None)
        return left

    def _step(self, step: admin.WatchedStep) -> dict[str, Any]:
        self._absent[step.worker_id] = None
        found: dict[str, Any] = {
            "worker": step.worker_id,
            "step": step.step,
            "start": _seconds(step.start),
            "seconds": round(step.duration.seconds + step.duration.nanos / 1e9, 6),
        }
        for name, known, rows, requests in (
            ("decode", self._decode, step.decode_rows, step.decode_requests),
            ("waiting", self._waiting, step.waiting_rows, step.waiting_requests),
        ):
            change = _change(known, step.worker_id, rows, requests)
            if change:
                found[name] = change
        if step.prefill_rows:
            found["prefill"] = [list(step.prefill_rows), list(step.prefill_requests), list(step.prefill_tokens)]
        return found


def _change(
    known: dict[str, _Rows], worker_id: str, rows: Iterable[int], requests: Iterable[int]
) -> list[list[int]] | None:
    """Return the rows that left, the rows that joined, and their requests; None if nothing changed."""
    before, now = known.get(worker_id, {}), dict(zip(rows, requests, strict=True))
    if now == before:
        return None
    known[worker_id] = now
    joined = now.items() - before.items()
    return [list(before.keys() - now.keys()), [row for row, _ in joined], [number for _, number in joined]]


def worker(message: admin.Worker) -> dict[str, Any]:
    """Return a worker as the values of a JSON object."""
    return {
        "id": message.worker_id,
        "device": message.device,
        "pid": message.pid,
        "draining": message.draining,
        "running": message.running_requests,
        "rows": message.rows,
        "blocks": message.total_blocks,
        "free": message.free_blocks,
        "cached": message.cached_blocks,
        "hostBlocks": message.host_blocks,
        "heldHostBlocks": message.held_host_blocks,
        "drafts": message.draft_tokens,
        "acceptedDrafts": message.accepted_draft_tokens,
        "kinds": list(message.cache_kinds),
        "blockBytes": message.block_bytes,
        "windowBlocks": message.window_blocks,
        "stateBytes": message.state_bytes,
        "checkpoints": _checkpoints(message.checkpoints) if message.HasField("checkpoints") else None,
    }


def _checkpoints(found: admin.Checkpoints) -> dict[str, int]:
    return {name: getattr(found, name) for name in ("total", "used", "saved", "restored", "evicted")}


def comparison(found: admin.CompareStrategiesResponse) -> dict[str, Any]:
    """Return a comparison of strategies as JSON values."""
    return {
        "requests": found.requests,
        "arrivalSeconds": found.arrival_seconds,
        "rows": found.rows,
        "isCut": found.older_left_out,
        "runs": [
            {
                "name": run.name,
                "seconds": run.seconds,
                "tokensPerSecond": run.output_tokens_per_second,
                "ttft": _quantiles(run.ttft),
                "itl": _quantiles(run.itl),
                "latency": _quantiles(run.latency),
                "rowShare": run.row_share,
                "stays": [[each.row, each.request, each.begin, each.decode, each.end] for each in run.stays],
            }
            for run in found.runs
        ],
    }


def prediction(found: admin.PredictResponse) -> dict[str, Any]:
    """Return a prediction as the values of a JSON object."""
    return {
        "requests": found.requests,
        "askedRequests": found.asked_requests,
        "workers": [found.present_workers, found.predicted_workers],
        "notes": list(found.notes),
        "runs": {name: _run(getattr(found, name)) for name in ("measured", "present", "predicted")},
    }


def _run(run: admin.RunFigures) -> dict[str, Any]:
    return {
        "completed": run.completed_requests,
        "good": run.good_requests,
        "targeted": run.targeted_requests,
        "seconds": run.seconds,
        "tokensPerSecond": run.output_tokens_per_second,
        "ttft": _quantiles(run.ttft),
        "itl": _quantiles(run.itl),
        "latency": _quantiles(run.latency),
        "rowsPerStep": run.rows_per_step,
    }


def _load(load: admin.SchedulerLoad) -> dict[str, Any]:
    rates = load.rates
    return {
        "time": _seconds(load.time),
        "leadership": _leadership(load.leadership) if load.HasField("leadership") else None,
        "running": load.running_requests,
        "waiting": load.waiting_requests,
        "byReason": dict(load.waiting_by_reason),
        "byTenant": [[each.tenant, each.waiting_requests] for each in load.waiting_by_tenant],
        "workers": [worker(each) for each in load.workers],
        "limit": {
            "kind": load.limit.kind,
            "state": load.limit.state,
            "remedy": load.limit.remedy,
            "waits": load.limit.waits,
            "oldest": round(load.limit.oldest_seconds, 3),
        },
        "rates": {
            "seconds": rates.seconds,
            "arrived": rates.arrived_requests,
            "completed": rates.completed_requests,
            "good": rates.good_requests,
            "targeted": rates.targeted_requests,
            "promptTokens": rates.prompt_tokens,
            "cachedTokens": rates.cached_prompt_tokens,
            "outputTokens": rates.output_tokens,
            "ttft": _quantiles(rates.ttft),
            "itl": _quantiles(rates.itl),
        },
    }


def _leadership(found: admin.Leadership) -> dict[str, Any]:
    return {
        "leader": found.leader,
        "number": str(found.leader_number) if found.leader_number else "",  # JavaScript has no 64-bit numbers.
        "seconds": round(found.seconds),
        "ready": found.ready_standbys,
        "others": found.other_standbys,
        "lag": found.lag_bytes,
    }


def _quantiles(found: admin.Quantiles) -> list[float] | None:
    """Return median and 99th percentile, s; None without samples."""
    return [round(found.p50, 6), round(found.p99, 6)] if found.count else None


def _tables(tables: admin.SchedulerTables) -> dict[str, Any]:
    return {
        "time": _seconds(tables.time),
        "policy": tables.policy,
        "maps": [
            {
                "worker": each.worker_id,
                "blockSize": each.block_size,
                "owners": list(each.owners),
                "tokens": list(each.tokens),
                "device": _blocks(each.device),
                "host": _blocks(each.host),
            }
            for each in tables.block_maps
        ],
        "queues": [
            {
                "reason": queue.reason,
                "length": queue.length,
                "first": [
                    {
                        "number": each.number,
                        "id": each.request_id,
                        "tenant": each.tenant,
                        "class": each.request_class,
                        "priority": each.priority,
                        "tokens": each.tokens,
                        "waited": round(each.waited_seconds, 3),
                        "waitsFor": each.waits_for,
                    }
                    for each in queue.first
                ],
            }
            for queue in tables.queues
        ],
        "sessions": [
            {
                "number": each.number,
                "tenant": each.tenant,
                "id": each.session_id,
                "state": each.state,
                "turn": each.turn,
                "tokens": each.tokens,
                "tier": each.tier,
                "since": round(each.since_seconds, 3),
                "expected": round(each.expected_seconds, 3),
            }
            for each in tables.sessions
        ],
    }


def _blocks(blocks: admin.Blocks) -> dict[str, int | Sequence[int]]:
    return {
        "total": blocks.total,
        "stride": blocks.stride,
        "lengths": list(blocks.lengths),
        "states": list(blocks.states),
    }


def _seconds(moment: Timestamp) -> float:
    """Return the seconds since 1970."""
    return round(moment.seconds + moment.nanos / 1e9, 6)
