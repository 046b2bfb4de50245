"""Front-end process: gRPC and HTTP listeners, the link to the core, start and shutdown.

Start: tokenizer, listeners, link. The core need not be running: the process listens immediately, but is not ready until
a worker is available. Shutdown, on SIGTERM or SIGINT: report not ready → reject new calls → let live streams finish
within the grace period, then cancel them → send the last cancellations to the core → export spans → exit with status 0.
"""

import asyncio
import contextlib
import gc
import os
import resource
import signal
import socket
import sys

from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from quire.v1 import generation_pb2, generation_pb2_grpc, model_pb2, model_pb2_grpc
from services.access.principals import Principals, read_api_keys
from services.access.shares import Shares, make_shares
from services.access.tls import server_tls
from services.calls.context import LiveRequests, Services
from services.calls.embeddings import Embedder
from services.calls.generation import Generator
from services.calls.load_reports import LoadReports, to_report
from services.calls.scoring import Scorer
from services.calls.texts import Texts
from services.grammars.checker import GrammarChecker
from services.grpc.admin import SERVICE as ADMIN_SERVICE
from services.grpc.admin import add_admin_service
from services.grpc.boundary import Boundary
from services.grpc.event_loop import EventLoop
from services.grpc.generation import GenerationServicer
from services.grpc.health import HealthServicer
from services.grpc.model import ModelServicer
from services.grpc.vllm import add_vllm_service
from services.http.app import make_api, make_probes
from services.http.cross_origin import cross_origin_policy
from services.http.server import HttpServer, listening_socket
from services.link.core_link import CoreLink
from services.metrics import FrontendMetrics
from services.parsers import model_format
from services.requests.defaults import read_sampling_defaults
from services.requests.prompts import Prompts
from services.requests.validation import MAX_TEXT
from services.tail import TailTracing
from services.text.judge import Judge
from services.text.tokenizer import TextTokenizer, load_tokenizer
from shared.config import ConfigError, FrontendConfig, addresses
from shared.config_sources import API_KEY_VARIABLE
from shared.curve import FRONTEND, check_bind, is_routable, load_keys
from shared.logging import configure_logging, get_logger
from shared.memory import return_large_blocks
from shared.model_path import resolve_model
from shared.pulse import Pulse
from shared.telemetry import Telemetry

_MAX_REQUEST_BYTES = 2 * MAX_TEXT
"""Maximum size of a gRPC request: 4 MiB of text and the other fields. gRPC rejects larger requests."""

_GC_THRESHOLD = 50_000
"""Allocations between two collections of the youngest generation."""
_FINAL_CANCEL_TIMEOUT_S = 1.0
"""Maximum wait at shutdown for cancelled handlers, seconds."""
_REPORT_EVERY_S = 1.0
"""Interval of load reports, seconds."""
_BEAT_EVERY_S = 0.5
"""Interval of the checks for a stalled event loop, s."""


class Frontend:
    """All parts of a front-end process, wired together."""

    def __init__(self, config: FrontendConfig, tokenizer: TextTokenizer, telemetry: Telemetry) -> None:
        """Create all parts, on the event loop; nothing listens yet."""
        self._config = config
        self._telemetry = telemetry
        self._tokenizer = tokenizer
        self._health = HealthServicer()
        self._metrics = FrontendMetrics(config.frontend_id, lambda: telemetry.spans_dropped)
        keys = load_keys(config.keys, FRONTEND)
        self.link = CoreLink(
            config.frontend_address,
            config.frontend_id,
            families=self._metrics.families,
            on_state=lambda: self._health.set_ready(self.link.ready),
            protect=(lambda _socket: None) if keys is None else keys.protect_client,
        )
        self._metrics.watch_scheduler(
            connected=lambda: self.link.connected,
            ready=lambda: self.link.ready,
            silence_s=lambda: self.link.silence_s,
            restarts=lambda: self.link.num_restarts,
            orderly_restarts=lambda: self.link.num_orderly_restarts,
            addresses=len(addresses(config.frontend_address)),
        )
        folder = resolve_model(config.model, weights=False)
        shares = make_shares(config.max_concurrent_requests, _max_connections())
        for share in (*shares, tokenizer.text_bytes):
            self._metrics.watch_share(share.name, share.limit, share.num_held, share.num_refusals)
        self._grammars = GrammarChecker(folder / "tokenizer.json", shares.trials, shares.costly_trials)
        judge = Judge.of(tokenizer) if config.score_method == "yes-no" else None
        defaults = read_sampling_defaults(config.generation_config, folder)
        get_logger().info("sampling defaults", source=defaults.source, **defaults.values)
        self._tls = server_tls(config)
        check_bind("host", config.host, protected=self._tls is not None, insecure=config.insecure)
        principals = Principals(
            config.principals,
            api_keys=read_api_keys(os.environ.get(API_KEY_VARIABLE, ""), config.api_key_file),
            anonymous_is_admin=not is_routable(config.host),
        )
        tail = None
        if telemetry.traces_tail:
            tail = TailTracing(telemetry.forced_tracer, telemetry.forced_ids, self.link.trace)
        written = model_format(config.parser, tokenizer.chat_template_source, tokenizer.special_tokens)
        services = Services(
            config,
            self.link,
            tokenizer,
            written,
            defaults,
            self._grammars,
            self._metrics,
            shares.slices,
            telemetry.tracer,
            tail,
        )
        prompts = Prompts(tokenizer, telemetry.tracer)
        self._live = LiveRequests(self._metrics)
        self._generator = Generator(services, prompts, self._live, shares.large_bodies)
        self._embedder = Embedder(services, prompts, self._live)
        self._texts = Texts(services, prompts)
        self._reports = LoadReports()
        policy = cross_origin_policy(config)
        self._grpc = self._make_grpc_server(services, shares, principals)
        self._api = make_api(
            services,
            self._generator,
            self._embedder,
            Scorer(services, self._generator, self._embedder, judge),
            self._texts,
            shares,
            principals,
            policy,
            self._reports,
            is_ready=lambda: self._health.ready,
            snapshot=self.link.snapshot,
            own_families=self._metrics.families,
        )
        self._http = HttpServer(self._api.app, self._tls, shares)
        probes = make_probes(
            policy,
            is_ready=lambda: self._health.ready,
            snapshot=self.link.snapshot,
            own_families=self._metrics.families,
        )
        self._probes = HttpServer(probes) if config.health_port >= 0 else None
        self._serving: list[asyncio.Task[None]] = []
        self._reporting: asyncio.Task[None] | None = None

    async def start(self) -> tuple[int, int]:
        """Listen and connect to the core; return the ports of gRPC and HTTP.

        Raises:
            ConfigError: a port is not available.
        """
        host = self._config.host
        address = _address(host, self._config.grpc_port)
        try:
            if self._tls is None:
                grpc_port = self._grpc.add_insecure_port(address)
            else:
                grpc_port = self._grpc.add_secure_port(address, self._tls.grpc_credentials())
        except RuntimeError:
            raise ConfigError(_port_message("grpc_port", host, self._config.grpc_port)) from None
        http_socket = _listening("http_port", host, self._config.http_port)
        http_port = int(http_socket.getsockname()[1])
        listeners = [(self._http, http_socket)]
        if self._probes is not None:
            listeners.append((self._probes, _listening("health_port", host, self._config.health_port)))
        self.link.start()
        await self._grpc.start()
        self._serving = [asyncio.create_task(server.serve([listener])) for server, listener in listeners]
        if self._config.load_reports:
            self._reporting = asyncio.create_task(self._report_load())
        return grpc_port, http_port

    async def stop(self) -> None:
        """Shut down in order; return when every part has stopped."""
        self._health.stop()
        self.link.end_views("watch: this front end is shutting down; watch through another one")
        grace_s = self._config.grace_period_s
        # Call `stop` exactly once: overlapping calls crash grpcio.
        await asyncio.gather(self._grpc.stop(grace_s), self._api.drain(grace_s))
        # Cancelled handlers still have to send their cancellations to the core.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._live.idle.wait(), _FINAL_CANCEL_TIMEOUT_S)
        for server in (self._http, self._probes):
            if server is not None:
                server.stop()
        await asyncio.gather(*self._serving)
        await self.close()

    def push_metrics(self) -> None:
        """Export the metrics if they are due."""
        self._telemetry.push_metrics(self._metrics.own_families)

    async def close(self) -> None:
        """Close the link, the tokenizer, the grammar checker and the tracer."""
        if self._reporting is not None:
            self._reporting.cancel()
        await self.link.close()
        self._tokenizer.close()
        await self._grammars.close()
        await asyncio.to_thread(self._telemetry.shutdown, self._metrics.own_families())

    async def _report_load(self) -> None:
        """Keep the load report up to date."""
        while True:
            families = await self.link.snapshot(_REPORT_EVERY_S)
            self._reports.newest = to_report(families) if families is not None else None
            await asyncio.sleep(_REPORT_EVERY_S)

    def _make_grpc_server(self, services: Services, shares: Shares, principals: Principals) -> aio.Server:
        server = aio.server(
            interceptors=[Boundary(self._metrics.rpc_ended, shares, principals, self._reports)],
            options=[
                ("grpc.so_reuseport", 1),
                # With pings, the server detects the death of a client's machine earlier than the core detects a slow
                # reader.
                ("grpc.keepalive_time_ms", 30_000),
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.http2.ping_timeout_ms", 10_000),
                # Allow clients to ping the server while a stream is quiet. gRPC's default allows one ping in five
                # minutes.
                ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
                ("grpc.max_receive_message_length", _MAX_REQUEST_BYTES),
                ("grpc.max_allowed_incoming_connections", max(_max_connections() // 2, 1)),
            ],
        )
        generation = GenerationServicer(self._generator, self._embedder, self._texts, shares.large_bodies)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(generation, server)
        add_vllm_service(server, services, self._generator, self._embedder)
        model_pb2_grpc.add_ModelServiceServicer_to_server(ModelServicer(services), server)
        add_admin_service(server, services.link)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection(
            (
                generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name,
                model_pb2.DESCRIPTOR.services_by_name["ModelService"].full_name,
                ADMIN_SERVICE.full_name,
                health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
                reflection.SERVICE_NAME,
            ),
            server,
        )
        return server


def _max_connections() -> int:
    """Return the limit on HTTP connections: half of the file descriptors. gRPC may use a quarter."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(soft // 2, 1)


def run(config: FrontendConfig) -> int:
    """Run a front-end process until a signal stops it; return its exit status."""
    configure_logging("quire-frontend")
    return_large_blocks()
    try:
        tokenizer = load_tokenizer(resolve_model(config.model, weights=False), max_bytes=config.max_tokenizing_bytes)
        # Exclude long-lived objects from GC, and collect rarely, because the tens of thousands of short-lived messages
        # per second form no cycles.
        gc.collect()
        gc.freeze()
        gc.set_threshold(_GC_THRESHOLD, 20, 20)
        with asyncio.Runner(loop_factory=EventLoop) as runner:
            runner.run(_serve(config, tokenizer))
    except ConfigError as error:
        print(f"quire frontend: {error}", file=sys.stderr)
        return 1
    return 0


async def _serve(config: FrontendConfig, tokenizer: TextTokenizer) -> None:
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    frontend = Frontend(config, tokenizer, Telemetry("quire-frontend"))
    try:
        grpc_port, http_port = await frontend.start()
    except ConfigError:
        await frontend.close()
        raise
    with contextlib.suppress(BrokenPipeError):
        print(f"listening grpc={_address(config.host, grpc_port)} http={_address(config.host, http_port)}", flush=True)
    get_logger().info("listening", frontend_id=config.frontend_id, grpc_port=grpc_port, http_port=http_port)
    beating = asyncio.create_task(_beat(Pulse(), frontend))
    await stopping.wait()
    get_logger().info("stopping")
    await frontend.stop()
    beating.cancel()


async def _beat(pulse: Pulse, frontend: Frontend) -> None:
    while True:
        pulse.beat()
        frontend.push_metrics()
        await asyncio.sleep(_BEAT_EVERY_S)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _listening(setting: str, host: str, port: int) -> socket.socket:
    try:
        return listening_socket(host, port)
    except OSError as error:
        raise ConfigError(_port_message(setting, host, port, str(error))) from None


def _port_message(setting: str, host: str, port: int, detail: str = "") -> str:
    return f"{setting}: cannot listen on {_address(host, port)}{f' ({detail})' if detail else ''}; choose another port"
