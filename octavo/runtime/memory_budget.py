"""Memory budget: computes every automatic limit before anything is allocated.

All sizes are in bytes.
"""

from __future__ import annotations

import bisect
import ctypes
import dataclasses
import gc
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from octavo.config import CacheSettings, EngineConfig, SchedulerSettings
from octavo.errors import ConfigError
from octavo.model_info import KVGroupInfo
from octavo.models.layer_cache import KVGroup, LayerCacheSpec, kv_groups, rank_cache, stage_caches, with_routes
from octavo.models.model_config import ModelConfig
from octavo.ops.attention.attention import MAX_SCRATCH
from octavo.ops.device_backend import backend_of, is_gpu
from octavo.ops.linear.grouped_linear import LARGEST_COPY
from octavo.ops.moe import RESULT_ROWS
from octavo.plugins import CPU, GPU
from octavo.quant.stored.stored_weight import DENSE_FORMATS
from octavo.runtime.executors.step_program import LOGPROB_ROWS
from octavo.runtime.group_memory import GroupMemory, StateMemory
from octavo.steps.limits import INTERVAL, StateSize
from octavo.weights.dtypes import DTYPES

logger = logging.getLogger(__name__)

GIB = 1 << 30
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Of glibc's malloc.h: bytes that are free at the heap's end and are kept, and of allocations outside the heap."""
MOST_IN_OLD_GLIBC = 32 << 20
CPU_KV_MEMORY = 1 * GIB
CPU_KV_SHARE = 0.5
"""Default share of free memory for the KV cache on a CPU."""
LEAST_CONTEXT = 8192
"""A context, if the model has it, for which the batch is made smaller where memory is little."""
LEAST_GPU_BLOCK = 16
"""Tiles of attention's kernels have so many keys or a higher power of two, and lie within a block."""
LEAST_SEQS, LEAST_TOKENS = 16, 256
"""Limits of a batch are not made smaller than these for a longer context."""
LOGITS_COPIES = 4
"""Tensors of the size of the logits that sampling holds at once."""

ATTENTION_COPIES = 4
"""Float32 scratch buffers of ``MAX_SCRATCH`` numbers that attention holds at once."""


@dataclass(frozen=True)
class DeviceDefaults:
    """Default limits of a device, for settings that are not given."""

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int


DEFAULTS = {CPU: DeviceDefaults(32, 64, 256), GPU: DeviceDefaults(64, 256, 8192)}
ACTIVATION_SHARE, FULL_TOKENS = 1 / 32, 2048
"""Activations of steps of more than FULL_TOKENS, which keep a GPU busy, take at most this share of the free memory."""


@dataclass(frozen=True)
class Limits:
    """The resolved limits of an engine; names as in the settings."""

    max_model_len: int
    block_size: int
    """Positions of a block, of all ranks that divide it."""
    groups: tuple[KVGroup, ...]
    num_blocks: tuple[int, ...]
    """Blocks of each KV group."""
    max_num_seqs: int
    max_num_batched_tokens: int
    states: StateSize | None = None
    """Pool of recurrent states, for models that have any."""
    num_dp_ranks: int = 1
    """Ranks that have so many blocks each for sequences of their own."""

    @property
    def num_kv_blocks(self) -> int:
        """Blocks of the first group, which limits the number of cached tokens."""
        return self.num_blocks[0] * self.num_dp_ranks

    @property
    def num_cached_tokens(self) -> int:
        """Most tokens that the first group caches, on all ranks that divide contexts or sequences."""
        return self.num_kv_blocks * self.block_size

    @property
    def kv_groups(self) -> tuple[KVGroupInfo, ...]:
        """Window and size of each KV group, for reports."""
        groups = zip(self.groups, self.num_blocks, strict=True)
        ranks = self.num_dp_ranks
        return tuple(KVGroupInfo(group.window, len(group.layers), count * ranks) for group, count in groups)


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes by purpose."""

    weights: int
    kv_cache: int
    activations: int
    logits: int
    states: int = 0
    """Recurrent states, snapshots included."""

    def as_dict(self) -> dict[str, int]:
        """Purpose to bytes; states only for models that have any."""
        sizes = dataclasses.asdict(self)
        return sizes if self.states else {name: size for name, size in sizes.items() if name != "states"}

    def table(self) -> str:
        """The budget as a text table, one line per purpose."""
        rows = [*self.as_dict().items(), ("in all", sum(self.as_dict().values()))]
        return "\n".join(f"{name.replace('_', ' '):<12}{size / 2**20:>12,.1f} MiB" for name, size in rows)


def release_unused(device: torch.device) -> None:
    """Give what a discarded engine of this process has held back to a GPU.

    Before weights are loaded: the allocator would put them into the memory of that engine's cache, and only memory of
    which nothing is in use can be given back.
    """
    if is_gpu(device) and torch.cuda.memory_reserved(device):  # a full collection takes about 0.1 s
        gc.collect()
        torch.cuda.empty_cache()


def keep_freed(num_bytes: int) -> None:
    """Let the C library keep about as much memory that was freed, for the next tensors; only glibc can.

    Otherwise it gives large tensors back, and the system clears the next ones' pages, for up to a sixth of an encoder's
    time.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return
    limit = min(max(num_bytes, MOST_IN_OLD_GLIBC), GIB)
    if not library.mallopt(M_MMAP_THRESHOLD, limit):
        library.mallopt(M_MMAP_THRESHOLD, MOST_IN_OLD_GLIBC)
    library.mallopt(M_TRIM_THRESHOLD, limit)


def free_memory(device: torch.device, gpu_memory_utilization: float) -> int:
    """Bytes that this process may still allocate on the device."""
    if is_gpu(device):
        release_unused(device)
        free, total = torch.cuda.mem_get_info(device)
        return free - int(total * (1 - gpu_memory_utilization))
    known = [_meminfo_available(), _cgroup_available(Path("/sys/fs/cgroup"))]
    return min((size for size in known if size is not None), default=4 * GIB)


def plan_memory(
    settings: EngineConfig,
    model: ModelConfig,
    kv_dtype: torch.dtype,
    dtype: torch.dtype,
    device: str,
    weights: Mapping[str, int],
    free: int,
    num_ranks: int = 1,
    draft_specs: Sequence[LayerCacheSpec] = (),
    batch: tuple[int, int] | None = None,
) -> tuple[Limits, MemoryBudget]:
    """Resolve the limits that the settings leave open, given the free bytes and those of the loaded weights by format.

    With several ranks, all bytes are those of one rank, ``free`` of the rank that has least. ``draft_specs`` say what
    the layers of a drafter cache, next to those of the model.
    A context as long as was asked for, or of ``LEAST_CONTEXT``, is worth more than a large batch: limits of the batch
    that are not given are halved until it fits; ``batch``, sequences and tokens, is what they were halved to.
    Raises ``ConfigError`` naming the setting to change when something does not fit.
    """
    num_parts = settings.model.decode_context_parallel_size
    num_dp_ranks = num_ranks if settings.model.enable_dp_attention else 1
    ranks = num_ranks, num_parts, num_dp_ranks
    max_num_seqs, max_num_batched_tokens = batch or _first_batch(settings.scheduler, model, dtype, device, free, ranks)
    block_size = num_parts * _size_of_block(settings.cache.block_size or DEFAULTS[device].block_size, device)
    max_model_len = _longest_asked(settings, model)
    sizes = max_num_seqs, max_num_batched_tokens, max_model_len
    activations = _work_bytes(model, dtype, device, weights, ranks, sizes)
    logits = LOGITS_COPIES * max(max_num_seqs, LOGPROB_ROWS) * model.vocab_size * 4
    specs = rank_cache((*with_routes(model.cache, model.routes), *draft_specs), num_ranks // num_dp_ranks)
    dtypes = dtype, DTYPES[settings.cache.state_dtype], kv_dtype
    flags = settings.speculative.speculative_config is not None, backend_of(device).keeps_marked_states
    stages = stage_caches(specs, settings.model.pipeline_parallel_size)
    states = StateMemory.of(stages, dtypes, max_num_seqs, flags, num_parts)
    room = free - activations - logits - states.held_bytes
    groups = _groups(settings.cache, specs, max_model_len - max_num_batched_tokens - block_size)
    pools = GroupMemory.of(stages, groups, kv_dtype, block_size, max_num_seqs, max_num_batched_tokens, num_parts)
    per_block = sum(pools.bytes_per_block)
    given = _given_blocks(settings.cache, per_block)
    needed = settings.model.max_model_len or min(model.max_position_embeddings, LEAST_CONTEXT)
    smaller = _smaller_batch(settings.scheduler, max_num_seqs, max_num_batched_tokens)
    if smaller and (pools.least_bytes(needed) if given is None else given * per_block) > room:
        return plan_memory(settings, model, kv_dtype, dtype, device, weights, free, num_ranks, draft_specs, smaller)
    _check_room(room + states.held_bytes)
    if settings.model.max_model_len is None:
        max_model_len = _longest_that_fits(pools, max_model_len, room if given is None else given * per_block)
    kept = pools.kept(max_model_len)[0]
    most = min(CPU_KV_MEMORY // settings.model.ranks_per_node, room * CPU_KV_SHARE) if device == "cpu" else room
    num_blocks, num_snapshots = _divide(settings, pools, states, given, max_model_len, (int(most), room))
    kv_bytes, first_bytes = pools.num_bytes(num_blocks), pools.bytes_per_block[0]
    _check_fit(max_model_len, kept, num_blocks[0], block_size, first_bytes, room - kv_bytes)
    if batch is not None:
        logger.warning("steps have at most %d sequences and %d tokens, so that longer contexts fit into memory", *batch)
    limits = Limits(
        *(max_model_len, block_size, tuple(groups), tuple(num_blocks), max_num_seqs, max_num_batched_tokens),
        states.pool(num_snapshots),
        num_dp_ranks,
    )
    of_states = states.held_bytes + num_snapshots * states.bytes_per_slot
    return limits, MemoryBudget(sum(weights.values()), kv_bytes, activations, logits, of_states)


def _size_of_block(size: int, device: str) -> int:
    """The size, if the device's kernels read blocks of it. Raises ``ConfigError``."""
    if device == GPU and (size < LEAST_GPU_BLOCK or size & (size - 1)):
        raise ConfigError(f"block_size: on a GPU a power of two of at least {LEAST_GPU_BLOCK} is needed, not {size}")
    return size


def _divide(
    settings: EngineConfig,
    pools: GroupMemory,
    states: StateMemory,
    given: int | None,
    max_model_len: int,
    most: tuple[int, int],
) -> tuple[list[int], int]:
    """Blocks of each group, and snapshots of recurrent state: in the first of the ``most`` bytes, or in the second
    where the blocks are ``given``."""
    per_block = sum(pools.bytes_per_block)
    if given is None or not per_block:  # blocks without keys and values take no memory
        asked = settings.cache.kv_cache_memory  # here for models of states alone: else it gives the number of blocks
        largest = most[0] if asked is None else min(int(asked * GIB), most[1])
        size = max(least := pools.least_bytes(max_model_len), largest)
        num_snapshots = _num_snapshots(settings, states, size if per_block else 2 * size, size - least, most[1])
        size -= num_snapshots * states.bytes_per_slot
    else:
        size = given * per_block
        num_snapshots = _num_snapshots(settings, states, 2 * size, most[1] - size, most[1])
    num_blocks = pools.divide(size, max_model_len) if per_block else [given or pools.num_empty(max_model_len)]
    return num_blocks, num_snapshots


def _num_snapshots(settings: EngineConfig, states: StateMemory, size: int, spare: int, room: int) -> int:
    """Snapshots of recurrent state that the prefix cache keeps: as many as were asked for, or as take half of ``size``
    bytes and no more than ``spare``."""
    if not states.bytes_per_slot:
        return 0
    if room < 0:
        raise ConfigError(
            f"max_num_seqs: the recurrent states of all sequences take {states.held_bytes / GIB:.2f} GiB, which is "
            f"{-room / GIB:.2f} GiB more than are free besides weights and activations; lower max_num_seqs"
        )
    if not settings.cache.enable_prefix_caching:
        return 0
    asked = settings.cache.num_state_snapshots
    if asked is None:
        return max(0, min(size // 2, spare)) // states.bytes_per_slot
    if asked * states.bytes_per_slot > max(spare, 0):
        raise ConfigError(
            f"num_state_snapshots: {asked} take {asked * states.bytes_per_slot / GIB:.2f} GiB, and "
            f"{max(spare, 0) / GIB:.2f} GiB of memory are free for them; lower it"
        )
    return asked


def _groups(settings: CacheSettings, specs: Sequence[LayerCacheSpec], max_window: int) -> list[KVGroup]:
    """The KV groups of all layers; windows of ``max_window`` positions or more save no memory.

    With KV offloading there is one group, because the offload tiers store blocks of all layers.
    """
    groups = kv_groups(specs, max_window)
    if not settings.has_tiers or len(groups) == 1:
        return groups
    logger.info("blocks behind sliding windows are not freed: kv_offload_memory stores blocks of all layers")
    return kv_groups(specs)


def batch_limits(settings: SchedulerSettings, defaults: DeviceDefaults) -> tuple[int, int]:
    """Most sequences and tokens of a step; a limit that is not given follows from the one that is."""
    seqs, tokens = settings.max_num_seqs, settings.max_num_batched_tokens
    if seqs is None:
        seqs = min(defaults.max_num_seqs, tokens or defaults.max_num_seqs)
    return seqs, tokens or max(defaults.max_num_batched_tokens, seqs)


def _first_batch(
    settings: SchedulerSettings,
    model: ModelConfig,
    dtype: torch.dtype,
    device: str,
    free: int,
    ranks: tuple[int, int, int],
) -> tuple[int, int]:
    """``batch_limits``, with no more tokens by default than keep activations a small share of the free memory.

    ``ranks``: their number, and those of ranks that divide contexts and sequences.

    A sliding-window layer caches a step's tokens in addition to its windows, so that long steps would cost more there.
    """
    seqs, tokens = batch_limits(settings, DEFAULTS[device])
    if settings.max_num_batched_tokens is not None:
        return seqs, tokens
    has_windows = any(spec.window for spec in model.cache)
    most_bytes = 0 if has_windows else ACTIVATION_SHARE * free
    while tokens // 2 >= max(seqs, FULL_TOKENS) and _activation_bytes(model, tokens, dtype, *ranks) > most_bytes:
        tokens //= 2
    return seqs, tokens


def _smaller_batch(settings: SchedulerSettings, num_seqs: int, num_tokens: int) -> tuple[int, int] | None:
    """Half of the limits that are not given; ``None`` if that is no less or too little."""
    seqs, tokens = num_seqs, num_tokens
    if settings.max_num_seqs is None:
        seqs = max(min(seqs, LEAST_SEQS), seqs // 2)
    if settings.max_num_batched_tokens is None:
        tokens = max(min(tokens, LEAST_TOKENS), tokens // 2, seqs)
    return (seqs, tokens) if (seqs, tokens) != (num_seqs, num_tokens) else None


def _longest_asked(settings: EngineConfig, model: ModelConfig) -> int:
    asked = settings.model.max_model_len
    if asked is not None and asked > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len: {asked} is more than the model was made for, {model.max_position_embeddings}; "
            "hf_overrides can set another max_position_embeddings, and a rope_scaling for it"
        )
    return asked or model.max_position_embeddings


def _longest_that_fits(pools: GroupMemory, longest: int, size: int) -> int:
    """The longest context, up to ``longest``, of which one sequence fits into ``size`` bytes; else ``longest``."""
    if pools.least_bytes(longest) <= size:
        return longest
    block_size = pools.block_size
    blocks = bisect.bisect_right(
        range(longest // block_size + 1), size, key=lambda n: pools.least_bytes(n * block_size)
    )
    if blocks <= 1:
        return longest
    fitting = (blocks - 1) * block_size
    logger.warning(
        "max_model_len is %d, not the model's %d: %.2f GiB of memory are left for the KV cache, and one sequence of "
        "that length takes %.2f GiB",
        fitting,
        longest,
        size / GIB,
        pools.least_bytes(longest) / GIB,
    )
    return fitting


def _given_blocks(settings: CacheSettings, per_block: int) -> int | None:
    if settings.num_kv_blocks is not None:
        return settings.num_kv_blocks
    if settings.kv_cache_memory is None:
        return None
    if not per_block:  # all of it is for recurrent states
        return None
    num_blocks = int(settings.kv_cache_memory * GIB) // per_block
    if num_blocks == 0:
        raise ConfigError(f"kv_cache_memory: one block takes {per_block / GIB:.3g} GiB; give at least that")
    return num_blocks


def _check_room(room: int) -> None:
    if room < 0:
        raise ConfigError(
            f"weights, activations and logits take {-room / GIB:.2f} GiB more than there is; set quantization, raise "
            "tensor_parallel_size, or lower max_num_batched_tokens"
        )


def _check_fit(max_model_len: int, kept: int, num_blocks: int, block_size: int, per_block: int, left: int) -> None:
    """Raise ``ConfigError`` if a sequence does not fit; ``kept`` is the most positions of it that are held at once, and
    ``left`` the bytes that are free besides the cache."""
    room = left + num_blocks * per_block
    if num_blocks * block_size < kept:
        part = "" if kept == max_model_len else f", of which {kept} are kept by the model's window and a step,"
        raise ConfigError(
            f"max_model_len: {max_model_len} tokens{part} do not fit into a KV cache of {num_blocks} blocks of "
            f"{block_size}; lower max_model_len to {num_blocks * block_size}, or raise num_kv_blocks or kv_cache_memory"
        )
    if num_blocks * per_block > room:
        raise ConfigError(
            f"the KV cache needs {num_blocks * per_block / GIB:.2f} GiB ({num_blocks} blocks of {block_size} tokens) "
            f"but {max(room, 0) / GIB:.2f} GiB of memory are free besides weights and activations; "
            f"lower max_model_len (now {max_model_len}; {max(room // per_block, 0) * block_size} would fit), "
            "num_kv_blocks or kv_cache_memory"
        )


def _work_bytes(
    model: ModelConfig,
    dtype: torch.dtype,
    device: str,
    weights: Mapping[str, int],
    ranks: tuple[int, int, int],
    sizes: tuple[int, int, int],
) -> int:
    """Bytes that a step takes beside logits and caches.

    ``ranks``: as for ``_first_batch``; ``sizes``: most sequences, tokens, and a context.
    """
    (num_ranks, num_parts, num_dp_ranks), (_, num_tokens, max_model_len) = ranks, sizes
    activations = _activation_bytes(model, num_tokens, dtype, *ranks)
    if device != GPU:  # in float32, what each of a token's experts gives; see sum_over_experts
        return activations + min(num_tokens, RESULT_ROWS) * model.num_chosen_experts * model.hidden_size * 4
    activations += _copy_bytes(model, dtype, weights) + _scratch_bytes(model, dtype, num_ranks, *sizes)
    if num_parts > 1:
        return activations
    return activations + model.expanded_bytes(max_model_len, num_tokens, dtype.itemsize, num_ranks // num_dp_ranks)


def _activation_bytes(
    model: ModelConfig, num_tokens: int, dtype: torch.dtype, num_ranks: int, num_parts: int, num_dp_ranks: int
) -> int:
    """Peak activation bytes of a layer: the residual stream plus a rank's part of the MLP or of attention, which is all
    of it where all rows may be of sequences of one rank, and what ranks exchange that divide contexts among
    ``num_parts``."""
    heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim * num_dp_ranks
    widest = 3 * model.stream_size + max(3 * model.ffn_size, 3 * heads) // num_ranks
    scratch = ATTENTION_COPIES * MAX_SCRATCH * 4
    exchanged = 0
    if num_parts > 1:  # queries of their heads, results, those in the order of ranks, and what comes from all
        of_each = num_parts * dtype.itemsize + 4 * (2 * num_parts + num_ranks)
        exchanged = num_tokens * model.num_heads // num_ranks * model.head_dim * of_each
    return num_tokens * widest * dtype.itemsize + scratch + exchanged


def chunk_bytes(specs: Sequence[LayerCacheSpec], num_tokens: int, num_seqs: int, dtype: torch.dtype) -> int:
    """Bytes that kernels take to compute a recurrence in chunks: the state before each of them, and its inputs."""
    num_chunks = num_tokens // INTERVAL + min(num_seqs, 2 * num_tokens // INTERVAL)
    shapes = {tensor.shape for spec in specs for tensor in spec.state if tensor.is_recurrent}
    item = dtype.itemsize
    of_chunk = {(N, K, V): N * K * (V * item + 4) for N, K, V in shapes}
    of_token = {(N, K, V): N * ((3 * K + V + INTERVAL) * item + 8) for N, K, V in shapes}
    sizes = [num_chunks * of_chunk[shape] + num_tokens * of_token[shape] for shape in of_chunk]
    return max(sizes, default=0)


def _scratch_bytes(
    model: ModelConfig, dtype: torch.dtype, num_ranks: int, num_seqs: int, num_tokens: int, longest: int
) -> int:
    """Bytes that sampling and kernels of GPUs take besides activations."""
    histories = 4 * (num_seqs + 1) * longest  # for penalties, see ``sampling_state``
    return histories + chunk_bytes(rank_cache(model.cache, num_ranks), num_tokens, num_seqs, dtype)


def _copy_bytes(model: ModelConfig, dtype: torch.dtype, weights: Mapping[str, int]) -> int:
    """Bytes of the dense copy that kernels make of a quantised weight for many tokens."""
    if DENSE_FORMATS.issuperset(weights):
        return 0
    return min(2 * model.ffn_size * model.hidden_size, LARGEST_COPY) * dtype.itemsize


def _meminfo_available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _cgroup_available(folder: Path) -> int | None:
    """Bytes left by the limits of the control group (version 2); ``None`` without a limit."""
    try:
        limit, used = (folder / "memory.max").read_text().strip(), (folder / "memory.current").read_text()
    except OSError:
        return None
    return None if limit == "max" else max(0, int(limit) - int(used))
