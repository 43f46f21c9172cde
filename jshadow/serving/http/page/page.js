// Starts the page: the state of the server, the key, and the figures, which are asked for again and again.

import * as api from "./api.js";
import { count, showGauge } from "./gauge.js";
import { limitUploads, showFiles, showNoLibrary, startLibrary } from "./library.js";
import { limitAnswers, showTalk, startTalk } from "./talk.js";

const at = (id) => document.getElementById(id);
const EVERY = 4000; // milliseconds

/** Ask the server for everything that is shown. */
async function refresh() {
  const message = await api.unready();
  try {
    const { id, max_model_len: most } = await api.model();
    at("model").textContent = `${id}, up to ${count(most)} tokens`;
    const figures = await api.gauge();
    showGauge(figures);
    limitUploads(figures.upload_limit);
    limitAnswers(figures.room);
    say(message ?? "");
    at("key").hidden = true;
    showFiles(await api.files());
  } catch (error) {
    if (error.code === "no_library") return showNoLibrary(error.message);
    at("key").hidden = error.status !== 401;
    say(error.status !== 401 ? error.message : api.hasKey() ? "The server refuses this key." : "");
  }
}

function say(text) {
  if (at("state").textContent !== text) at("state").textContent = text;
}

at("key").addEventListener("submit", (event) => {
  event.preventDefault();
  api.useKey(at("key-text").value.trim());
  at("key-text").value = "";
  refresh();
});
startTalk(refresh);
startLibrary(showTalk, refresh);
await refresh();
setInterval(() => document.hidden || refresh(), EVERY);
