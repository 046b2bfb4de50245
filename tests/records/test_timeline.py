"""Timelines for Perfetto, read with Perfetto's own protos."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

import pytest
from google.protobuf.unknown_fields import UnknownFieldSet
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from quire_server.cli.main import main
from records.reader import Segment, read
from records.rules.model_worker import ModelWorker
from records.timeline import export
from records.values import Entry, PlanAsked
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.config import CoreConfig
from scheduler_svc.core.interface.records import Note, NoteKind, RequestEnded
from tests.scheduler_svc.cluster import FRONTEND, Cluster
from tests.scheduler_svc.recording import Recording, record

SEEDS = (0, 2, 3)


@dataclass(slots=True)
class Slice:
    """A slice, or an instant."""

    name: str
    start: int
    depth: int
    flows: tuple[int, ...]
    arguments: dict[str, int | str]
    end: int = -1


@dataclass(slots=True)
class Timeline:
    """A trace, by paths of tracks such as ("w", "row 3")."""

    slices: dict[tuple[str, ...], list[Slice]] = field(default_factory=dict)
    instants: dict[tuple[str, ...], list[Slice]] = field(default_factory=dict)
    counters: dict[tuple[str, ...], list[tuple[int, int]]] = field(default_factory=dict)
    wall_clock: list[tuple[int, int]] = field(default_factory=list)

    @classmethod
    def parse(cls, data: bytes) -> "Timeline":
        """Parses a trace; fails if a slice has no end, slices do not nest, or a field is unknown to Perfetto."""
        found = cls()
        tracks: dict[int, tuple[str, ...]] = {}
        names: dict[int, str] = {}
        is_counter: dict[int, bool] = {}
        open_slices: dict[int, list[Slice]] = {}
        latest: dict[int, int] = {}
        for packet in pb.Trace.FromString(data).packet:
            _check_known(packet)
            assert packet.trusted_packet_sequence_id == 1
            if packet.HasField("clock_snapshot"):
                boottime, realtime = packet.clock_snapshot.clocks
                assert (boottime.clock_id, realtime.clock_id) == (pb.BUILTIN_CLOCK_BOOTTIME, pb.BUILTIN_CLOCK_REALTIME)
                found.wall_clock.append((boottime.timestamp, realtime.timestamp))
            for name in packet.interned_data.debug_annotation_names:
                names[name.iid] = name.name
            if packet.HasField("track_descriptor"):
                track = packet.track_descriptor
                assert track.uuid not in tracks
                tracks[track.uuid] = (*tracks.get(track.parent_uuid, ()), track.name)
                assert list(tracks.values()).count(tracks[track.uuid]) == 1
                is_counter[track.uuid] = track.HasField("counter")
            if not packet.HasField("track_event"):
                continue
            event, time = packet.track_event, packet.timestamp
            path, opened = tracks[event.track_uuid], open_slices.setdefault(event.track_uuid, [])
            assert is_counter[event.track_uuid] == (event.type == pb.TrackEvent.TYPE_COUNTER)
            if event.type == pb.TrackEvent.TYPE_COUNTER:
                found.counters.setdefault(path, []).append((time, event.counter_value))
                continue
            if event.type == pb.TrackEvent.TYPE_SLICE_END:
                opened.pop().end = time
            else:
                arguments = {
                    names[each.name_iid]: each.string_value or each.int_value for each in event.debug_annotations
                }
                item = Slice(event.name, time, len(opened), tuple(event.flow_ids), arguments)
                if event.type == pb.TrackEvent.TYPE_INSTANT:
                    found.instants.setdefault(path, []).append(item)
                    continue
                found.slices.setdefault(path, []).append(item)
                opened.append(item)
            # Slices nest if their events are ordered and each end closes the innermost open slice.
            assert time >= latest.get(event.track_uuid, 0), path
            latest[event.track_uuid] = time
        assert not any(open_slices.values()), "a slice has no end"
        return found

    def steps(self) -> Iterator[tuple[str, Slice]]:
        """Yields the steps with their workers' names."""
        for path, slices in self.slices.items():
            if path[1:] == ("steps",):
                yield from ((path[0], each) for each in slices)

    def rows(self) -> Iterator[tuple[str, Slice]]:
        """Yields the slices on row tracks with their workers' names."""
        for path, slices in self.slices.items():
            if path[1].startswith("row "):
                yield from ((path[0], each) for each in slices)

    def marks(self) -> Counter[str]:
        """Counts the instants on tracks of workers by name."""
        return Counter(
            each.name for path, instants in self.instants.items() if path[0] != "scheduler" for each in instants
        )


def _check_known(message: object) -> None:
    assert not len(UnknownFieldSet(message))  # type: ignore[arg-type]
    for descriptor, value in message.ListFields():  # type: ignore[attr-defined]
        if descriptor.message_type is not None:
            for each in value if descriptor.is_repeated else [value]:
                _check_known(each)


def _exported(place: Path, skip: int = 0) -> Timeline:
    out = BytesIO()
    export(read(place), out, skip=skip)
    return Timeline.parse(out.getvalue())


def _entries(place: Path) -> list[Entry]:
    return [entry for segment in read(place) for entry in segment]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_timeline_shows_what_the_record_holds(seed: int, tmp_path: Path) -> None:
    """Simulated runs with faults: each plan is a step, each admission a slice of a row, each preemption an instant."""
    record(tmp_path, seed, 1000, cut_every=400)
    found = _exported(tmp_path)
    entries = _entries(tmp_path)
    plans = [each.what.plan for each in entries if isinstance(each.what, PlanAsked) and each.what.plan is not None]
    notes = Counter(each.what.kind for each in entries if isinstance(each.what, Note))

    steps = [step for _, step in found.steps()]
    assert len(steps) == len(plans) > 0
    assert Counter(step.arguments["decode_tokens"] for step in steps) == Counter(plan.num_decodes for plan in plans)
    assert sum(int(step.arguments["prefill_tokens"]) for step in steps) == sum(sum(p.chunk_lengths) for p in plans)
    assert not any(step.depth for step in steps)
    rows = [each for _, each in found.rows()]
    occupied = [each for each in rows if not each.depth]
    assert len(occupied) == sum(len(plan.admissions) for plan in plans)
    assert sum(each.name == "prefill" for each in rows) == sum(len(plan.chunk_rows) for plan in plans)
    assert {each.name for each in rows if each.depth} <= {"prefill", "decode", "held out"}
    marks = found.marks()
    for kind in (NoteKind.PREEMPTED, NoteKind.SWAPPED, NoteKind.MOVED, NoteKind.LOST, NoteKind.PREFIX_FAILED):
        assert marks[kind.value] == notes[kind], kind
    assert marks["swap out"] == sum(len(plan.swap_outs) for plan in plans)
    assert marks["swap in"] == sum(len(plan.swap_ins) for plan in plans)
    assert len(found.instants["scheduler", "arrivals"]) == notes[NoteKind.ARRIVED]
    ends = Counter(each.name for each in found.instants["scheduler", "ends"])
    assert ends == Counter(each.what.reason.value for each in entries if isinstance(each.what, RequestEnded))


@pytest.mark.parametrize("seed", SEEDS)
def test_arrows_lead_from_requests_to_their_steps(seed: int, tmp_path: Path) -> None:
    """Each flow of a step belongs to a request whose row slice, on that worker, contains the step; none is missing."""
    record(tmp_path, seed, 1000)
    found = _exported(tmp_path)
    arrivals = {each.flows for each in found.instants["scheduler", "arrivals"]}
    occupied: dict[tuple[str, int], list[Slice]] = {}
    for worker, each in found.rows():
        assert len(each.flows) == (not each.depth)
        if each.flows:
            assert each.flows in arrivals
            occupied.setdefault((worker, each.flows[0]), []).append(each)

    num_flows = 0
    for worker, step in found.steps():
        num_flows += len(step.flows)
        assert len(step.flows) == len(set(step.flows)) == step.arguments["rows"]
        for number in step.flows:
            assert any(row.start <= step.start <= step.end <= row.end for row in occupied[worker, number])
    assert num_flows


class _Watched(Cluster):
    """A recorded cluster that notes the core's own figures after every call."""

    def __init__(self, folder: Path, **limits: object) -> None:
        self.figures: list[tuple[float, int]] = []
        super().__init__(**limits)
        self.recording = Recording(folder)
        self.core = self.recording.make_core(CoreConfig(**limits), 1 << 40)  # type: ignore[arg-type]
        self.handle(ev.FrontendJoined(frontend=FRONTEND))

    def handle(self, event: ev.Event) -> list[object]:  # type: ignore[override]
        """Notes the number of waiting requests."""
        effects = super().handle(event)
        self.figures.append((self.now, self.core.stats().waiting))
        return list(effects)

    def plan(self) -> int:
        """Plan; record the numbers of waiting requests and held blocks."""
        self.now += 0.001
        count = super().plan()
        self.figures.append((self.now, self.core.stats().waiting))
        return count


def test_counters_show_the_cores_own_figures(tmp_path: Path) -> None:
    """Waiting requests match the core at every time; blocks and running requests are zero at the end."""
    cluster = _Watched(tmp_path, max_num_seqs=3, max_num_batched_tokens=8, policy="priority")
    cluster.join(ModelWorker(b"w/1", 24, 4, 3))
    for stream in range(1, 9):
        cluster.submit(stream, [stream] * (2 * stream), 12, priority=stream // 3)
        cluster.plan()
        cluster.answer()
    cluster.run()
    cluster.recording.finish()
    found = _exported(tmp_path)
    waiting = found.counters["scheduler", "requests waiting"]

    assert max(count for _, count in cluster.figures) > 2
    for time, expected in cluster.figures:
        shown = [value for at, value in waiting if at <= round(time * 1e9)]
        assert (shown[-1] if shown else 0) == expected, time
    assert found.counters["scheduler", "requests running"][-1][1] == 0
    blocks = [value for _, value in found.counters["w", "blocks held, of 24"]]
    assert 10 < max(blocks) <= 24
    assert blocks[-1] == 0
    assert found.marks()["preempted"] > 0


def test_the_end_of_a_record_is_shown_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--last` shows the steps since then, with the requests in the rows, in a correctly nested trace."""
    record(tmp_path, 3, 1500, cut_every=400)
    entries = _entries(tmp_path)
    whole = _exported(tmp_path)
    file = tmp_path / "end.pftrace"

    assert main(["record", "export", str(tmp_path), "--perfetto", str(file), "--last", str(len(entries) // 2)]) == 0
    assert "https://ui.perfetto.dev" in capsys.readouterr().out
    found = Timeline.parse(file.read_bytes())
    steps, all_steps = list(found.steps()), list(whole.steps())
    assert 0 < len(steps) < len(all_steps)
    assert [each.arguments for _, each in steps[-20:]] == [each.arguments for _, each in all_steps[-20:]]
    flows = {each.flows[0] for _, each in found.rows() if not each.depth}
    assert all(number in flows for _, step in steps for number in step.flows)


def test_a_timeline_is_written_while_the_record_is_read(tmp_path: Path) -> None:
    """What a segment holds is written before the next segment is opened."""
    record(tmp_path, 1, 1500, cut_every=300)
    out = BytesIO()
    sizes = []

    def segments() -> Iterator[Segment]:
        for segment in read(tmp_path):
            yield segment
            sizes.append(len(out.getvalue()))

    export(segments(), out)
    assert len(sizes) > 3
    assert sizes == sorted(set(sizes))


def test_only_export_writes_a_timeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Other actions refuse the flag, and a file that cannot be written is named."""
    record(tmp_path, 1, 50)

    assert main(["record", "show", str(tmp_path), "--perfetto", "x"]) == 1
    assert "use quire record export" in capsys.readouterr().err
    assert main(["record", "export", str(tmp_path), "--perfetto", str(tmp_path / "none" / "x")]) == 1
    assert "No such file" in capsys.readouterr().err
