"""The other hosts of an engine, placed by Ray: actors that do what ``octavo serve --headless`` does.

They belong to one engine. When the process that built it ends, however it ends, Ray ends its actors and removes its
placement group; the next engine process places its hosts anew. The key and the certificate of their link are made for
each engine. The actors get them from Ray, as the arguments of a call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

from octavo.build.serve_stages import serve_stages
from octavo.config import EngineConfig, to_flat
from octavo.errors import ConfigError, OctavoError, RanksLost
from octavo.ops.device_backend import Check
from octavo.runtime.ranks.node_link import REPORT_SECONDS, START_LOOK_SECONDS
from octavo.system.cpus import default_num_threads
from octavo.telemetry.logs import current_format, current_level, log_to_stderr
from octavo.weights.hub import by_hub_name
from octavo_fleet.ray.settings import GROUP_VARIABLE

try:
    import ray
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from ray.exceptions import RayError
    from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    raise ConfigError(f"distributed_executor_backend: ray needs: pip install 'octavo[ray]' ({error})") from None

PLACE_SECONDS = 300.0
"""How long Ray may take to find a node for each host; clusters that grow start machines meanwhile."""
DAYS_VALID = 36_500
"""Of a certificate, which nobody trusts but the hosts of one engine."""

logger = logging.getLogger("octavo.ray")


class StageHost:
    """Another host than the first: an actor."""

    def serve(self, flat: dict[str, Any], certificate: bytes, level: str, form: str) -> str:
        """Compute for the first host until this actor is ended; returns why it cannot, if so.

        ``flat`` are the settings by their flat names, ``certificate`` is the first host's, ``level`` and ``form`` are
        those of the log.
        """
        log_to_stderr(level, form)
        with _file_of(certificate) as path:
            try:
                config = EngineConfig.from_flat({**flat, "node_ssl_ca_certs": path})
                serve_stages(dataclasses.replace(config, model=by_hub_name(config.model)))
            except OctavoError as error:
                return str(error)


@contextlib.contextmanager
def placed_hosts(config: EngineConfig) -> Iterator[tuple[EngineConfig, Check]]:
    """Have Ray start the other hosts, and end them in the end.

    Gives the settings of the first host, and what raises when another one ends before it has joined. Raises
    ``ConfigError`` if this machine is not of a cluster, or the cluster has no place for the hosts.
    """
    _connect()
    with _group(config.model.nnodes) as group, contextlib.ExitStack() as ending:
        own_key, certificate = _certificate()
        shared = {
            "distributed_executor_backend": "mp",
            "node_key": secrets.token_hex(32),
            "master_addr": ray.util.get_node_ip_address(),
            "master_port": _free_port(),
        }
        flat = {**to_flat(config, EngineConfig), **shared}
        ended = []
        for rank in range(1, config.model.nnodes):
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
            options = {"num_cpus": group.bundle_specs[rank]["CPU"], "scheduling_strategy": place}
            actor = ray.remote(StageHost).options(**options).remote()
            ending.callback(_end, actor)
            serving = actor.serve.remote({**flat, "node_rank": rank}, certificate, current_level(), current_format())
            ended.append(serving.future())

        def check() -> None:
            for rank, future in enumerate(ended, 1):
                if future.done():
                    try:
                        raise ConfigError(f"host {rank}: {future.result()}")
                    except RayError as error:
                        raise RanksLost(f"host {rank} is lost: {error}") from None

        path = ending.enter_context(_file_of(own_key + certificate))
        yield EngineConfig.from_flat({**flat, "node_ssl_certfile": path}), check


def _connect() -> None:
    """Be a driver of the cluster that this machine, or ``RAY_ADDRESS``, says. Raises ``ConfigError``."""
    if ray.is_initialized():
        return
    is_main, handler = threading.current_thread() is threading.main_thread(), signal.getsignal(signal.SIGTERM)
    try:
        ray.init(os.environ.get("RAY_ADDRESS", "auto"), logging_level="warning")
    except (ConnectionError, RuntimeError, RayError) as error:
        raise ConfigError(f"distributed_executor_backend: there is no cluster of Ray here: {error}") from None
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, handler)


@contextlib.contextmanager
def _group(nnodes: int) -> Iterator[PlacementGroup]:
    """The placement group of a replica of Ray Serve, of which this process is one, or one of its own."""
    if given := os.environ.get(GROUP_VARIABLE):
        yield PlacementGroup(ray.PlacementGroupID(bytes.fromhex(given)))
        return
    num_cpus, here = default_num_threads(), {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
    bundles, labels = [{"CPU": num_cpus}] * nnodes, [here, *[{}] * (nnodes - 1)]
    group = placement_group(bundles, "STRICT_SPREAD", bundle_label_selector=labels)
    try:
        _wait_for(group, nnodes, num_cpus)
        yield group
    finally:
        if ray.is_initialized():  # else it is removed already
            remove_placement_group(group)


def _wait_for(group: PlacementGroup, nnodes: int, num_cpus: int) -> None:
    """Wait until a group is placed. Raises ``ConfigError``."""
    placed, began, reported = group.ready().future(), time.monotonic(), 0.0
    while not placed.done():
        now = time.monotonic()
        if now - reported > REPORT_SECONDS:
            reported = now
            logger.info("waiting for Ray to place %d hosts with %d CPUs each", nnodes, num_cpus)
        if now - began > PLACE_SECONDS:
            nodes = [node for node in ray.nodes() if node["Alive"]]
            listed = ", ".join(
                f"{node['NodeManagerAddress']} ({node['Resources'].get('CPU', 0):g} CPUs)" for node in nodes
            )
            raise ConfigError(
                f"nnodes: within {PLACE_SECONDS:g} s, Ray has not found {nnodes} nodes with {num_cpus} free CPUs each, "
                f"of which this one ({ray.util.get_node_ip_address()}) must be one. It has {listed}; "
                f"{ray.available_resources().get('CPU', 0):g} CPUs are free"
            )
        time.sleep(START_LOOK_SECONDS)


def _end(actor: Any) -> None:
    if ray.is_initialized():  # else it has ended already
        ray.kill(actor)


def _free_port() -> int:
    with socket.create_server(("", 0)) as free:
        return int(free.getsockname()[1])


def _certificate() -> tuple[bytes, bytes]:
    """A private key, and a certificate of it that others trust by itself, in PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "octavo")])
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    made = made.not_valid_before(now - day).not_valid_after(now + DAYS_VALID * day)
    made = made.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    made = made.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    private = key.private_bytes(pem, form, serialization.NoEncryption())
    return private, made.sign(key, hashes.SHA256()).public_bytes(pem)


@contextlib.contextmanager
def _file_of(content: bytes) -> Iterator[str]:
    """The path of a file that is in memory only, for this process, within a block."""
    descriptor = os.memfd_create("octavo-certificate")
    try:
        os.write(descriptor, content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
