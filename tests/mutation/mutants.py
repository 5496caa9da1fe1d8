"""The breakages: in which file, what stands there, and what stands there instead."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """``old`` must be in ``file`` exactly once."""

    file: str
    old: str
    new: str
    equal_because: str = ""
    """Why no test can tell, where that is so."""


SCHEDULER = "engine/scheduler.py"
STEP_BUDGET = "engine/timing/step_budget.py"
ADMISSION = "engine/sequence_admission.py"
POLICIES = "engine/policies/"

MUTANTS = [
    # Token budget of a step.
    Mutant(SCHEDULER, "most = budget - num_behind", "most = budget"),
    Mutant(SCHEDULER, "budget -= min(num_taken, asked + len(drafts))", "budget -= num_tokens"),
    Mutant(SCHEDULER, "self._reserve_blocks(seq, start + num_taken)", "self._reserve_blocks(seq, start + num_tokens)"),
    Mutant(ADMISSION, "is_free = len(self.running) + len(self.leaving) + ", "is_free = len(self.running) + "),
    Mutant(ADMISSION, "len(running) if num_spare is None else num_spare", "0 if num_spare is None else num_spare"),
    Mutant(SCHEDULER, "is_sorted = is_sorted and (newest is None or newest.order < seq.order)", "is_sorted = True"),
    Mutant(SCHEDULER, "budget += shares.pop(seq, 0)", "budget += shares.get(seq, 0)"),
    Mutant(SCHEDULER, "self.cache.note_filled(total_budget - rest)", "self.cache.note_filled(total_budget)"),
    Mutant("engine/scheduler.py", "samples = end == len(tokens)", "samples = end >= len(tokens) - 1"),
    Mutant("engine/scheduler.py", "tokens += [None] * len(drafts)", "pass"),
    # Preemption, and the end of sequences.
    Mutant(SCHEDULER, "not other.num_in_flight and other.dp_rank == seq.dp_rank", "other.dp_rank == seq.dp_rank"),
    Mutant(SCHEDULER, "if other is seq:\n                break", "if other is seq:\n                continue"),
    Mutant(
        ADMISSION,
        "            self.waiting.leave(seq)\n            self.waiting.push(seq)",
        "            self.waiting.push(seq)",
    ),
    Mutant(
        SCHEDULER, "if seq.status is Status.FINISHED and not seq.num_in_flight:", "if seq.status is Status.FINISHED:"
    ),
    Mutant(ADMISSION, "self.yielding.items() if not seq.num_in_flight]", "self.yielding.items()]"),
    Mutant(
        SCHEDULER, "seq.num_computed_tokens = item.settled_start", "seq.num_computed_tokens = item.settled_start + 1"
    ),
    Mutant(SCHEDULER, "while seq.tokens[-1] is None:", "if seq.tokens[-1] is None:"),
    # What a result means.
    Mutant("engine/stopping.py", "num_committed += len(tokens) - 1", "num_committed += len(tokens)"),
    Mutant("engine/stopping.py", " and tokens[0] not in seq.stop_token_ids", ""),
    Mutant("engine/stopping.py", "num_committed + 1 < seq.max_computed_tokens", "True"),
    Mutant(SCHEDULER, "sum([len(output.tokens) for output in outputs])", "len(outputs)"),
    Mutant("engine/stopping.py", "num_rejected = 1 + num_drafts - len(result.tokens)", "num_rejected = 0"),
    Mutant("engine/stopping.py", "cache.truncate(seq, seq.num_computed_tokens - num_rejected)", "pass"),
    Mutant("engine/stopping.py", "if count == room:", "if count == room + 1:"),
    Mutant(
        "engine/fault_isolation.py", "for items in (members[half:], members[:half]):", "for items in (members[:half],):"
    ),
    Mutant("engine/fault_isolation.py", "if is_trial and self._tried.failed_alone:", "if is_trial:"),
    # Prefill priority, and drafts.
    Mutant(
        "engine/sequence_admission.py",
        "if self.promised or not (waiting and self.can_admit) or waiting.is_closed(self.running):",
        "if not waiting:",
    ),
    Mutant(
        "engine/speculative/proposer.py",
        "for length in self.lengths:\n            start",
        "for length in self.lengths[:1]:\n            start",
    ),
    Mutant("engine/speculative/proposer.py", "self._num_seen = max(self._num_seen, last - 1)", "self._num_seen = last"),
    Mutant("engine/speculative/proposer.py", "grown[len(grown) - (last - start)]", "grown[0]"),
    Mutant("engine/speculative/proposer.py", "num_pending + count)[num_pending:]", "count)"),
    Mutant("engine/stopping.py", "seq.num_rejected += num_rejected", "pass"),
    Mutant("types.py", "return self.start - (self.seq.num_rejected - self.num_rejected)", "return self.start"),
    # Queues and policies.
    Mutant(
        "engine/waiting.py", "return self._entry_of.get(entry[2].id) is entry", "return entry[2].id in self._entry_of"
    ),
    Mutant("engine/waiting.py", "if len(self._heap) > 2 * len(entries):", "if False:"),
    Mutant(POLICIES + "priority.py", "seq.request.priority * self.ageing", "seq.request.priority * 1e9"),
    Mutant(POLICIES + "shortest_first.py", "len(seq.tokens) / 1000", "-len(seq.tokens) / 1000"),
    Mutant(POLICIES + "longest_prefix.py", "arrival - num_cached / 1000", "arrival + num_cached / 1000"),
    Mutant(POLICIES + "longest_prefix.py", "self.move(seq, self._place_now(seq))", "pass"),
    Mutant(POLICIES + "deadline.py", "self._num_admitted % LATE_SHARE == LATE_SHARE - 1", "False"),
    Mutant(POLICIES + "deadline.py", "and not seq.first_scheduled", ""),
    Mutant(POLICIES + "fair.py", "tenant.counter = max(tenant.counter, self.floor)", "pass"),
    Mutant(POLICIES + "fair.py", "seq.account.counter += cost / seq.account.weight", "seq.account.counter += cost"),
    Mutant(
        POLICIES + "fair.py",
        "(own.num_running + 1) / own.weight > (other.num_running - 1)",
        "own.num_running / own.weight >= other.num_running",
    ),
    Mutant(POLICIES + "fair.py", "if self._by_rank[0] != tenant.rank:", "if False:"),
    Mutant(POLICIES + "fair.py", "return (seq.account.counter, *seq.order)", "return seq.order"),
    Mutant(ADMISSION, "if (count := _num_uncomputed(seq)) > left:", "if (count := _num_uncomputed(seq)) < left:"),
    Mutant(ADMISSION, "if not has_place:", "if True:"),
    Mutant(POLICIES + "round_robin.py", "if self._had_its_turn(seq):", "if False:"),
    Mutant(POLICIES + "victims.py", "return min(candidates, key", "return max(candidates, key"),
    Mutant(STEP_BUDGET, "num_pending > 0 and num_cut < num_running and ", "num_cut < num_running and "),
    Mutant(STEP_BUDGET, "np.maximum(seconds - alone, 0) + delay", "np.maximum(seconds - alone, 0)"),
    Mutant(STEP_BUDGET, "np.maximum(seconds - alone, 0) + delay", "seconds + delay"),
    Mutant(STEP_BUDGET, "max(num_rows, num_running + LEAST_CHUNK)", "num_rows"),
    Mutant("engine/timing/step_model.py", "seconds = min(seconds, OUTLIER * expected) or seconds", "pass"),
    # Blocks.
    Mutant("cache/kv_cache.py", "least = (len(seq.tokens) - 1) // self", "least = len(seq.tokens) // self"),
    Mutant("cache/kv_cache.py", "if least == max(depths):", "if True:"),
    Mutant("cache/kv_cache.py", "[of_step if group.window else num_tokens", "[num_tokens if group.window else of_step"),
    Mutant("cache/kv_cache.py", "min(count for _, count in parts)", "max(count for _, count in parts)"),
    Mutant("cache/kv_cache.py", "min([len(held.block_table)", "max([len(held.block_table)"),
    Mutant("cache/group_cache.py", "- end.depth + num_idle", "- end.depth"),
    Mutant("cache/group_cache.py", "max(0, num_tokens + 1 - self.window)", "max(0, num_tokens + 2 - self.window)"),
    Mutant("cache/group_cache.py", "is None or matched[0] != version", "is None"),
    Mutant("cache/kv_cache.py", "        self.num_filled -= seq.num_computed_tokens\n", ""),
    Mutant("cache/radix_tree.py", "num_there = num_there + 1 if node.block >= 0 else 0", "num_there += 1"),
    Mutant("cache/radix_tree.py", "and not node.children and not node.num_ends:", "and not node.children:"),
    Mutant(SCHEDULER, "most = min(budget, ", "most = max(budget, "),
    Mutant(
        "cache/group_cache.py",
        "for block in reversed(held.block_table[held.first_block :]):",
        "for block in held.block_table[held.first_block :]:",
    ),
    Mutant("cache/group_cache.py", "elif child.block != own:", "elif False:"),
    Mutant(
        "cache/group_cache.py",
        "return num_missing <= len(self.pool.free_blocks) + len(self.tree.idle)",
        "return num_missing <= len(self.pool.free_blocks) + len(self.tree.idle) + 1",
    ),
    Mutant(
        "cache/group_cache.py",
        "max(num_spare, self.num_spared) if num_spare else 0",
        "max(num_spare, self.num_spared)",
    ),
    Mutant(
        "cache/group_cache.py",
        "len(seq.tokens) - 1 - end.depth * self.block_size",
        "len(seq.tokens) - end.depth * self.block_size",
    ),
    Mutant("cache/kv_cache.py", "if may_share and not contents else ([], 0)", "if not contents else ([], 0)"),
    Mutant("cache/kv_cache.py", "self.num_copied += num_copied", "self.num_copied += 1"),
    Mutant(
        "cache/group_cache.py",
        "            held.table_version += 1\n            self.num_slots",
        "            self.num_slots",
    ),
    Mutant(
        "cache/group_cache.py",
        "held.block_table[self.blocks_for(num_tokens) :]",
        "held.block_table[self.blocks_for(num_tokens) + 1 :]",
    ),
    Mutant("cache/radix_tree.py", "node.edges[max(index - 1, 0) : index + 1]", "node.edges[index : index + 1]"),
    Mutant("cache/radix_tree.py", "node.edges[max(index - 1, 0) : index + 1]", "node.edges[max(index - 1, 0) : index]"),
    Mutant("cache/radix_tree.py", "[: limit + num_salts]", ""),
    Mutant("cache/radix_tree.py", "_num_equal(edge, key) - num_salts", "_num_equal(edge, key)"),
    Mutant("cache/radix_tree.py", "return edge if index else (salt, *edge)", "return edge"),
    Mutant(
        "cache/radix_tree.py",
        "self.node_of.get(node.block) is not node:",
        "self.node_of.get(node.block) is None:",
        "a released node has no block",
    ),
    Mutant("cache/radix_tree.py", "if parent.is_idle and not parent.children and parent.entry is None:", "if False:"),
    Mutant("cache/radix_tree.py", "if on_path or not all(", "if not all("),
    Mutant("cache/eviction.py", "return (node.uses, node.rested)", "return (-node.uses, node.rested)"),
    Mutant("cache/eviction.py", "if len(protected) > self._max_protected:", "if False:"),
    Mutant("cache/pinned_blocks.py", "if self._holds(note):\n                self.unpin(note[2])", "pass"),
    Mutant(
        "cache/kv_events.py",
        "chain_hash(parent.hash, tokens, salt)\n        self",
        "chain_hash(parent.hash, tokens)\n        self",
    ),
    # What is told of it.
    Mutant("telemetry/explain.py", 'if before.kind in ("arrived", "preempted"):', 'if before.kind == "arrived":'),
    Mutant("telemetry/explain.py", "min(a.last, b.last) - max(a.first, b.first)", "min(a.last, b.last) - a.first"),
    # Slower tiers.
    Mutant("cache/offload.py", '"" if start else salt', '""'),
    Mutant("cache/offload.py", "seq.salt), num_cached, None)", "seq.salt), 0, None)"),
    Mutant("cache/offload.py", "self.host.get(key) if pending is None else pending()", "self.host.get(key)"),
    Mutant("cache/offload.py", "self.disk.put(key, content)", "pass"),
    Mutant("cache/offload_tiers.py", "stored[:CHECKSUM_BYTES] == checksum(key, content)", "len(content) > 0"),
    Mutant("cache/offload_tiers.py", "digest_size=CHECKSUM_BYTES, key=key)", "digest_size=CHECKSUM_BYTES)"),
    Mutant(
        "cache/offload_tiers.py",
        "            if content is not None:\n                self._contents.move_to_end(key)\n",
        "",
    ),
    Mutant("cache/kv_cache.py", "contents[: len(table) - first - 1]", "contents[: len(table) - first]"),
]
