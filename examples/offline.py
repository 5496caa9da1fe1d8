"""Texts for many prompts at once: they share the engine, and each comes back in the place of its prompt."""

import octavo
from octavo import SamplingParams

PROMPTS = ["The capital of France is", "Water boils at", "A haiku about the sea:"]


def main(model: str = "smollm2-135m") -> None:
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=32, seed=1)
    with octavo.LLM(model) as llm:
        for result in llm.generate(PROMPTS, params):
            print(f"{result.prompt} ->{result.outputs[0].text!r}")


if __name__ == "__main__":
    main()
