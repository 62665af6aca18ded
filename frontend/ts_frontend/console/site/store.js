// What the page knows: the latest state, and the samples of the last minutes. Everyone who shows something listens.

export const store = {
  columns: [],
  samples: [],
  sample_s: 0.5,
  server: {},
  models: [],
  paused: false,
};

const HISTORY_S = 180;
const listeners = { state: new Set(), sample: new Set() };

/** Calls `act` whenever there is a new `state` or `sample`; returns a function that ends that. */
export function listen(name, act) {
  listeners[name].add(act);
  return () => listeners[name].delete(act);
}

export function tell(name) {
  if (!store.paused) for (const act of [...listeners[name]]) act();
}

/** One event of the server. */
export function take(name, value) {
  if (name === "history") {
    Object.assign(store, { columns: value.columns, samples: value.samples, sample_s: value.sample_s });
    tell("sample");
  } else if (name === "sample") {
    store.samples.push(value);
    while (store.samples.length && store.samples[0].t < value.t - HISTORY_S) store.samples.shift();
    tell("sample");
  } else if (name === "state") {
    Object.assign(store, value);
    tell("state");
  }
}

export const find = (name, version) => store.models.find((one) => one.name === name && (!version || one.version === version));

/** A model's latest number; null when nothing was measured, 0 for a count without any. */
export function latest(key, column) {
  return number(store.samples.at(-1)?.models[key], column);
}

function number(row, column) {
  const value = row?.[store.columns.indexOf(column)];
  return value === undefined ? (EMPTY.has(column) ? null : 0) : value;
}

/** Columns without a value while nothing happens. */
const EMPTY = new Set(["p50_ms", "p95_ms", "p99_ms", "queue_ms", "handler_ms", "batch_size", "first_token_ms"]);

/** The numbers of a column over the last samples. */
export function series(key, column, last = Infinity) {
  const index = store.columns.indexOf(column);
  const none = EMPTY.has(column) ? null : 0;
  const from = Math.max(0, store.samples.length - last);
  return store.samples.slice(from).map((one) => one.models[key]?.[index] ?? none);
}

export const times = () => store.samples.map((one) => one.t);

/** The sum of a column over all models, at each sample. */
export function sums(column, last = Infinity) {
  const index = store.columns.indexOf(column);
  const from = Math.max(0, store.samples.length - last);
  return store.samples.slice(from).map((one) => Object.values(one.models).reduce((all, row) => all + (row[index] || 0), 0));
}

/** The largest value of a column among all models, at each sample; null without any. */
export function worst(column, last = Infinity) {
  const index = store.columns.indexOf(column);
  const from = Math.max(0, store.samples.length - last);
  return store.samples.slice(from).map((one) => {
    const values = Object.values(one.models).map((row) => row[index]).filter((value) => value !== null);
    return values.length ? Math.max(...values) : null;
  });
}
