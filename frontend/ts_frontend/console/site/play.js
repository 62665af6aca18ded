// The playground: sends a text, JSON, a file or tensors to a model, shows the answer as it comes, and the same call as
// curl and Python make it.

import { bytes, h, millis, say, toast } from "./dom.js";
import { Events, call } from "./net.js";
import { snippets } from "./snippets.js";
import { store } from "./store.js";

const KINDS = [["text", "Text"], ["json", "JSON"], ["file", "Image or file"], ["tensors", "Tensors"]];
const SHOWN_CHARS_MAX = 400_000;
// Formats without scripts; SVG is shown as text.
const PICTURES = /^image\/(png|jpeg|gif|webp|avif|bmp)\b/;

let serial = 0;

export class Playground {
  constructor(model) {
    this.model = model;
    this.id = `play-${(serial += 1)}`;
    this.kind = model.tensors ? "tensors" : "text";
    this.texts = { text: "Hello", json: model.chats ? '{"prompt": "Hello", "max_tokens": 16}' : '{"text": "Hello"}', tensors: sampleTensors(model) };
    this.file = null;
    this.aborting = null;
    this.build();
    this.choose(this.kind);
  }

  build() {
    const label = (text) => h("span", {}, text);
    this.radios = KINDS.map(([word, text]) =>
      h("label", {}, h("input", { type: "radio", name: this.id, value: word, checked: word === this.kind, onchange: () => this.choose(word) }), label(text)));
    this.input = h("textarea", { rows: 9, class: "mono", spellcheck: "false", oninput: () => this.typed() });
    this.inputLabel = h("label", {}, label("What is sent"), this.input);
    this.picker = h("input", { type: "file", onchange: () => this.picked(this.picker.files[0] || null) });
    this.preview = h("img", { class: "preview", alt: "The chosen picture", hidden: true });
    this.fileLabel = h("div", {}, h("label", {}, label("File, sent as it is"), this.picker), this.preview);
    this.stream = h("input", { type: "checkbox", onchange: () => this.typed() });
    this.streamLabel = h("label", { class: "check" }, this.stream, h("span", {}, "One event for each answer (for models with several)"));
    this.send = h("button", { type: "button", class: "main", onclick: () => this.run() }, "Send");
    this.stop = h("button", { type: "button", disabled: true, onclick: () => this.aborting?.abort() }, "Stop");
    this.outcome = h("p", { role: "status", class: "muted" }, "Nothing sent yet.");
    this.answer = h("pre", { class: "answer", tabindex: 0, "aria-label": "Answer" });
    this.codes = codes();
    this.element = h("div", { class: "play" },
      h("section", { class: "panel", "aria-label": "Request" },
        h("fieldset", { class: "kinds" }, h("legend", { class: "unseen" }, "Kind of request"), ...this.radios),
        this.inputLabel, this.fileLabel, this.streamLabel, h("div", { class: "row" }, this.send, this.stop)),
      h("section", { class: "panel", "aria-label": "Answer" }, h("h3", {}, "Answer"), this.outcome, this.answer),
      this.codes.element);
  }

  choose(kind) {
    this.kind = kind;
    this.inputLabel.hidden = kind === "file";
    this.fileLabel.hidden = kind !== "file";
    this.streamLabel.hidden = kind !== "tensors";
    if (kind !== "file") this.input.value = this.texts[kind];
    this.showCode();
  }

  typed() {
    if (this.kind !== "file") this.texts[this.kind] = this.input.value;
    this.showCode();
  }

  picked(file) {
    this.file = file;
    if (this.preview.src) URL.revokeObjectURL(this.preview.src);
    this.preview.hidden = !file?.type.startsWith("image/");
    if (!this.preview.hidden) this.preview.src = URL.createObjectURL(file);
    this.showCode();
  }

  update(model) {
    this.model = model;
    this.showCode();
  }

  /** The call: path at the inference address, content type, and what is sent. */
  request() {
    const { name, version } = this.model;
    const [model, number] = [encodeURIComponent(name), encodeURIComponent(version)];
    if (this.kind === "tensors") {
      const word = this.stream.checked ? "infer_stream" : "infer";
      return { path: `/v2/models/${model}/versions/${number}/${word}`, type: "application/json", body: this.input.value };
    }
    const path = `/predictions/${model}/${number}`;
    if (this.kind === "file") return { path, type: this.file?.type || "application/octet-stream", body: this.file, file: this.file?.name || "picture.jpg" };
    return { path, type: this.kind === "json" ? "application/json" : "text/plain", body: this.texts[this.kind] };
  }

  showCode() {
    this.codes.show(snippets(this.request(), store.server));
  }

  async run() {
    const request = this.request();
    if (this.kind === "file" && !this.file) return void (this.outcome.textContent = "Choose a file first.");
    if (request.type === "application/json") {
      try {
        JSON.parse(request.body);
      } catch (error) {
        return void (this.outcome.textContent = `This is not JSON: ${error.message}`);
      }
    }
    this.aborting = new AbortController();
    this.send.disabled = true;
    this.stop.disabled = false;
    this.outcome.textContent = "Waiting for the answer …";
    this.answer.textContent = "";
    this.answer.classList.add("growing");
    const begun = performance.now();
    try {
      const answer = await call(`/console${request.path}`, { method: "POST", headers: { "Content-Type": request.type }, body: request.body, signal: this.aborting.signal });
      await this.read(answer, begun);
    } catch (error) {
      const stopped = error.name === "AbortError";
      this.outcome.textContent = stopped ? "Stopped: the server was told that nobody waits any more." : `The answer broke off: ${error.message}`;
    } finally {
      this.send.disabled = false;
      this.stop.disabled = true;
      this.answer.classList.remove("growing");
    }
  }

  async read(answer, begun) {
    const first_ms = performance.now() - begun;
    const type = answer.headers.get("content-type") || "";
    const good = answer.ok ? "" : " – refused or failed";
    const tell = (size, pieces) => {
      const all = millis(performance.now() - begun);
      const told = pieces > 1 ? `, first piece after ${millis(first_ms)}, ${pieces} pieces` : "";
      this.outcome.textContent = `Status ${answer.status}${good} · ${all}${told} · ${bytes(size)}${type ? ` · ${type.split(";")[0]}` : ""}`;
    };
    if (PICTURES.test(type)) {
      const blob = await answer.blob();
      this.answer.replaceChildren(h("img", { src: URL.createObjectURL(blob), alt: "The answer, a picture" }));
      return tell(blob.size, 1);
    }
    const decoder = new TextDecoder();
    const events = type.startsWith("text/event-stream") ? new Events() : null;
    const reader = answer.body.getReader();
    let [text, size, pieces] = ["", 0, 0];
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      size += value.length;
      pieces += 1;
      const more = decoder.decode(value, { stream: true });
      text += events ? events.take(more).map((one) => `${one.data}\n`).join("") : more;
      this.answer.textContent = text.slice(0, SHOWN_CHARS_MAX);
      this.answer.scrollTop = this.answer.scrollHeight;
      tell(size, pieces);
    }
    if (!events && pieces < 2) this.answer.textContent = pretty(text).slice(0, SHOWN_CHARS_MAX);
    tell(size, pieces);
  }
}

/** The same call as programs make it: an element, and a function that shows `{curl, python}`. */
export function codes() {
  const texts = [["curl", "curl"], ["Python", "python"]].map(([name, word]) => {
    const text = h("pre", { tabindex: 0, "aria-label": `The same call with ${name}` });
    const copy = h("button", { type: "button", class: "small", "aria-label": `Copy the ${name} call`, onclick: () => copied(text.textContent) }, "Copy");
    return { word, text, element: h("div", { class: "code" }, h("div", { class: "row" }, h("h3", { class: "grow" }, name), copy), text) };
  });
  const element = h("section", { class: "panel codes", "aria-label": "The same call elsewhere" },
    h("p", { class: "muted" }, "The same call from a program, at the inference address:"), ...texts.map((one) => one.element));
  return { element, show: (found) => texts.forEach(({ word, text }) => say(text, found[word])) };
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    toast("Copied.");
  } catch {
    toast("The browser does not let this page copy; select the text instead.");
  }
}

/** A request with zeros for each declared input; sizes that are open become 1. */
function sampleTensors(model) {
  const inputs = (model.inputs.length ? model.inputs : [{ name: "input", datatype: "FP32", shape: [1] }]).map((one) => {
    const shape = one.shape.map((size) => (size < 0 ? 1 : size));
    const total = Math.min(shape.reduce((all, size) => all * size, 1), 4096);
    const zero = one.datatype === "BYTES" ? "text" : one.datatype === "BOOL" ? false : 0;
    return { name: one.name, datatype: one.datatype, shape, data: Array(total).fill(zero) };
  });
  const lines = inputs.map((one) => `    ${JSON.stringify(one)}`);
  return `{\n  "inputs": [\n${lines.join(",\n")}\n  ]\n}`;
}
