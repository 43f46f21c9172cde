// The documents: the list, the choice, uploads and removal.

import * as api from "./api.js";
import { bytes, count, seconds } from "./gauge.js";

const at = (id) => document.getElementById(id);
const lines = new Map(); // id of a file -> its line
let refresh = () => {};
let last = Promise.resolve(); // the last upload; the next one begins after it
let most = Infinity; // bytes of a file, at most
let open = true; // whether the server takes files

/** Begin. `choose` is called with the id ("" for none) and the name of the chosen document. */
export function startLibrary(choose, refreshAll) {
  refresh = refreshAll;
  at("documents").addEventListener("change", () => choose(...chosen()));
  at("file").addEventListener("change", () => {
    addAll(at("file").files);
    at("file").value = "";
  });
  for (const name of ["dragover", "dragleave", "drop"]) addEventListener(name, onDrag);
}

function chosen() {
  const input = at("documents").querySelector("input:checked");
  return [input.value, input.closest("label").querySelector(".name").textContent];
}

/** Choose a document, as a click on it does. */
function check(input) {
  input.checked = true;
  input.dispatchEvent(new Event("change", { bubbles: true }));
}

/** Show the stored documents. A line that stays keeps its element, and so the focus. */
export function showFiles(files) {
  const found = new Set(files.map((file) => file.id));
  for (const [id, line] of lines) if (!found.has(id)) drop(id, line);
  for (const file of files) {
    if (!lines.has(file.id)) lines.set(file.id, newLine(file));
    fill(lines.get(file.id), file);
    if (!lines.get(file.id).isConnected) at("documents").append(lines.get(file.id));
  }
}

/** Refuse files of more bytes before they are sent: the server does not read them to their end. */
export function limitUploads(limit) {
  most = limit;
}

/** Say why the server takes no files. */
export function showNoLibrary(message) {
  open = false;
  at("drop").hidden = true;
  at("library-note").hidden = false;
  at("library-note").textContent = message;
}

function drop(id, line) {
  const none = at("documents").querySelector("input[value='']");
  const focused = line.contains(document.activeElement);
  if (line.querySelector("input").checked) check(none);
  line.remove();
  lines.delete(id);
  if (focused) at("documents").querySelector("input:checked").focus();
}

function newLine(file) {
  const line = at("document-line").content.cloneNode(true).firstElementChild;
  line.querySelector("input").value = file.id;
  const button = line.querySelector("button");
  const ask = (sure) => {
    button.classList.toggle("sure", sure);
    button.querySelector(".word").textContent = sure ? "Really remove?" : "Remove";
  };
  button.addEventListener("blur", () => ask(false));
  button.addEventListener("click", async () => {
    if (!button.classList.contains("sure")) return ask(true);
    ask(false);
    try {
      await api.remove(file.id);
    } catch (error) {
      line.querySelector(".wrong").textContent = error.message;
    }
    refresh();
  });
  return line;
}

function fill(line, file) {
  const put = (name, text) => {
    const place = line.querySelector(name);
    if (place.textContent !== text) place.textContent = text;
  };
  put(".name", file.filename || file.id);
  put(".size", file.status_details ? bytes(file.bytes) : `${count(file.tokens)} tokens, ${bytes(file.bytes)}`);
  put(".tier", file.tier);
  if (file.status_details) put(".wrong", file.status_details);
  line.querySelector("input").disabled = Boolean(file.status_details);
  put(".of", ` ${file.filename || file.id}`);
}

// Uploads

function onDrag(event) {
  if (!open || !event.dataTransfer?.types.includes("Files")) return;
  event.preventDefault();
  document.body.classList.toggle("dropping", event.type === "dragover");
  if (event.type === "drop") addAll(event.dataTransfer.files);
}

function addAll(files) {
  for (const file of files) {
    const line = at("upload-line").content.cloneNode(true).firstElementChild;
    for (const place of line.querySelectorAll(".name, .of")) place.textContent = file.name;
    const control = new AbortController();
    line.querySelector("button").addEventListener("click", () => {
      control.abort();
      line.remove();
    });
    at("uploads").append(line);
    last = last.then(() => control.signal.aborted || add(file, line, control.signal));
  }
}

async function add(file, line, signal) {
  const state = line.querySelector(".state");
  const progress = line.querySelector("progress");
  const start = performance.now();
  const clock = setInterval(() => {
    line.querySelector(".clock").textContent = seconds(Math.round((performance.now() - start) / 1000));
  }, 1000);
  const sent = (share) => {
    progress.value = share;
    if (share < 1) return;
    state.textContent = "reading";
    progress.removeAttribute("value");
  };
  state.textContent = "sending";
  try {
    if (file.size > most) throw new Error(`a file may have at most ${bytes(most)}, this one has ${bytes(file.size)}`);
    const stored = await api.upload(file, sent, signal);
    await refresh();
    line.remove();
    if (stored && !chosen()[0] && lines.has(stored.id)) check(lines.get(stored.id).querySelector("input"));
  } catch (error) {
    state.textContent = error.message;
    line.classList.add("wrong");
    progress.remove();
    line.querySelector(".word").textContent = "Dismiss";
  } finally {
    clearInterval(clock);
    line.querySelector(".clock").textContent = "";
  }
}
