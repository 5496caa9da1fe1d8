// A streamed answer of /v1/chat/completions, written into its message as it comes.
import { ask, events } from "./server.js";

const LEAST_SECONDS = 0.05; // below which a rate tells nothing

// Reads the answer to `body` into `message`, which counts its changes, and calls `changed` after each piece. What came stays,
// whatever happens.
export async function readAnswer(message, body, signal, changed) {
  const times = { started: performance.now(), first: 0 };
  const count = () => { message.changes = (message.changes ?? 0) + 1; };
  count();
  delete message.problem;
  delete message.reason;
  let usage;
  try {
    for await (const event of events(await ask("/v1/chat/completions", body, signal))) {
      usage = event.usage ?? usage;
      take(message, event, times);
      count();
      changed();
    }
    if (!message.reason) message.problem = "The answer ended before it was complete. What came is kept.";
  } catch (error) {
    if (error.name === "AbortError") message.reason = "stopped";
    else message.problem = error.isGone && times.first ? `${error.message} What came of the answer is kept.` : error.message;
  } finally {
    message.facts = factsOf(times, usage);
    if (message.calls) message.calls = message.calls.filter(Boolean);
    count();
  }
}

function take(message, event, times) {
  if (event.error) throw new Error(event.error.message ?? String(event.error));
  message.requestId = event.id ?? message.requestId;
  const choice = event.choices?.[0];
  if (!choice) return;
  message.reason = choice.finish_reason ?? message.reason;
  const { content, reasoning_content: thoughts, reasoning, tool_calls: calls } = choice.delta ?? {};
  if (content || thoughts || reasoning || calls) times.first ||= performance.now();
  message.text += content ?? "";
  if (thoughts ?? reasoning) message.thoughts = (message.thoughts ?? "") + (thoughts ?? reasoning);
  for (const part of calls ?? []) {
    message.calls ??= [];
    const call = (message.calls[part.index] ??= { id: part.id, name: "", arguments: "" });
    call.name += part.function?.name ?? "";
    call.arguments += part.function?.arguments ?? "";
  }
  for (const { token, logprob, top_logprobs: top } of choice.logprobs?.content ?? []) {
    (message.logprobs ??= []).push({ token, logprob, top: top.map((each) => [each.token, each.logprob]) });
  }
}

function factsOf({ started, first }, usage) {
  const facts = {};
  if (first) facts.first = first - started;
  if (usage) Object.assign(facts, { prompt: usage.prompt_tokens, output: usage.completion_tokens });
  const seconds = (performance.now() - first) / 1000;
  if (first && usage?.completion_tokens > 1 && seconds > LEAST_SECONDS) facts.rate = (usage.completion_tokens - 1) / seconds;
  return facts;
}
