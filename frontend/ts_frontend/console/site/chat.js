// A chat with a language model: the conversation, its answers as they come, and the same call as programs make it.
// Texts of people and models are only ever shown as text.

import { count, h, millis } from "./dom.js";
import { Events, call } from "./net.js";
import { codes } from "./play.js";
import { chatSnippets } from "./snippets.js";
import { store } from "./store.js";

const kept = new Map();

/** The chat of a model version, with its conversation so far. */
export function chatOf(model) {
  if (!kept.has(model.key)) kept.set(model.key, new Chat());
  const chat = kept.get(model.key);
  chat.update(model);
  return chat;
}

class Chat {
  constructor() {
    this.messages = [];
    this.aborting = null;
    const field = (text, control) => h("label", {}, h("span", {}, text), control);
    const changed = () => this.showCode();
    const number = (more) => h("input", { type: "number", min: "0", step: "any", oninput: changed, ...more });
    this.system = h("textarea", { rows: 2, oninput: changed, placeholder: "None" });
    this.temperature = number({ max: "2", placeholder: "The model's" });
    this.tokens = number({ min: "1", step: "1", value: "512" });
    this.log = h("div", { class: "talk", role: "log", tabindex: 0, "aria-label": "Conversation" });
    this.input = h("textarea", { rows: 3, oninput: changed, onkeydown: (event) => this.key(event) });
    this.send = h("button", { type: "button", class: "main", onclick: () => this.run() }, "Send");
    this.stop = h("button", { type: "button", disabled: true, onclick: () => this.aborting?.abort() }, "Stop");
    this.anew = h("button", { type: "button", onclick: () => this.clear() }, "New chat");
    this.outcome = h("p", { role: "status", class: "muted" });
    this.codes = codes();
    this.element = h("div", { class: "play chat" },
      h("section", { class: "panel", "aria-label": "Chat" }, this.log, this.outcome,
        field("Message (Enter sends, Shift+Enter begins a line)", this.input), h("div", { class: "row" }, this.send, this.stop, this.anew)),
      h("section", { class: "panel", "aria-label": "Settings of the chat" },
        field("System prompt", this.system), field("Temperature", this.temperature), field("Max tokens", this.tokens)),
      this.codes.element);
    this.clear();
  }

  update(model) {
    this.model = model;
    this.showCode();
  }

  clear() {
    this.aborting?.abort();
    this.messages = [];
    this.log.replaceChildren(h("p", { class: "muted" }, "The conversation stays until the page is closed."));
    this.outcome.textContent = "Nothing sent yet.";
    if (this.model) this.showCode();
  }

  key(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this.run();
  }

  /** The body of the next request. */
  body(question) {
    const system = this.system.value.trim();
    return {
      model: this.model.name,
      messages: [...(system ? [{ role: "system", content: system }] : []), ...this.messages, { role: "user", content: question }],
      ...numbers({ temperature: this.temperature, max_tokens: this.tokens }),
      stream: true,
    };
  }

  showCode() {
    this.codes.show(chatSnippets(this.model, this.body(this.input.value.trim() || "Hello"), store.server));
  }

  /** A message in the conversation; returns the element with its text. */
  tell(role, text) {
    const said = h("div", { class: "text" }, text);
    if (!this.messages.length && role === "user") this.log.replaceChildren();
    this.log.append(h("article", { class: role }, h("h3", {}, role === "user" ? "You" : this.model.name), said));
    this.log.scrollTop = this.log.scrollHeight;
    return said;
  }

  async run() {
    const question = this.input.value.trim();
    if (!question || this.aborting) return;
    const body = { ...this.body(question), stream_options: { include_usage: true } };
    const asked = this.tell("user", question), said = this.tell("assistant", "");
    const aborting = (this.aborting = new AbortController());
    const messages = this.messages;
    this.input.value = "";
    this.send.disabled = true;
    this.stop.disabled = false;
    said.classList.add("growing");
    this.outcome.textContent = "Waiting for the answer …";
    const answer = new Answer(said, this.log);
    let ended = "";
    try {
      const { name, version } = this.model;
      const path = `/console/predictions/${encodeURIComponent(name)}/${encodeURIComponent(version)}/v1/chat/completions`;
      const options = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
      await answer.read(await call(path, { ...options, signal: aborting.signal }));
    } catch (error) {
      ended = error.name === "AbortError" ? "Stopped" : `Failed: ${error.message}`;
    }
    said.classList.remove("growing");
    this.aborting = null;
    this.send.disabled = false;
    this.stop.disabled = true;
    if (messages === this.messages) {
      if (answer.text) messages.push({ role: "user", content: question }, { role: "assistant", content: answer.text });
      else {
        for (const one of [asked, said]) one.parentElement.remove();
        this.input.value ||= question;
      }
      this.outcome.textContent = [ended, answer.numbers()].filter(Boolean).join(" · ") || "The answer is empty.";
    }
    this.showCode();
  }
}

/** The numbers of fields that aren't empty. */
const numbers = (fields) =>
  Object.fromEntries(Object.entries(fields).filter(([, field]) => field.value !== "").map(([name, field]) => [name, field.valueAsNumber]));

/** An answer as it comes, into the element `said`. */
class Answer {
  constructor(said, log) {
    Object.assign(this, { said, log, text: "", pieces: 0, begun: performance.now(), first: 0, last: 0, usage: null });
  }

  /** Throws what the server says if it refuses, and if the answer breaks off. */
  async read(answer) {
    if (!answer.ok) throw new Error(messageOf(await answer.text()) || `status ${answer.status}`);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    const events = new Events();
    let done = false;
    while (!done) {
      const piece = await reader.read();
      if (piece.done) break;
      for (const { data } of events.take(piece.value)) {
        if (data === "[DONE]") done = true;
        else this.take(JSON.parse(data));
      }
    }
    if (!done) throw new Error("the answer broke off");
  }

  take(event) {
    if (event.error) throw new Error(event.error.message || "the model failed");
    this.usage = event.usage || this.usage;
    const delta = event.choices?.[0]?.delta;
    const more = delta?.content || "";
    if (!more && !delta?.reasoning_content) return;
    this.last = performance.now();
    this.first ||= this.last;
    this.pieces += 1;
    const below = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 40;
    this.said.textContent = this.text += more;
    if (below) this.log.scrollTop = this.log.scrollHeight;
  }

  /** The number of tokens, the time to the first, and the tokens a second from there on. */
  numbers() {
    if (!this.pieces) return "";
    const tokens = this.usage?.completion_tokens || this.pieces;
    const seconds = (this.last - this.first) / 1000;
    const rate = tokens > 1 && seconds > 0 ? ` · ${count((tokens - 1) / seconds)} tokens/s` : "";
    return `${tokens} tokens · first after ${millis(this.first - this.begun)}${rate}`;
  }
}

function messageOf(text) {
  try {
    const told = JSON.parse(text);
    return told.error?.message || told.message || text;
  } catch {
    return text;
  }
}
