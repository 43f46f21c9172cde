// The conversations: one for each document, and one without a document.

import * as api from "./api.js";
import { count, seconds, showAnswer } from "./gauge.js";

const at = (id) => document.getElementById(id);
const talks = new Map(); // id of a file, "" for none -> its conversation
let talk = null; // the one that is shown
let asking = null; // the AbortController of the question that is being answered
let refresh = () => {};
let model = null; // the model's id
let most = null; // tokens of an answer

/** Begin, with the conversation without a document. */
export function startTalk(refreshAll) {
  refresh = refreshAll;
  showTalk("", "No document");
  at("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = at("question").value.trim();
    if (text && !asking) ask(text);
  });
  at("question").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    at("ask").requestSubmit();
  });
  at("stop").addEventListener("click", () => asking?.abort());
  at("again").addEventListener("click", () => {
    talk.messages = [];
    talk.element.replaceChildren();
    at("again").hidden = true;
    at("question").focus();
  });
}

/** Show the conversation over a document. */
export function showTalk(file, name) {
  if (!talks.has(file)) talks.set(file, { file, messages: [], element: document.createElement("div") });
  talk = talks.get(file);
  at("talk-title").textContent = name;
  at("talks").replaceChildren(talk.element);
  at("problem").textContent = "";
  mark();
}

/** Show the buttons that are of use now. */
function mark() {
  at("send").disabled = Boolean(asking);
  at("stop").hidden = !asking;
  at("again").hidden = Boolean(asking) || !talk.element.childElementCount;
  at("talks").ariaBusy = String(Boolean(asking));
}

async function ask(text) {
  const mine = talk;
  const turn = at("turn").content.cloneNode(true).firstElementChild;
  const withFile = mine.file && !mine.messages.length;
  const parts = [{ type: "file", file: { file_id: mine.file } }, { type: "text", text }];
  const question = { role: "user", content: withFile ? parts : text };
  asking = new AbortController();
  at("problem").textContent = "";
  at("question").value = "";
  at("question").focus();
  turn.querySelector(".question").textContent = text;
  turn.classList.add("waiting");
  turn.querySelector(".note").textContent = "reading the prompt";
  mine.element.append(turn);
  mark();
  pane().scrollTop = pane().scrollHeight;
  const { answer, problem } = await follow([...mine.messages, question], turn);
  turn.classList.remove("waiting", "streaming");
  if (answer === null) {
    turn.remove();
    at("question").value ||= text;
  } else {
    mine.messages.push(question, { role: "assistant", content: answer });
  }
  asking = null;
  if (problem) at("problem").textContent = problem;
  mark();
  refresh();
}

/** Take the server's limit of new tokens. Earlier turns need some of this room too, and so an answer has a quarter. */
export function limitAnswers(room) {
  most = Math.max(1, Math.min(512, Math.floor(room / 4)));
}

/** Stream an answer into a turn. Returns its text, or null if there is none, and what went wrong. */
async function follow(messages, turn) {
  const seen = { start: performance.now(), first: null, last: null, usage: null, finish: "broken off" };
  const texts = { content: textIn(turn, ".answer"), reasoning_content: textIn(turn, ".reasoning p") };
  let problem = "";
  try {
    model ??= (await api.model()).id;
    if (most === null) limitAnswers((await api.gauge()).room);
    for await (const chunk of api.chat(model, messages, most, asking.signal)) {
      seen.usage = chunk.usage ?? seen.usage;
      const { delta = {}, finish_reason: finish } = chunk.choices[0] ?? {};
      seen.finish = finish ?? seen.finish;
      for (const [name, node] of Object.entries(texts)) {
        if (!delta[name]) continue;
        begin(seen, turn, name);
        const follows = pane().scrollHeight - pane().scrollTop - pane().clientHeight < 48;
        node.appendData(delta[name]);
        if (follows) pane().scrollTop = pane().scrollHeight;
      }
    }
  } catch (error) {
    if (error.name === "AbortError") seen.finish = "stopped";
    else problem = error.message;
  }
  turn.querySelector(".note").textContent = noteOf(seen);
  if (seen.first === null && seen.usage === null) return { answer: null, problem };
  const answer = texts.content.data;
  texts.content.data = answer.trim();
  return { answer, problem };
}

function textIn(turn, place) {
  const node = document.createTextNode("");
  turn.querySelector(place).append(node);
  return node;
}

/** Note the time of a piece of text, and show the place where it appears. */
function begin(seen, turn, name) {
  seen.last = performance.now();
  if (seen.first === null) {
    seen.first = seen.last;
    turn.classList.replace("waiting", "streaming");
    turn.querySelector(".note").textContent = "";
    showAnswer({ first: (seen.first - seen.start) / 1000, rate: null, cached: null });
  }
  if (name === "reasoning_content") turn.querySelector(".reasoning").hidden = false;
}

/** The line under an answer. It gives the gauge its figures too. */
function noteOf({ start, first, last, usage, finish }) {
  const notes = [];
  const wait = first === null ? null : (first - start) / 1000;
  const tokens = usage?.completion_tokens ?? 0;
  const rate = tokens > 1 && last > first ? ((tokens - 1) * 1000) / (last - first) : null;
  const cached = usage?.prompt_tokens_details.cached_tokens ?? null;
  if (wait !== null) showAnswer({ first: wait, rate, cached, prompt: usage?.prompt_tokens });
  if (finish === "length") notes.push("ended at the limit of new tokens");
  else if (finish !== "stop") notes.push(finish);
  if (wait !== null) notes.push(`first token after ${seconds(wait)}`);
  if (usage) notes.push(`${count(tokens)} new tokens`, `${count(cached)} of ${count(usage.prompt_tokens)} cached`);
  const guesses = usage?.completion_tokens_details;
  if (guesses?.accepted_prediction_tokens) notes.push(`${count(guesses.accepted_prediction_tokens)} of them guessed`);
  return notes.join(" · ");
}

/** What scrolls: the conversation on a wide screen, the page on a narrow one. */
function pane() {
  return at("talks").scrollHeight > at("talks").clientHeight ? at("talks") : document.scrollingElement;
}
