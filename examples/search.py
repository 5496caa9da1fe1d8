"""Embeddings: which of some texts is nearest to a question."""

import octavo

TEXTS = ["Cats sleep most of the day.", "The train leaves at nine.", "Bread is made of flour and water."]
QUESTION = "When does the train go?"


def main(model: str = "smollm2-135m") -> None:
    with octavo.LLM(model) as llm:
        question, *texts = (output.outputs.embedding for output in llm.embed([QUESTION, *TEXTS]))
    scores = [sum(a * b for a, b in zip(question, text, strict=True)) for text in texts]
    for score, text in sorted(zip(scores, TEXTS, strict=True), reverse=True):
        print(f"{score:.3f} {text}")


if __name__ == "__main__":
    main()
