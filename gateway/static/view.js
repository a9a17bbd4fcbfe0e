// The elements of a run: its text, token by token, and its rounds. Model text enters as text nodes only.

import { PARTS, figures, treeOf } from "./stream.js";

const PROPOSERS = {
  draft: "the draft model", ngram: "the n-gram proposer", suffix: "an earlier text", prediction: "the prediction",
  heads: "the target's heads",
};

export function element(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

// Token text with its white space and control characters made visible.
function visible(text, id) {
  if (!text) return id === undefined ? "∅" : `⟨${id}⟩`;
  return text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "·").replace(/\p{Cc}/gu, "�");
}

function unseen(text) {
  return element("span", "unseen", text);
}

export function perSecond(value) {
  return value ? value.toFixed(value < 10 ? 1 : 0) : "–";
}

function percent(share) {
  return `${Math.round(100 * share)}%`;
}

function fact(name, value) {
  return element("div", "", element("dt", "", name), element("dd", "", value));
}

// One column: the figures and the text of a run. `show(count)` shows its first tokens.
export class Column {
  constructor(article, title) {
    this.run = null;
    this.shown = 0;
    this.speed = element("strong", "", "–");
    this.facts = element("dl", "facts");
    this.text = element("div", "text");
    this.text.role = "group";
    this.text.ariaLabel = `Text ${title.toLowerCase()}. Arrow keys go from token to token.`;
    this.detail = element("p", "detail");
    this.detail.id = `${article.id}-detail`;
    const heading = element("h3", "", title);
    heading.id = `${article.id}-title`;
    article.replaceChildren(heading, element("p", "speed", this.speed, " tokens/s"), this.facts, this.text, this.detail);
    this.text.addEventListener("keydown", (event) => this.move(event));
    for (const kind of ["focusin", "mouseover"]) {
      this.text.addEventListener(kind, (event) => this.describe(event.target));
    }
  }

  begin(run) {
    this.run = run;
    this.shown = 0;
    this.text.replaceChildren();
    this.detail.replaceChildren();
    this.show(0);
  }

  show(count) {
    for (; this.shown < count; this.shown += 1) {
      const token = this.run.tokens[this.shown];
      const made = element("span", `token ${token.kind}`, token.text);
      made.dataset.index = this.shown;
      made.tabIndex = this.text.querySelector("[tabindex='0']") || !token.text ? -1 : 0;
      made.setAttribute("aria-describedby", this.detail.id);
      this.text.append(made);
    }
    const seen = figures(this.run, this.shown);
    this.speed.textContent = perSecond(seen.tokensPerS);
    const accepted = seen.offered ? percent(seen.accepted / seen.offered) : "–";
    this.facts.replaceChildren(
      fact("tokens", String(this.shown)),
      fact("first after", this.shown ? `${seen.firstMs.toFixed(0)} ms` : "–"),
      fact("tokens a round", seen.rounds ? (seen.count / seen.rounds).toFixed(2) : "–"),
      fact("draft tokens accepted", this.run.isSpeculating ? accepted : "off"),
    );
  }

  // Arrow keys, Home and End: one token is in the tab order, the others are reached from it.
  move(event) {
    const tokens = [...this.text.children].filter((token) => token.textContent);
    const at = tokens.indexOf(event.target);
    const last = tokens.length - 1;
    const to = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: last }[event.key];
    if (to === undefined || at < 0) return;
    event.preventDefault();
    const next = tokens[Math.max(0, Math.min(to, last))];
    event.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }

  describe(target) {
    const index = Number(target.dataset.index);
    const token = this.run?.tokens[index];
    if (!token) return;
    const parts = [`Token ${index + 1} “${visible(token.text)}”`, token.kind];
    if (token.kind === "accepted" && token.proposer) parts.push(`proposed by ${PROPOSERS[token.proposer] ?? token.proposer}`);
    if (Number.isFinite(token.logprob)) {
      parts.push(`logprob ${token.logprob.toFixed(2)} (probability ${Math.exp(token.logprob).toPrecision(2)})`);
    }
    parts.push(`round ${token.round}`);
    this.detail.textContent = parts.join(", ");
  }
}

function draftToken(node) {
  const text = visible(node.text, node.id);
  const word = { accepted: "kept ", struck: "replaced ", discarded: "discarded " }[node.state];
  const made = element(node.state === "struck" ? "del" : "span", `token ${node.state}`, unseen(word), text);
  made.title = `${word}draft token of ${PROPOSERS[node.proposer] ?? node.proposer}`;
  return made;
}

function ownToken(own) {
  const made = element("span", `token ${own.kind}`, unseen(`${own.kind} `), visible(own.text));
  made.title = `${own.kind} token, the target's own`;
  return made;
}

// A node and what follows it in one row; where the tree forks, the siblings are stacked.
function branch(first, tree) {
  const row = element("span", "branch");
  for (let node = first; node;) {
    if (node !== tree.root) row.append(draftToken(node));
    const isReplaced = node === tree.last.children[0] && node.state === "struck";
    const isEnd = node === tree.last && !(tree.last.children.length && tree.own?.kind === "recovered");
    if (tree.own && (isReplaced || isEnd)) row.append(ownToken(tree.own));
    if (node.children.length > 1) row.append(element("span", "stack", ...node.children.map((child) => branch(child, tree))));
    node = node.children.length === 1 ? node.children[0] : null;
  }
  return row;
}

function ms(seconds) {
  return (1000 * seconds).toFixed(2);
}

// The bar of a round's time, as long as its share of the longest shown, and the numbers below it.
function timeOf(round, longestS) {
  const bar = element("div", "bar");
  bar.ariaHidden = "true";
  bar.style.width = `${Math.max(1, Math.min(100, (100 * round.round_s) / longestS))}%`;
  const numbers = element("div", "numbers");
  for (const [field, name] of PARTS) {
    const part = element("span", `part ${name}`);
    part.style.width = `${round.round_s ? (100 * round[field]) / round.round_s : 0}%`;
    bar.append(part);
    numbers.append(element("span", `number ${name}`, unseen(`${name} `), ms(round[field])), " ");
  }
  numbers.append(element("strong", "", unseen("in all "), ms(round.round_s)));
  return element("div", "time", bar, numbers);
}

export function partLegend() {
  const parts = PARTS.map(([, name]) => element("span", "", element("span", `swatch ${name}`), name));
  return [...parts, element("span", "", "milliseconds of a round, then all of it: what is left is the coordinator's own")];
}

// The list of rounds and its counts. The round that read the prompt does not set the scale of the bars.
export function showRounds(run, list, counts) {
  const sums = { rounds: run.rounds.length, offered: 0, accepted: 0, struck: 0, discarded: 0 };
  const longestS = Math.max(1e-9, ...run.rounds.slice(1).map((round) => round.round_s));
  list.replaceChildren(...run.rounds.map((round) => {
    const tree = treeOf(round);
    const all = collect(tree.root);
    sums.offered += all.length;
    for (const node of all) sums[node.state] += 1;
    const kept = all.length ? `${round.accepted.length} of ${all.length} kept` : "no draft tokens";
    const title = element("div", "round", element("strong", "", `Round ${round.round_index}`), " ", element("span", "quiet", kept));
    return element("li", "", title, element("div", "offer", branch(tree.root, tree)), timeOf(round, longestS));
  }));
  Object.assign(counts.dataset, sums);
  counts.textContent = `${sums.rounds} rounds offered ${sums.offered} draft tokens: ${sums.accepted} kept, `
    + `${sums.struck} replaced, ${sums.discarded} discarded.`;
}

function collect(node) {
  return node.children.flatMap((child) => [child, ...collect(child)]);
}
