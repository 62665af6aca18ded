// Calls of the server at the page's own address, with the key that was asked for once, and its events.

const KEY = "torchrelay-key";

export const key = () => sessionStorage.getItem(KEY) || "";

export function setKey(text) {
  if (text) sessionStorage.setItem(KEY, text);
  else sessionStorage.removeItem(KEY);
}

/** The server refused: `status`, and its message. */
export class Refused extends Error {
  constructor(status, message, kind = "") {
    super(message);
    this.status = status;
    this.kind = kind;
  }

  get wantsKey() {
    return this.status === 401 || this.kind === "InvalidKeyException";
  }
}

async function refused(answer) {
  const text = await answer.text();
  let message = text, kind = "";
  try {
    const told = JSON.parse(text);
    kind = told.type || "";
    message = told.message || (typeof told.error === "string" ? told.error : told.error?.message) || text;
  } catch {
    // not JSON: the text itself is the message
  }
  return new Refused(answer.status, message || `Status ${answer.status}`, kind);
}

/** `fetch` with the key. Any status is an answer. */
export function call(path, options = {}) {
  const headers = new Headers(options.headers || {});
  if (key()) headers.set("Authorization", `Bearer ${key()}`);
  return fetch(path, { ...options, headers, credentials: "omit", referrerPolicy: "no-referrer" });
}

/** The JSON of an answer; throws Refused. */
export async function ask(method, path, body) {
  const options = { method };
  if (body !== undefined) {
    options.body = JSON.stringify(body);
    options.headers = { "Content-Type": "application/json" };
  }
  const answer = await call(path, options);
  if (!answer.ok) throw await refused(answer);
  return answer.json();
}

/** The path of a model version; `more` follows. */
export const modelPath = (model, more = "") =>
  `/models/${encodeURIComponent(model.name)}/${encodeURIComponent(model.version)}${more}`;

export const rolloutPath = (name, more = "") => `/models/${encodeURIComponent(name)}/rollout${more}`;

/** Takes a text/event-stream apart as its pieces come: `take(text)` gives the events that are complete. */
export class Events {
  constructor() {
    this.rest = "";
  }

  take(text) {
    this.rest += text;
    const found = this.rest.split(/\r?\n\r?\n/);
    this.rest = found.pop();
    return found.map(event).filter((one) => one !== null);
  }
}

function event(text) {
  let name = "message";
  const data = [];
  for (const line of text.split(/\r?\n/)) {
    const [field, ...rest] = line.split(":");
    const value = rest.join(":").replace(/^ /, "");
    if (field === "event") name = value;
    if (field === "data") data.push(value);
  }
  return data.length ? { name, data: data.join("\n") } : null;
}

/**
 * Follows the server's events for ever: `on(name, value)` gets each, `state(word, error)` says how the connection is.
 * EventSource can't send a key, so this reads the stream itself. Returns a function that begins anew at once.
 */
export function follow(on, state) {
  let aborting = new AbortController();
  let wake = () => {};
  const pause = (ms) => new Promise((done) => {
    wake = done;
    setTimeout(done, ms);
  });

  async function once() {
    aborting = new AbortController();
    const answer = await call("/console/events", { signal: aborting.signal });
    if (!answer.ok) throw await refused(answer);
    state("live");
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    const events = new Events();
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      for (const one of events.take(value)) on(one.name, JSON.parse(one.data));
    }
  }

  (async () => {
    for (;;) {
      let wait_ms = 300;
      try {
        await once();
      } catch (error) {
        const wantsKey = error instanceof Refused && error.wantsKey;
        state(wantsKey ? "key" : "lost", error);
        wait_ms = wantsKey ? 3_600_000 : 1500;
      }
      await pause(wait_ms);
    }
  })();

  return () => {
    aborting.abort();
    wake();
  };
}
