// Plots drawn by uPlot, a line for each number, told apart by dashes as well as colours; and those of a model's last minutes.

import { bytes, count, h, millis, svg } from "./dom.js";
import { series, store, times } from "./store.js";

const uPlot = window.uPlot;
const DASHES = [[], [7, 3], [2, 3]];

/** Title, unit, how to show a value, and lines: [column, label]. */
const PLOTS = [
  ["Throughput", "calls a second", count, [["answered_per_s", "answered"], ["failed_per_s", "failed"], ["cancelled_per_s", "cancelled"]]],
  ["Latency", "from arrival to answer", millis, [["p50_ms", "p50"], ["p95_ms", "p95"], ["p99_ms", "p99"]]],
  ["Queue", "requests", count, [["queued", "waiting"], ["running", "running"]]],
  ["Where the time goes", "mean of a request", millis, [["queue_ms", "waiting"], ["handler_ms", "handler"]]],
  ["Batch size", "mean of a handler's call", count, [["batch_size", "requests"]]],
  ["Streams", "open", count, [["streams", "open"]]],
  ["Streamed", "bytes a second", bytes, [["stream_bytes_per_s", "of open streams"]]],
];

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** A colour of the page as the canvas takes it: light-dark() is resolved by an element that has it. */
function colour(name) {
  const probe = document.body.appendChild(h("i", { hidden: true }));
  probe.style.color = css(name);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

/** Hours are shown where there are some; `all`: seconds since the epoch. */
function clocks(all) {
  const long = all.at(-1) - all[0] > 3000;
  const parts = { minute: "2-digit", ...(long ? { hour: "2-digit" } : { second: "2-digit" }) };
  return all.map((t) => new Date(t * 1000).toLocaleTimeString([], parts));
}

function options(width, lines, format, sparse) {
  const colours = [colour("--accent"), colour("--warn"), colour("--bad")];
  const axis = { stroke: colour("--muted"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
  return {
    width,
    height: 150,
    legend: { show: false },
    cursor: { y: false, points: { size: 6 } },
    scales: { x: { time: true }, y: { range: (_, low, high) => [0, Math.max(high || 0, 1) * 1.12] } },
    axes: [
      { ...axis, space: 70, size: 26, values: (_, all) => clocks(all) },
      { ...axis, space: 22, size: 58, values: (_, all) => all.map((value) => (value ? format(value) : "0")) },
    ],
    series: [{}, ...lines.map((_, index) => ({
      stroke: colours[index], dash: DASHES[index], width: 1.8, spanGaps: sparse, points: sparse ? {} : { show: false },
      fill: index === 0 && lines.length < 3 && !sparse ? colour("--accent-soft") : undefined,
    }))],
  };
}

/** One figure, as of PLOTS; `sparse`: its lines go on where nothing was measured. */
export class Plot {
  constructor([title, unit, format, lines], sparse = false) {
    Object.assign(this, { title, format, lines, sparse });
    this.values = lines.map(() => h("b", {}, "–"));
    this.canvas = h("div", { class: "canvas", role: "img", "aria-label": title });
    this.keys = h("div", { class: "keys" });
    this.figure = h("figure", { class: "panel plot" },
      h("figcaption", {}, h("span", { class: "title" }, title, " ", h("small", {}, unit)), this.keys),
      this.canvas);
    this.drawn = null;
  }

  renew() {
    this.drawn?.destroy();
    this.drawn = null;
    const colours = ["--accent", "--warn", "--bad"].map(colour);
    this.keys.replaceChildren(...this.lines.map(([, label], index) => {
      const line = svg("line", { x1: 0, y1: 4, x2: 18, y2: 4, stroke: colours[index], "stroke-width": 2, "stroke-dasharray": DASHES[index].join(" ") });
      return h("span", {}, svg("svg", { viewBox: "0 0 18 8", "aria-hidden": "true" }, line), `${label} `, this.values[index]);
    }));
  }

  /** Draws the values of each line at the times (seconds since the epoch), and tells the last one. */
  show(at, values) {
    const width = this.canvas.clientWidth;
    if (!width) return;
    const data = [at, ...values];
    if (!this.drawn) this.drawn = new uPlot(options(width, this.lines, this.format, this.sparse), data, this.canvas);
    else {
      if (this.drawn.width !== width) this.drawn.setSize({ width, height: 150 });
      this.drawn.setData(data);
    }
    const said = this.lines.map(([, label], index) => {
      const known = this.sparse ? values[index].filter((value) => value !== null) : values[index];
      const text = this.format(known.at(-1));
      this.values[index].textContent = text;
      return `${label} ${text}`;
    });
    this.canvas.setAttribute("aria-label", `${this.title}: ${said.join(", ")}`);
  }
}

/** How many calls of the handler had which size, over the last seconds. */
class Sizes {
  constructor() {
    this.bars = h("div", { class: "bars" });
    this.figure = h("figure", { class: "panel plot" },
      h("figcaption", {}, h("span", { class: "title" }, "Batch sizes ", h("small", {}, "handler calls a second"))), this.bars);
  }

  show(key) {
    const sizes = Object.entries(store.samples.at(-1)?.batches[key] || {});
    const top = Math.max(...sizes.map(([, rate]) => rate), 1e-9);
    this.bars.replaceChildren(...(sizes.length ? sizes.map(([size, rate]) => {
      const bar = h("div", { class: "bar", "aria-hidden": "true" });
      bar.style.width = `${(100 * rate) / top}%`;
      return h("div", {}, h("span", { class: "number" }, `of ${size}`), bar, h("span", {}, `${count(rate)}/s`));
    }) : [h("p", { class: "muted" }, "No calls of the handler in the last seconds.")]));
  }
}

export class Plots {
  constructor() {
    this.all = PLOTS.map((one) => new Plot(one));
    this.sizes = new Sizes();
    const figures = this.all.map((plot) => plot.figure);
    figures.splice(5, 0, this.sizes.figure);
    this.element = h("div", { class: "plots" }, ...figures);
    this.renew();
  }

  renew() {
    for (const plot of this.all) plot.renew();
  }

  show(key) {
    for (const plot of this.all) plot.show(times(), plot.lines.map(([column]) => series(key, column)));
    this.sizes.show(key);
  }
}
