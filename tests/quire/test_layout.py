"""The layout of a service on one machine: names, flags, addresses, ports, and the effects of a process's death."""

import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from quire_server.cli._parser import OneLineParser
from quire_server.cli.serve import configure, serve_config
from quire_server.serve.layout import ChildSpec, Ports, ServeConfig, child_environment, plan_children
from quire_server.serve.ports import reserve_ports
from quire_server.serve.restarts import GiveUp, Restart, RestartPolicy
from quire_server.serve.runtime_dir import runtime_dir
from shared.config import ConfigError


def config_of(*arguments: str) -> ServeConfig:
    """Return the configuration for command line arguments."""
    parser = OneLineParser("quire serve", description="", examples="")
    configure(parser)
    return serve_config(parser.parse(arguments))


def children_of(*arguments: str) -> list[ChildSpec]:
    """Return the child processes for command line arguments."""
    return plan_children(
        config_of(*arguments), socket_dir=Path("/run/q"), record_dir=Path("/rec"), ports=Ports(5001, 8001), cores=5
    )


def flags_of(child: ChildSpec) -> dict[str, str]:
    """Return the flags of a child process."""
    return dict(flag.split("=", 1) for flag in child.argv if "=" in flag)


def test_one_of_each_by_default() -> None:
    """A service has one scheduler, one worker and one front end unless more are requested."""
    assert [child.name for child in children_of()] == ["scheduler", "worker-0", "frontend-0"]


def test_more_workers_and_front_ends_are_numbered() -> None:
    """Every process has its own name."""
    assert [child.name for child in children_of("--workers", "2", "--frontends", "3")] == [
        "scheduler", "worker-0", "worker-1", "frontend-0", "frontend-1", "frontend-2",
    ]  # fmt: skip


def test_a_standby_is_a_second_scheduler_with_the_same_lease_and_addresses() -> None:
    """With --standby, two scheduler processes get the same flags, and with them one lease file."""
    first, second, *others = children_of("--standby")

    assert (first.name, second.name) == ("scheduler", "scheduler-1")
    assert first.argv == second.argv
    assert flags_of(first)["--leader-lease"] == "/run/q/leader"
    assert [child.name for child in others] == ["worker-0", "frontend-0"]
    assert flags_of(children_of()[0])["--leader-lease"] == ""


def test_a_lease_without_a_standby_is_refused() -> None:
    """The leader's metrics would say that no standby waits, and there would be an alert until someone starts one."""
    assert flags_of(children_of("--standby", "--leader-lease=/mine")[0])["--leader-lease"] == "/mine"
    with pytest.raises(ConfigError, match=r"leader_lease .* starts no standby without --standby; add it"):
        children_of("--leader-lease=/mine")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--leader-lease=etcd://127.0.0.1:2379/q"], "leader_lease .* supports only a file"),
        (["--standby", "--leader-lease=kubernetes"], "leader_lease .* start each scheduler with quire scheduler"),
        (["--standby", "--standby-address=tcp://127.0.0.1:5703"], "standby_address .* --standby starts a standby on"),
        (["--standby", "--standby-of=tcp://127.0.0.1:5703"], "standby_of .*; remove one of them"),
    ],
)
def test_settings_of_a_standby_on_another_machine_are_refused(flags: list[str], message: str) -> None:
    """The error names a setting that the user has passed, and its remedy is accepted."""
    with pytest.raises(ConfigError, match=message):
        children_of(*flags)


def test_a_disk_without_host_memory_is_refused() -> None:
    """Blocks on disk pass through host memory. The error names both flags before any process starts."""
    assert flags_of(children_of("--disk-cache=/kv", "--host-cache=1GiB")[1])["--disk-cache"] == "/kv"
    with pytest.raises(ConfigError, match=r"disk_cache \(--disk-cache\): .*; add --host-cache"):
        children_of("--disk-cache=/kv")


def test_all_links_use_private_sockets() -> None:
    """Both ends of each link get the same address in the service's own folder."""
    scheduler, worker, frontend = map(flags_of, children_of())

    assert scheduler["--worker-address"] == worker["--worker-address"] == "ipc:///run/q/workers"
    assert scheduler["--frontend-address"] == frontend["--frontend-address"] == "ipc:///run/q/frontends"


def test_two_services_of_one_user_record_into_folders_of_their_own() -> None:
    """The folder is named by the clients' port; with a random port or an explicit folder, it is kept."""
    folders = [
        flags_of(children_of(*arguments)[0])["--record-dir"]
        for arguments in ([], ["--grpc-port=50052"], ["--grpc-port=0"], ["--record-dir=/mine"], ["--record-dir=off"])
    ]

    assert folders == ["/rec/50051", "/rec/50052", "auto", "/mine", "off"]


def test_an_address_that_was_set_is_kept() -> None:
    """Workers of other machines may join a service that names a TCP address."""
    scheduler, worker, _ = map(flags_of, children_of("--worker-address", "tcp://127.0.0.1:9"))

    assert scheduler["--worker-address"] == worker["--worker-address"] == "tcp://127.0.0.1:9"


def test_cores_are_divided_among_workers() -> None:
    """Workers on one CPU do not oversubscribe it, unless their number of threads is set."""
    assert [flags_of(child)["--num-threads"] for child in children_of("--workers", "2")[1:3]] == ["2", "2"]
    assert [flags_of(child)["--num-threads"] for child in children_of("--workers", "9")[1:2]] == ["1"]
    assert flags_of(children_of("--num-threads", "3")[1])["--num-threads"] == "3"


@pytest.mark.parametrize(
    ("flags", "devices"),
    [
        ([], ["auto:0", "auto:1", "auto:2"]),
        (["--device=cuda"], ["cuda:0", "cuda:1", "cuda:2"]),
        (["--device=cpu"], ["cpu", "cpu", "cpu"]),
        (["--device=cuda:1"], ["cuda:1", "cuda:1", "cuda:1"]),
    ],
)
def test_every_worker_has_a_gpu_of_its_own(flags: list[str], devices: list[str]) -> None:
    """Several workers spread over the GPUs, whatever there are, unless one device was named for all."""
    children = children_of("--workers=3", *flags)

    assert [flags_of(child)["--device"] for child in children[1:4]] == devices


def test_a_flag_reaches_every_process_that_knows_it() -> None:
    """One setting has one name and one value in a service."""
    scheduler, worker, frontend = map(flags_of, children_of("--max-num-seqs", "7", "--model", "/m", "--dtype", "bf16"))

    assert (scheduler["--max-num-seqs"], worker["--max-num-seqs"]) == ("7", "7")
    assert (worker["--model"], frontend["--model"]) == ("/m", "/m")
    assert worker["--dtype"] == "bfloat16"


@pytest.mark.parametrize("flag", ["--workers", "--frontends"])
def test_a_service_has_at_least_one_of_each(flag: str) -> None:
    """Zero processes of a kind are refused with the setting's name."""
    with pytest.raises(ConfigError, match=f"^{flag[2:]} .*at least 1"):
        config_of(flag, "0")


def test_children_run_the_supervisors_own_code() -> None:
    """The children's path begins with the tree that the supervisor runs from."""
    environment = child_environment({"PYTHONPATH": "/elsewhere"}, 7)

    assert environment["PYTHONPATH"] == f"{Path(__file__).resolve().parents[2]}:/elsewhere"
    assert environment["QUIRE_SUPERVISOR_PID"] == "7"


def test_the_users_environment_overrides_our_defaults() -> None:
    """OpenMP's threads sleep while they wait, unless the user sets otherwise."""
    assert child_environment({}, 7)["OMP_WAIT_POLICY"] == "PASSIVE"
    assert child_environment({"OMP_WAIT_POLICY": "ACTIVE"}, 7)["OMP_WAIT_POLICY"] == "ACTIVE"


def test_sockets_lie_in_a_private_folder_with_short_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is the user's alone, is short enough for a Unix socket wherever TMPDIR points, and is removed."""
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))

    with runtime_dir() as path:
        (path / "workers").touch()
        assert path.stat().st_mode & 0o777 == 0o700
        assert len(str(path / "frontends")) <= 107
    assert not path.exists()


def test_port_0_becomes_a_number_that_front_ends_can_share() -> None:
    """A reserved port can be bound with SO_REUSEPORT by every front end, and by no other process."""
    with ExitStack() as holder:
        ports = reserve_ports(holder, "127.0.0.1", grpc_port=0, http_port=0)
        for _ in range(2):
            frontend = holder.enter_context(socket.socket())
            frontend.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            frontend.bind(("127.0.0.1", ports.grpc))
            frontend.listen()
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", ports.http))


def test_a_port_of_another_service_is_refused_even_if_it_could_be_shared() -> None:
    """A second service on the same port is refused, although SO_REUSEPORT would let it in."""
    with socket.socket() as other, ExitStack() as holder:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(ConfigError, match=r"^grpc_port: cannot listen on .* choose another port with --grpc-port"):
            reserve_ports(holder, "127.0.0.1", grpc_port=other.getsockname()[1], http_port=0)


@pytest.mark.parametrize(("port", "host"), [(70000, "127.0.0.1"), (0, "192.0.2.1")])
def test_a_port_or_host_that_cannot_be_is_refused(port: int, host: str) -> None:
    """Numbers beyond 65535 and other machines' addresses are configuration errors."""
    with ExitStack() as holder, pytest.raises(ConfigError):
        reserve_ports(holder, host, grpc_port=port, http_port=0)


def test_at_the_start_a_process_that_ends_by_itself_is_not_tried_again() -> None:
    """Its last line is the reason; a process killed by a signal gets some more attempts."""
    policy = RestartPolicy(chances_at_start=3)
    deaths = [policy.after_death(exit_code=-9, lived_s=1, deaths=n, was_ready=False) for n in (1, 2, 3)]

    assert policy.after_death(exit_code=1, lived_s=1, deaths=1, was_ready=False) == GiveUp()
    assert [type(decision) for decision in deaths] == [Restart, Restart, GiveUp]


def test_restarts_slow_down_but_never_end() -> None:
    """The pause doubles up to a bound, and is short again for a process that had lived long."""
    policy = RestartPolicy(first_delay_s=0.5, longest_delay_s=3.0, steady_after_s=30.0)
    pauses = [policy.after_death(exit_code=1, lived_s=0, deaths=n, was_ready=True) for n in (1, 2, 3, 4, 5000)]

    assert pauses == [Restart(0.5), Restart(1.0), Restart(2.0), Restart(3.0), Restart(3.0)]
    assert policy.after_death(exit_code=1, lived_s=31, deaths=9, was_ready=True) == Restart(0.5)
