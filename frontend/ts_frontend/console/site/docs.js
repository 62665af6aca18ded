// The page about the APIs: makes a form of each operation of /openapi.json, sends it to this very address, shows the answer.

import { bytes, byId, h, millis } from "./dom.js";
import { call, key, setKey } from "./net.js";

const TONES = { get: "accent", post: "good", put: "warn", delete: "bad" };
const SHOWN_CHARS_MAX = 200_000;
const EXAMPLES = { "application/json": "{}", "application/octet-stream": "Hello", "multipart/form-data": "" };

let serial = 0;

/** The groups of paths, by their first words. */
const GROUPS = [
  ["Predictions", /^\/(predictions|explanations|invocations|\{model_name\}|wfpredict)/],
  ["Models and workers", /^\/models/],
  ["The Open Inference Protocol", /^\/v2/],
  ["OpenAI and KServe v1", /^\/v1/],
  ["Workflows", /^\/workflows/],
  ["Console", /^\/console/],
  ["The server", /./],
];

function field(parameter) {
  const required = parameter.in === "path";
  const input = h("input", { autocomplete: "off", spellcheck: "false", placeholder: parameter.schema?.type || "" });
  const element = h("label", {}, h("span", { class: required ? "required" : null }, parameter.name), input);
  return { parameter, input, element };
}

function form(path, method, operation) {
  const fields = (operation.parameters || []).map(field);
  const kinds = Object.keys(operation.requestBody?.content || {}).filter((kind) => kind !== "multipart/form-data");
  const kind = h("select", {}, ...kinds.map((one) => h("option", {}, one)));
  const body = h("textarea", { rows: 5, class: "mono", spellcheck: "false" });
  body.value = EXAMPLES[kinds[0]] ?? "";
  kind.addEventListener("change", () => (body.value ||= EXAMPLES[kind.value]));
  const outcome = h("p", { role: "status", class: "muted" });
  const answer = h("pre", { tabindex: 0, hidden: true, "aria-label": "Answer" });
  const send = h("button", { type: "submit", class: "main" }, "Try it");
  const stop = h("button", { type: "button", hidden: true }, "Stop");
  const element = h("form", { class: "form" },
    fields.length > 0 && h("div", { class: "fields" }, ...fields.map((one) => one.element)),
    kinds.length > 0 && h("label", {}, h("span", {}, "Content type"), kind),
    kinds.length > 0 && h("label", {}, h("span", {}, "Body"), body),
    h("div", { class: "row" }, send, stop), outcome, answer);

  element.addEventListener("submit", async (event) => {
    event.preventDefault();
    const missing = fields.filter((one) => one.parameter.in === "path" && !one.input.value);
    if (missing.length) {
      outcome.textContent = `${missing.map((one) => one.parameter.name).join(" and ")} must be given.`;
      return missing[0].input.focus();
    }
    const target = fields.reduce((all, one) => all.replace(`{${one.parameter.name}}`, encodeURIComponent(one.input.value)), path);
    const query = new URLSearchParams(fields.filter((one) => one.parameter.in === "query" && one.input.value).map((one) => [one.parameter.name, one.input.value]));
    const url = query.size ? `${target}?${query}` : target;
    const aborting = new AbortController();
    stop.onclick = () => aborting.abort();
    stop.hidden = false;
    send.disabled = true;
    answer.hidden = false;
    answer.textContent = "";
    outcome.textContent = `${method.toUpperCase()} ${url} …`;
    const begun = performance.now();
    try {
      const options = { method: method.toUpperCase(), signal: aborting.signal };
      if (kinds.length) Object.assign(options, { body: body.value, headers: { "Content-Type": kind.value } });
      await show(await call(url, options), begun);
    } catch (error) {
      outcome.textContent = error.name === "AbortError" ? "Stopped." : `No answer: ${error.message}`;
    } finally {
      send.disabled = false;
      stop.hidden = true;
    }
    return undefined;
  });

  async function show(found, begun) {
    const reader = found.body ? found.body.getReader() : null;
    const decoder = new TextDecoder();
    let [text, size] = ["", 0];
    const tell = () => (outcome.textContent = `Status ${found.status} · ${millis(performance.now() - begun)} · ${bytes(size)} · ${found.headers.get("content-type") || "no content type"}`);
    tell();
    while (reader) {
      const { value, done } = await reader.read();
      if (done) break;
      size += value.length;
      if (text.length < SHOWN_CHARS_MAX) text += decoder.decode(value, { stream: true });
      answer.textContent = text;
      tell();
    }
    answer.textContent = text || "(an empty body)";
  }

  return element;
}

function operation(path, method, described) {
  const element = h("details", { class: "panel operation" },
    h("summary", {}, h("span", { class: `badge method ${TONES[method] || ""}` }, method.toUpperCase()), h("code", {}, path), h("span", { class: "muted" }, described.description || "")));
  element.addEventListener("toggle", () => element.children.length > 1 || element.append(form(path, method, described)), { once: true });
  return element;
}

function keyField() {
  const id = `key-${(serial += 1)}`;
  const input = h("input", { id, type: "password", autocomplete: "off", value: key(), placeholder: "only where the server asks for keys", oninput: () => setKey(input.value.trim()) });
  return h("label", {}, h("span", {}, "Key, kept in this tab"), input);
}

async function begin() {
  const found = await (await call("/openapi.json")).json();
  const all = Object.entries(found.paths).flatMap(([path, methods]) => Object.entries(methods).map(([method, described]) => [path, method, described]));
  const filter = h("input", { type: "search", placeholder: "predict, workers, /v2 …", autocomplete: "off" });
  const groups = GROUPS.map(([title]) => ({ title, list: [] }));
  for (const one of all) {
    const element = operation(...one);
    groups[GROUPS.findIndex(([, pattern]) => pattern.test(one[0]))].list.push({ element, words: one.slice(0, 2).join(" ").toLowerCase() + (one[2].description || "").toLowerCase() });
  }
  const sections = groups.filter((one) => one.list.length).map((one) => ({ ...one, element: h("section", { "aria-label": one.title }, h("h2", {}, one.title), ...one.list.map((item) => item.element)) }));
  filter.addEventListener("input", () => {
    const wanted = filter.value.trim().toLowerCase().split(/\s+/);
    for (const section of sections) {
      for (const item of section.list) item.element.hidden = !wanted.every((word) => item.words.includes(word));
      section.element.hidden = section.list.every((item) => item.element.hidden);
    }
  });
  byId("operations").replaceChildren(
    h("div", { class: "asked" }, h("label", {}, h("span", {}, "Find a call"), filter), keyField()),
    ...sections.map((section) => section.element));
}

begin();
