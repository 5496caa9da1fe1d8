"""The engine step by step, over a toy model without weights: what each step computes, and for which requests."""

import octavo
from octavo import SamplingParams


def main() -> None:
    engine = octavo.Engine(backend="toy", block_size=4, num_kv_blocks=64, max_num_batched_tokens=16)
    long = engine.add(list(range(10, 50)), SamplingParams(max_tokens=3))
    engine.step()  # the first part of its prompt
    short = engine.add("Hi", SamplingParams(max_tokens=5))
    while engine.has_work:
        result = engine.step()
        batch = ", ".join(f"{part.request_id}: {part.num_tokens} from {part.start}" for part in result.computed)
        print(f"step {result.step} computes {batch}")
    for request_id in (long, short):
        print(request_id, engine.completed[request_id].outputs[0].token_ids)


if __name__ == "__main__":
    main()
