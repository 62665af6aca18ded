// The server's numbers, and the list of its models.

import { byId, bytes, count, draw, h, keyed, millis, say, spark } from "./dom.js";
import { latest, series, store, sums, worst } from "./store.js";

const HALF_MINUTE = () => Math.round(30 / store.sample_s);

/** Where a model version is shown. */
export const placeOf = (model) => `#/${encodeURIComponent(model.name)}/${encodeURIComponent(model.version)}`;

const last = (values) => (values.length ? values.at(-1) : 0);

// --- totals

const machine = (name) => store.samples.map((one) => one.machine[name]);

/** Label, the values of the last minutes, and how the latest is shown. */
const TOTALS = [
  ["Calls / s", () => sums("answered_per_s"), count],
  ["Failed / s", () => sums("failed_per_s"), count],
  ["p95, slowest", () => worst("p95_ms"), millis],
  ["Waiting", () => sums("queued"), count],
  ["Running", () => sums("running"), count],
  ["Open streams", () => sums("streams"), count],
  ["CPU, machine", () => machine("cpu_percent"), (value) => `${Math.round(value || 0)} %`],
  ["CPU, server", () => machine("server_cpu_percent"), (value) => `${Math.round(value || 0)} %`],
  ["Memory", () => machine("memory_used_bytes"), bytes],
];

/** A GPU's tiles, as TOTALS: they are made when the first sample tells of it. */
const gpuTotals = ({ index }) => {
  const all = (name) => store.samples.map((one) => one.machine.gpus?.find((gpu) => gpu.index === index)?.[name] ?? 0);
  return [
    [`GPU ${index}`, () => all("busy_percent"), (value) => `${Math.round(value || 0)} %`],
    [`GPU ${index}, memory`, () => all("used_bytes"), bytes],
  ];
};

function totalTile(parent, [label, values, format]) {
  const number = h("dd", {}, "–");
  const line = spark();
  parent.append(h("dl", { class: "panel total" }, h("dt", {}, label), number, line));
  return () => {
    const found = values();
    say(number, format(last(found)));
    draw(line, found.slice(-2 * HALF_MINUTE()));
  };
}

export function makeTotals(parent) {
  const tiles = TOTALS.map((one) => totalTile(parent, one));
  const gpus = new Set();
  return () => {
    for (const gpu of store.samples.at(-1)?.machine.gpus ?? []) {
      if (!gpus.has(gpu.index)) tiles.push(...gpuTotals(gpu).map((one) => totalTile(parent, one)));
      gpus.add(gpu.index);
    }
    tiles.forEach((show) => show());
  };
}

// --- the list

const ORDERS = {
  name: () => 0, // as they were sorted before
  busy: (one, other) => (latest(other.key, "answered_per_s") || 0) - (latest(one.key, "answered_per_s") || 0),
  trouble: (one, other) => trouble(other) - trouble(one),
};

/** model2 comes before model10. */
const natural = new Intl.Collator("en", { numeric: true });

const trouble = (model) =>
  ({ failing: 4, loading: 2 })[model.status] ?? (model.lastFailure ? 1 : 0) + ((latest(model.key, "failed_per_s") || 0) > 0 ? 1 : 0);

export const readyOf = (model) => model.workers.filter((worker) => worker.state === "ready").length;

const WORDS = { ready: "ready", loading: "loading", failing: "failing", stopped: "without workers" };

function make(model) {
  const cells = {
    dot: h("span", { class: "dot" }),
    word: h("span", { class: "unseen" }),
    link: h("a", { href: placeOf(model) }, model.name),
    badges: h("span", { class: "versions" }),
    reason: h("span", { class: "reason" }),
    rate: h("td", { class: "number" }),
    p95: h("td", { class: "number wide" }),
    queue: h("td", { class: "number wide" }),
    workers: h("td", { class: "number" }),
    line: spark(),
  };
  const row = h("tr", { onclick: (event) => event.target.closest("a") || (location.hash = placeOf(model)) },
    h("td", {}, cells.dot, cells.link, cells.word, cells.badges, cells.reason),
    cells.rate, cells.p95, cells.queue, cells.workers, h("td", { class: "wide" }, cells.line));
  row.cells_ = cells;
  return row;
}

function update(row, model) {
  const cells = row.cells_;
  cells.dot.className = `dot ${model.status}`;
  cells.dot.title = WORDS[model.status];
  say(cells.word, ` ${WORDS[model.status]}`);
  const badges = [model.version, model.default ? "default" : "", model.workflow ? `in ${model.workflow}` : "", model.status === "ready" ? "" : WORDS[model.status]];
  const text = badges.filter(Boolean).join(" · ");
  if (cells.badges.textContent !== text) cells.badges.replaceChildren(h("small", {}, text));
  const reason = model.status === "failing" ? model.lastFailure?.reason || "" : "";
  say(cells.reason, reason);
  cells.reason.title = reason;
  say(cells.rate, count(latest(model.key, "answered_per_s")));
  say(cells.p95, millis(latest(model.key, "p95_ms")));
  say(cells.queue, count(latest(model.key, "queued")));
  say(cells.workers, `${readyOf(model)}/${model.workers.length}`);
  draw(cells.line, series(model.key, "answered_per_s", HALF_MINUTE()));
}

export function showModels(chosen) {
  const filter = byId("filter").value.trim().toLowerCase();
  const shown = store.models.filter((one) => !filter || one.key.toLowerCase().includes(filter));
  shown.sort((one, other) => natural.compare(one.name, other.name));
  shown.sort(ORDERS[byId("order").value] || ORDERS.name);
  keyed(byId("models"), shown, (one) => one.key, make, (row, model) => {
    update(row, model);
    row.classList.toggle("chosen", model.key === chosen);
    if (model.key === chosen) row.cells_.link.setAttribute("aria-current", "true");
    else row.cells_.link.removeAttribute("aria-current");
  });
  byId("none").hidden = shown.length > 0;
  say(byId("none"), store.models.length ? "No model has that in its name." : "No model is served yet.");
}
