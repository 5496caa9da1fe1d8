"""How a model is divided among processes and hosts; ``octavo.config`` has the engine's other settings."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from octavo.errors import ConfigError
from octavo.setting import setting


@dataclass(frozen=True, kw_only=True)
class ParallelSettings:
    """The part of the model's settings that says which process has what."""

    tensor_parallel_size: int = setting(
        1, "processes among which every layer is divided, such as CPU sockets", low=1, high=1024
    )
    pipeline_parallel_size: int = setting(
        1,
        "groups of tensor_parallel_size processes that have some of the layers each, one group behind the other; for "
        "CPUs",
        low=1,
        high=1024,
    )
    nnodes: int = setting(
        1,
        "hosts among which the groups of pipeline_parallel_size are divided; on each but the first runs `octavo serve "
        "--headless` with its node_rank",
        low=1,
        high=1024,
    )
    distributed_executor_backend: str = setting(
        "mp",
        "what runs on the other hosts of nnodes: mp, what was started there; ray: actors that a Ray cluster places, "
        "and that need no key, address or certificate",
        ("mp", "ray"),
        synonyms={"uni": "mp"},
    )
    node_rank: int = setting(0, "number of this host among those of nnodes; 0 serves HTTP", low=0)
    master_addr: str = setting("127.0.0.1", "address of the host with node_rank 0, to which the others connect")
    master_port: int = setting(29501, "port of master_addr", low=1, high=65535)
    node_key: str | None = setting(None, "key that the hosts of nnodes share, which others do not know")
    node_ssl_certfile: str | None = setting(
        None, "certificate file of the host with node_rank 0; default: no TLS, for nodes on one machine"
    )
    node_ssl_keyfile: str | None = setting(None, "file of its private key; default: node_ssl_certfile")
    node_ssl_ca_certs: str | None = setting(
        None, "file of CAs that verify the host with node_rank 0; default: no TLS, for nodes on one machine"
    )
    decode_context_parallel_size: int = setting(
        1,
        "processes of tensor_parallel_size among which the KV cache of each sequence is divided, of those that would "
        "hold the same keys and values, as with latent attention and few KV heads",
        low=1,
    )
    enable_expert_parallel: bool = setting(
        False,
        "divide a mixture by experts: each process of tensor_parallel_size holds whole experts instead of a part of "
        "each, and computes them for all tokens",
    )
    enable_dp_attention: bool = setting(
        False,
        "data-parallel attention: each sequence belongs to one of the tensor_parallel_size processes, which alone has "
        "its KV cache and computes its attention",
    )
    enable_eplb: bool = setting(
        False,
        "with enable_expert_parallel, move experts between the processes while they serve, so that each computes about "
        "as much: expert-parallel load balancing",
    )
    num_redundant_experts: int = setting(
        0, "copies of experts that the processes of enable_eplb hold besides, of those that many tokens choose", low=0
    )

    @property
    def num_ranks(self) -> int:
        """Processes among which the model is divided."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def ranks_per_node(self) -> int:
        """Those of each host."""
        return self.num_ranks // self.nnodes


def check_parallel(model: ParallelSettings) -> None:
    """Raise ``ConfigError`` for numbers that do not go together."""
    size, num_parts = model.tensor_parallel_size, model.decode_context_parallel_size
    if size % num_parts:
        raise ConfigError(
            f"decode_context_parallel_size: {num_parts} must divide tensor_parallel_size, which is {size}"
        )
    _check_nodes(model)


def _check_nodes(model: ParallelSettings) -> None:
    given = [item.name for item in dataclasses.fields(model) if item.name.startswith(("node_", "master_"))]
    changed = [name for name in given if getattr(model, name) != getattr(ParallelSettings, name)]
    is_placed = model.distributed_executor_backend == "ray"
    if model.nnodes == 1:
        if changed or is_placed:
            name = changed[0] if changed else "distributed_executor_backend: ray"
            raise ConfigError(f"{name} needs nnodes, of at least 2; what computes on one host starts by itself")
        return
    if model.pipeline_parallel_size % model.nnodes:
        raise ConfigError(
            f"nnodes: {model.nnodes} must divide pipeline_parallel_size, which is {model.pipeline_parallel_size}: "
            "each host has as many groups of layers"
        )
    if model.node_rank >= model.nnodes:
        raise ConfigError(f"node_rank: must be at most {model.nnodes - 1}, as nnodes is {model.nnodes}")
    if is_placed and changed:
        raise ConfigError(f"{changed[0]}: distributed_executor_backend ray sets it for each host")
    if not model.node_key and not is_placed:
        raise ConfigError("nnodes needs node_key, which the hosts share")
