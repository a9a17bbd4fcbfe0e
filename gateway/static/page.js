// The page: asks twice, with and without speculation, in turn on the same services, and replays both side by side.

import { Refused, figures, get, newRun, stream } from "./stream.js";
import { Column, partLegend, perSecond, showRounds } from "./view.js";

const SPEAK_EVERY_MS = 3000;
const REPLAY_MIN_MS = 4000;
const CHAT_PROMPT = "Why is the sky blue?";

const $ = (id) => document.getElementById(id);
const form = $("ask");
const columns = [new Column($("on"), "With speculation"), new Column($("off"), "Without speculation")];
const state = { model: "", runs: [], abort: null, frame: 0, chosenSlowdown: "", lender: null };

// The live region speaks at most once in SPEAK_EVERY_MS, and then what was said last.
const speech = { text: "", lastMs: -SPEAK_EVERY_MS, timer: 0 };

function say(text) {
  speech.text = text;
  if (speech.timer) return;
  speech.timer = setTimeout(() => {
    speech.timer = 0;
    speech.lastMs = performance.now();
    $("live").textContent = speech.text;
  }, Math.max(0, speech.lastMs + SPEAK_EVERY_MS - performance.now()));
}

function showError(error) {
  $("error").textContent = error.message;
  $("error").hidden = false;
  if (error.status === 404) state.model = ""; // it may be another one by now
  if (error.status === 401) {
    $("key-field").hidden = false;
    form.elements.key.focus();
  }
}

// Asks for the model, and whether it has a chat template. Throws Refused.
async function findModel() {
  const key = form.elements.key.value;
  const models = await get("v1/models", key);
  state.model = models.data[0].id;
  $("model").textContent = `Model: ${state.model}`;
  const info = await get("tokenizer_info", key).catch(() => null);
  if (!info) return;
  const [text, chat] = form.querySelectorAll("[name=mode]");
  chat.disabled = !info.chat_template;
  (chat.disabled ? text : chat).checked = true;
  $("mode-note").textContent = chat.disabled ? "The model has no chat template." : "";
  const { prompt } = form.elements;
  if (!chat.disabled && prompt.value === prompt.defaultValue) prompt.value = CHAT_PROMPT;
  onMode();
}

function onMode() {
  $("system-field").hidden = form.elements.mode.value !== "chat";
}

function asked() {
  const { mode, system, prompt, max_tokens: maxTokens, temperature, seed, key } = form.elements;
  return {
    model: state.model, isChat: mode.value === "chat", system: system.value, prompt: prompt.value,
    maxTokens: Number(maxTokens.value), temperature: Number(temperature.value), seed: seed.value, key: key.value,
  };
}

// While busy, what has the focus and is disabled gives it to Stop, and has it back afterwards.
function setBusy(isBusy) {
  const focused = document.activeElement;
  $("run").disabled = isBusy;
  $("stop").disabled = !isBusy;
  $("replay").disabled = isBusy || state.runs.some((run) => !run.tokens.length);
  if (isBusy && focused.matches("button:disabled")) {
    state.lender = focused;
    $("stop").focus();
  } else if (!isBusy && focused === $("stop")) {
    (state.lender ?? $("run")).focus();
  }
}

async function runBoth() {
  stopReplay();
  $("error").hidden = true;
  $("rounds").hidden = true;
  state.runs = [newRun(true), newRun(false)];
  state.abort = new AbortController();
  setBusy(true);
  try {
    if (!state.model) await findModel();
    $("result").hidden = false;
    $("factor").textContent = "";
    columns.forEach((column, index) => column.begin(state.runs[index]));
    for (const [index, run] of state.runs.entries()) await runOne(run, columns[index]);
    conclude();
  } catch (error) {
    if (error.name === "AbortError") {
      $("summary").textContent = "Stopped.";
      say("Stopped.");
    } else {
      if (!(error instanceof Refused)) console.error(error);
      $("summary").textContent = "";
      showError(error instanceof Refused ? error : new Error("The page does not understand the gateway's answer."));
    }
  } finally {
    if (state.runs[0].rounds.length) showRoundsOf(state.runs[0]);
    setBusy(state.frame !== 0);
  }
}

async function runOne(run, column) {
  const title = run.isSpeculating ? "With speculation" : "Without speculation";
  $("summary").textContent = run.isSpeculating ? "1 of 2: with speculation …" : "2 of 2: without speculation …";
  await stream(run, asked(), state.abort.signal, () => {
    column.show(run.tokens.length);
    say(`${title}: ${run.tokens.length} tokens.`);
  });
}

function showRoundsOf(run) {
  showRounds(run, $("round-list"), $("round-counts"));
  $("rounds").hidden = false;
}

// Both texts are there: compares them, and replays.
function conclude() {
  const [on, off] = state.runs;
  const [fast, plain] = state.runs.map((run) => figures(run));
  const factor = fast.tokensPerS && plain.tokensPerS ? fast.tokensPerS / plain.tokensPerS : 0;
  $("factor").textContent = factor ? `${factor.toFixed(2)} ×` : "";
  const speed = factor
    ? `as fast with speculation: ${perSecond(fast.tokensPerS)} tokens/s instead of ${perSecond(plain.tokensPerS)}.`
    : "Too few tokens to compare the speeds.";
  const accepted = fast.offered ? ` The target accepted ${fast.accepted} of ${fast.offered} draft tokens.` : "";
  $("summary").textContent = `${speed}${accepted} ${sameness(on, off)}`;
  say(`${$("factor").textContent} ${$("summary").textContent}`);
  if (!state.chosenSlowdown) $("slowdown").value = suggestedSlowdown();
  if (!matchMedia("(prefers-reduced-motion: reduce)").matches) replay();
}

function sameness(on, off) {
  const [text, other] = [on, off].map((run) => run.tokens.map((token) => token.text).join(""));
  if (text === other) return "Both texts are the same.";
  const isFixed = form.elements.seed.value !== "" || Number(form.elements.temperature.value) === 0;
  return isFixed ? "The texts differ, and should not: this is a defect." : "The texts differ: no seed was given.";
}

function suggestedSlowdown() {
  const longestMs = Math.max(...state.runs.map((run) => figures(run).lastMs));
  const options = [...$("slowdown").options].map((option) => option.value);
  return options.find((value) => Number(value) * longestMs >= REPLAY_MIN_MS) ?? options.at(-1);
}

// Shows both runs again from their first token on, each token at its own time; at once where motion is not wanted.
function replay() {
  stopReplay();
  const startMs = performance.now();
  const slowdown = Number($("slowdown").value);
  columns.forEach((column, index) => column.begin(state.runs[index]));
  const isAtOnce = matchMedia("(prefers-reduced-motion: reduce)").matches;
  const step = () => {
    const elapsedMs = isAtOnce ? Infinity : (performance.now() - startMs) / slowdown;
    const isOver = columns.map((column) => advance(column, elapsedMs)).every(Boolean);
    state.frame = isOver ? 0 : requestAnimationFrame(step);
    if (isOver) setBusy(false);
  };
  state.frame = 1;
  setBusy(true);
  step();
}

function advance(column, elapsedMs) {
  const { tokens } = column.run;
  const first = tokens[0]?.atMs ?? 0;
  let count = column.shown;
  while (count < tokens.length && tokens[count].atMs - first <= elapsedMs) count += 1;
  if (count > column.shown) column.show(count);
  return count === tokens.length;
}

function stopReplay() {
  if (!state.frame) return;
  cancelAnimationFrame(state.frame);
  state.frame = 0;
  for (const column of columns) column.show(column.run.tokens.length);
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  runBoth();
});
form.addEventListener("change", onMode);
form.elements.prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
});
$("stop").addEventListener("click", () => {
  if (!state.frame) return state.abort?.abort();
  stopReplay();
  setBusy(false);
});
$("replay").addEventListener("click", replay);
$("slowdown").addEventListener("change", () => {
  state.chosenSlowdown = $("slowdown").value;
  if (state.frame) replay();
});
$("part-legend").replaceChildren(...partLegend());
findModel().catch(showError);
