"""A host that computes some of the stages of an engine whose first host is another one: ``octavo serve --headless``.

It joins the first host, which says what to load, starts processes for its ranks, and passes on to them what they are to
compute. When a rank or the link is lost it starts again: the first host does, too, and continues all requests.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import time
from typing import NoReturn

from octavo.build.build_engine import rank_memory
from octavo.cache.build_offload import content_fingerprint
from octavo.config import EngineConfig, ModelSettings, to_flat
from octavo.errors import ConfigError, OctavoError, RanksLost
from octavo.runtime.ranks.node_link import START_LOOK_SECONDS, NodeLink, NodeLost, Order, StartNode, join
from octavo.runtime.ranks.rank_group import RankGroup
from octavo.runtime.ranks.rank_processes import RankProcesses
from octavo.runtime.ranks.start_messages import RankFailed, RankLayout, RankLoaded, RankReady, RankSettled
from octavo.system.channel import ChannelError, RefusedError
from octavo.system.process_exit import num_oom_kills
from octavo.weights.hub import resolve_model

RETRY_SECONDS = 0.2
REPORT_SECONDS = 30.0
OWN = (
    *("model", "download_dir", "offline", "revision", "device", "gpu_memory_utilization", "node_rank", "node_key"),
    *("node_ssl_certfile", "node_ssl_keyfile", "node_ssl_ca_certs", "master_addr"),
)
"""Settings that each host has of its own."""

logger = logging.getLogger(__name__)


def serve_stages(config: EngineConfig) -> NoReturn:
    """Compute for the first host, until this process is ended. Raises ``ConfigError`` if it refuses this one, and
    ``OctavoError`` if the model is not here."""
    path = str(resolve_model(config.model))
    flat = {**to_flat(config, EngineConfig), "model": path}
    while True:
        with contextlib.closing(_joined(config.model)) as link:
            try:
                _compute(link, {name: flat[name] for name in OWN})
            except RanksLost as error:
                logger.warning("%s; this host starts again", error)
            except OctavoError as error:
                logger.error("%s", error)


def _joined(settings: ModelSettings) -> NodeLink:
    """The link to the first host, when it is there."""
    reported = 0.0
    while True:
        try:
            return join(settings)
        except RefusedError as error:
            raise ConfigError(f"master_addr: {settings.master_addr}:{settings.master_port}: {error}") from None
        except ChannelError as error:
            if time.monotonic() - reported > REPORT_SECONDS:
                reported = time.monotonic()
                logger.info("waiting for the host with node_rank 0: %s", error)
        time.sleep(RETRY_SECONDS)


def _compute(link: NodeLink, own: dict[str, object]) -> NoReturn:
    """Compute what the first host asks for. Raises ``RanksLost``, ``ConfigError`` and ``CheckpointError``; the first
    host is told of a failure to load."""
    with contextlib.ExitStack() as ending:  # this closes the link, through which a failure is told before
        try:
            group = _loaded(link, own, ending)
        except (OctavoError, OSError, MemoryError) as error:
            is_lost, problem = isinstance(error, RanksLost), str(error)
            with contextlib.suppress(RanksLost):
                link.tell(NodeLost(problem, 1) if is_lost else RankFailed(type(error).__name__, problem))
            raise
        writer = group.memory.writer(group.check)
        while True:
            order = link.hear(Order)
            for number, digest in order.digests:
                group.memory.write_digest(0, number, digest)
            writer.write(order.message)


def _loaded(link: NodeLink, own: dict[str, object], ending: contextlib.ExitStack) -> RankGroup:
    """The ranks of this host, when they are ready to compute; ``ending`` ends them."""
    start = link.hear(StartNode)
    flat = {**start.config, **own}
    settings = EngineConfig.from_flat(flat).model
    if content_fingerprint(resolve_model(settings)) != start.fingerprint:
        raise ConfigError(f"model: the checkpoint {settings.model} is not that of the host with node_rank 0")
    layout = RankLayout(settings.num_ranks, settings.pipeline_parallel_size, settings.nnodes, settings.node_rank)
    memory, oom_kills_before = rank_memory(settings), num_oom_kills()
    processes = RankProcesses(len(layout.others))
    ending.callback(processes.end)
    group = RankGroup(flat, processes, memory, layout, nodes=[link])
    ending.callback(group.end)

    def tell_first(status: int) -> None:
        # The first host cannot see why this one's kernel kills; by a status of its own the rank is at fault.
        ran_out = (num_oom_kills() or 0) > (oom_kills_before or 0)
        with contextlib.suppress(RanksLost):
            link.tell(NodeLost(str(group.problem), 1 if status == -signal.SIGKILL and ran_out else status))
        link.close()

    link.tell(RankLoaded(group.least_free(sys.maxsize)))
    group.settle(link.hear(RankSettled, START_LOOK_SECONDS, group.check).limits)
    group.wait()
    group.report_to(tell_first)
    link.tell(RankReady())
    logger.info("ranks %s compute for the host with node_rank 0", layout.others)
    return group
