// One request of the page and the stream that answers it, kept with its time stamps. No element of the page here.

export const PARTS = [
  ["draft_wait_s", "waiting"],
  ["target_link_s", "network"],
  ["target_queue_s", "queue"],
  ["target_forward_s", "forward"],
  ["target_sampling_s", "sampler"],
  ["target_heads_s", "heads"],
];

// An error in the server's words; `status` is the HTTP status, 0 after the start of a stream.
export class Refused extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

function headers(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function refusal(response) {
  const text = await response.text();
  let message = text;
  try {
    message = JSON.parse(text).error.message;
  } catch { /* a proxy's answer: its text as it is */ }
  return new Refused(message || `HTTP ${response.status} ${response.statusText}`, response.status);
}

async function answered(path, options) {
  let response;
  try {
    response = await fetch(path, { cache: "no-store", credentials: "omit", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused("The gateway does not answer: it may have stopped, or the network is down.", 0);
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

// The JSON of a path. Throws Refused.
export async function get(path, key) {
  return (await answered(path, { headers: headers(key) })).json();
}

function salt() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

// The body of a request: `asked` has the values of the form.
export function bodyOf(asked, isSpeculating) {
  const body = {
    model: asked.model,
    max_tokens: asked.maxTokens,
    temperature: asked.temperature,
    stream: true,
    stream_options: { include_usage: true },
    cache_salt: salt(), // neither run finds the prompt, or the text of an earlier run, in a cache
    speculative: { enabled: isSpeculating, rounds: true, statistics: true },
  };
  if (asked.isChat) {
    const system = asked.system ? [{ role: "system", content: asked.system }] : [];
    body.messages = [...system, { role: "user", content: asked.prompt }];
    body.logprobs = true;
  } else {
    body.prompt = asked.prompt;
    body.logprobs = 0;
  }
  // A seed may need all 64 bits, which a JavaScript number has not: it is written into the text as it is.
  const text = JSON.stringify(body);
  return asked.seed === "" ? text : `${text.slice(0, -1)},"seed":${BigInt(asked.seed)}}`;
}

// An empty run. Times are milliseconds since its request; `tokens` and `rounds` grow as they arrive.
export function newRun(isSpeculating) {
  return { isSpeculating, tokens: [], rounds: [], statistics: null, reason: "", firstCount: 0, isStopped: false };
}

// Sends the request and takes its events; `onTokens` is called after each. Throws Refused, and AbortError if stopped.
export async function stream(run, asked, signal, onTokens) {
  const startMs = performance.now();
  const response = await answered(asked.isChat ? "v1/chat/completions" : "v1/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers(asked.key) },
    body: bodyOf(asked, run.isSpeculating),
    signal,
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", isWhole = false;
  for (;;) {
    const { value, done } = await read(reader);
    if (done && isWhole) return;
    if (done) throw new Refused("The stream broke off before its end.", 0);
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    // Comments, which keep the connection alive, are no data.
    const events = lines.filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim());
    try {
      for (const data of events) {
        if (data === "[DONE]") isWhole = true;
        else take(run, JSON.parse(data), performance.now() - startMs);
      }
    } finally {
      onTokens();
    }
  }
}

async function read(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused("The connection was lost before the end of the text.", 0);
  }
}

// Takes one event. Throws Refused for an error event.
export function take(run, event, atMs) {
  if (event.error) throw new Refused(event.error.message, 0);
  const choice = event.choices?.[0];
  const extra = event.speculative ?? {};
  if (extra.statistics) run.statistics = extra.statistics;
  if (choice?.finish_reason) run.reason = choice.finish_reason;
  const text = Array.from(choice?.delta?.content ?? choice?.text ?? "");
  const logprobs = choice?.logprobs?.content?.map((entry) => entry.logprob) ?? choice?.logprobs?.token_logprobs ?? [];
  const kinds = extra.kinds ?? [];
  let start = 0;
  kinds.forEach((kind, index) => {
    const end = index === kinds.length - 1 ? text.length : start + extra.text_lengths[index];
    const proposer = extra.proposers?.[index] ?? null;
    run.tokens.push({ text: text.slice(start, end).join(""), kind, proposer, logprob: logprobs[index], atMs, round: 0 });
    start = end;
  });
  if (!kinds.length && text.length && run.tokens.length) run.tokens.at(-1).text += text.join("");
  run.firstCount ||= run.tokens.length;
  let next = run.tokens.length - kinds.length;
  for (const round of extra.rounds ?? []) {
    const tokens = run.tokens.slice(next, next + round.num_output_tokens);
    for (const token of tokens) token.round = round.round_index;
    next += tokens.length;
    run.rounds.push({ ...round, tokens, end: next });
  }
}

// What the page says of a run after its first `count` tokens. Tokens per second are those after the first event with
// tokens, by the time after it: reading the prompt does not count.
export function figures(run, count = run.tokens.length) {
  const first = run.tokens[0]?.atMs ?? 0;
  const lastMs = count ? run.tokens[count - 1].atMs - first : 0;
  const rounds = run.rounds.filter((round) => round.end <= count);
  const offered = rounds.reduce((sum, round) => sum + round.draft_token_ids.length, 0);
  const accepted = rounds.reduce((sum, round) => sum + round.accepted.length, 0);
  const tokensPerS = count > run.firstCount && lastMs > 0 ? ((count - run.firstCount) / lastMs) * 1000 : 0;
  return { count, tokensPerS, firstMs: first, lastMs, offered, accepted, rounds: rounds.length };
}

// The draft tokens of a round as a tree: lists of children, in the order offered; what became of each.
export function treeOf(round) {
  const nodes = round.draft_token_ids.map((id, index) => ({
    text: round.draft_texts?.[index] ?? "", id, proposer: round.proposers[index], state: "discarded", children: [],
  }));
  const root = { children: [] };
  nodes.forEach((node, index) => {
    const row = round.parents.length ? round.parents[index] : index;
    (row ? nodes[row - 1] : root).children.push(node);
  });
  for (const index of round.accepted) nodes[index].state = "accepted";
  const last = round.accepted.length ? nodes[round.accepted.at(-1)] : root;
  const isWhole = round.tokens.length === round.accepted.length + 1; // else the text ended among the accepted ones
  const own = isWhole ? round.tokens.at(-1) : null;
  if (own?.kind === "recovered") for (const child of last.children) child.state = "struck";
  return { root, last, own };
}
