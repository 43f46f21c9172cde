// The server's routes. Nothing here touches the page.

const KEY = "jshadow-key";

export class ServerError extends Error {
  constructor(status, message, code = null) {
    super(message);
    this.status = status; // 0: there was no response
    this.code = code;
  }
}

/** Keep an API key until the tab is closed. */
export function useKey(key) {
  sessionStorage.setItem(KEY, key);
}

export const hasKey = () => Boolean(sessionStorage.getItem(KEY));

function keyHeader() {
  const key = sessionStorage.getItem(KEY);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/** The error of a response, in the server's words. */
function errorOf(status, text) {
  try {
    const { message, code } = JSON.parse(text).error;
    return new ServerError(status, message, code);
  } catch {
    return new ServerError(status, `The server answered with status ${status}.`);
  }
}

const noAnswer = () => new ServerError(0, "The server does not answer.");

async function send(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: { ...keyHeader(), ...options.headers } });
  } catch (error) {
    throw error.name === "AbortError" ? error : noAnswer();
  }
  if (!response.ok) throw errorOf(response.status, await response.text());
  return response;
}

const json = async (path, options) => (await send(path, options)).json();

export const gauge = () => json("/v1/gauge");
export const files = async () => (await json("/v1/files")).data;
export const remove = (id) => json(`/v1/files/${encodeURIComponent(id)}`, { method: "DELETE" });
export const model = async () => (await json("/v1/models")).data[0];

/** Whether the server takes requests. Returns the reason if it does not, and null if it does. */
export async function unready() {
  try {
    await send("/ready");
    return null;
  } catch (error) {
    return error.message;
  }
}

/**
 * Send a file. The promise resolves when its state is stored, and also after an abort by `signal`, with null.
 * `sent` is called with the share of the bytes that are sent.
 */
export function upload(file, sent, signal) {
  // fetch() does not tell how much of a body is sent, XMLHttpRequest does.
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    const form = new FormData();
    form.append("purpose", "user_data");
    form.append("file", file);
    request.open("POST", "/v1/files");
    for (const [name, value] of Object.entries(keyHeader())) request.setRequestHeader(name, value);
    request.upload.onprogress = (event) => sent(event.loaded / event.total);
    request.upload.onload = () => sent(1);
    request.onerror = () => reject(noAnswer());
    request.onabort = () => resolve(null);
    signal.addEventListener("abort", () => request.abort());
    request.onload = () => {
      if (request.status === 200) resolve(JSON.parse(request.responseText));
      else reject(errorOf(request.status, request.responseText));
    };
    request.send(form);
  });
}

/** Yield the chunks of an answer of at most `most` tokens, as OpenAI's API streams them. */
export async function* chat(model, messages, most, signal) {
  // The likeliest tokens: a question about a document has one answer.
  const drawing = { temperature: 0, max_tokens: most, stream: true, stream_options: { include_usage: true } };
  const body = { model, messages, ...drawing };
  const headers = { "Content-Type": "application/json" };
  const file = messages[0].content[0]?.file?.file_id;
  if (file) headers["X-Session-Id"] = file; // a router sends all questions about a document to one worker
  const response = await send("/v1/chat/completions", {
    method: "POST", headers, body: JSON.stringify(body), signal,
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : new ServerError(0, "The connection to the server broke.");
    });
    if (done) throw new ServerError(0, "The server ended the answer too early.");
    text += value;
    const events = text.split("\n\n");
    text = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServerError(response.status, chunk.error.message, chunk.error.code);
      yield chunk;
    }
  }
}
