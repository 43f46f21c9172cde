// The gauge: what the library holds, what full attention would need, and the figures of the answers.

const at = (id) => document.getElementById(id);
const NONE = "–";

export const count = (value) => value.toLocaleString("en");

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; value >= 1000 && unit < units.length - 1; unit += 1) value /= 1024;
  return `${value < 10 && unit ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

export function seconds(value) {
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  return `${value < 100 ? value.toPrecision(value < 10 ? 2 : 3) : Math.round(value)} s`;
}

const percent = (share) => `${share > 0 && share < 0.01 ? "<1" : Math.round(100 * share)} %`;

/** Show the figures of /v1/gauge. */
export function showGauge(figures) {
  showHeld(figures);
  const { rows, rows_in_use: running, rows_spilled: spilled, waiting } = figures;
  const sizes = ["device", "host"].filter((place) => rows[place]).map((place) => `${bytes(rows[place])} ${place}`);
  const moved = spilled ? ` (${count(spilled)} moved to host memory)` : "";
  at("tiers").replaceChildren(
    ...figures.tiers.map(tierLine),
    wordLine("rows", sizes.join(", ") || "none yet"),
    wordLine("requests", `${count(running)} running${moved}, ${count(waiting)} waiting`),
  );
  at("hits").textContent = figures.first_token_seconds === null ? NONE : percent(figures.hit_share);
  const engine = figures.busy_seconds_a_request;
  at("engine").textContent = engine ? seconds(engine) : NONE;
}

/** Show the figures of one answer. `first` is in seconds. A figure that is not known is null. */
export function showAnswer({ first, rate, cached, prompt }) {
  at("first").textContent = first === null ? NONE : seconds(first);
  at("rate").textContent = rate === null ? NONE : rate.toPrecision(rate < 100 ? 2 : 3);
  at("cached").textContent = cached === null ? NONE : `${count(cached)} of ${count(prompt)}`;
}

function showHeld({ stored_documents: documents, stored_tokens: tokens, ...sizes }) {
  const { stored_bytes: held, stored_device_bytes: device, full_attention_bytes: full } = sizes;
  const split = device !== null && device < held; // the rest of the states stays in host memory
  const main = split ? device : held;
  const most = Math.max(held, full, 1);
  at("bar").hidden = !documents;
  at("bar").style.setProperty("--full", full / most);
  at("bar").style.setProperty("--held", held / most);
  at("bar").style.setProperty("--main", main / most);
  if (!documents) {
    at("headline").replaceChildren(strong("Nothing held yet"));
    at("held-note").textContent = "A document is read once. Its state is kept, and each question starts from it.";
    return;
  }
  const than = main < full ? "instead of " : "where full attention needs ";
  const rest = document.createElement("span");
  rest.append(split ? "of device memory " : "held ", than, strong(bytes(full), "instead"));
  at("headline").replaceChildren(strong(bytes(main)), " ", rest);
  const things = documents === 1 ? "1 document" : `${count(documents)} documents`;
  const all = split
    ? `if all are in use; ${bytes(held)} with their part in host memory`
    : `${percent(held / full)} of the keys and values of full attention`;
  at("held-note").textContent = `${things}, ${count(tokens)} tokens, ${all}`;
}

function strong(text, name = "") {
  const element = document.createElement("strong");
  element.textContent = text;
  element.className = name;
  return element;
}

function tierLine({ tier, bytes: used, limit }) {
  const line = document.createElement("li");
  const bar = document.createElement("i");
  const size = document.createElement("span");
  if (limit === null) size.textContent = `${bytes(used)}, no limit`;
  else size.textContent = limit ? `${bytes(used)} of ${bytes(limit)}` : "off";
  bar.style.setProperty("--used", limit ? Math.min(used / limit, 1) : 0);
  bar.className = limit ? "" : "bare";
  line.append(strong(tier), bar, size);
  return line;
}

function wordLine(name, text) {
  const line = document.createElement("li");
  const place = document.createElement("span");
  place.textContent = text;
  line.className = "words";
  line.append(strong(name), place);
  return line;
}
