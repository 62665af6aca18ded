// A model's rollout: both versions' curves, the verdict, what can be done, the decisions, and the last differences.

import { h, keyed, millis, say } from "./dom.js";
import { ROLLOUT_ACTIONS, changeRollout } from "./dialogs.js";
import { ask, rolloutPath } from "./net.js";
import { Plot } from "./plots.js";

/** The time between two readings while the rollout is shown. */
const READ_MS = 2000;
const percent = (value) => (value === null || value === undefined ? "–" : `${Number(value.toPrecision(3))} %`);
const ratio = (part, whole) => (whole ? (100 * part) / whole : null);
const VERSIONS = [["old", "old version"], ["new", "new version"]];

/** A plot as of PLOTS, and the value of each line of it in a point of the history. */
const CURVES = [
  [["Failed requests", "of a version's own", percent, VERSIONS], (point, [version]) => ratio(point[`${version}_failed`], point[`${version}_answered`] + point[`${version}_failed`])],
  [["Latency, p50", "from arrival to answer", millis, VERSIONS], (point, [version]) => point[`${version}_p50_ms`]],
  [["Latency, p99", "from arrival to answer", millis, VERSIONS], (point, [version]) => point[`${version}_p99_ms`]],
  [["Share of the new version", "of the calls", percent, [["set", "set"], ["measured", "measured"]]], (point, [line]) => {
    const [old, fresh] = VERSIONS.map(([version]) => point[`${version}_answered`] + point[`${version}_failed`]);
    return line === "set" ? point.percent : ratio(fresh, old + fresh);
  }],
];
const TONES = { running: "accent", paused: "warn", promoted: "good", "rolled back": "bad", ended: "" };

/** The tab of the rollout; `sample()` reads it anew if it is time. */
export class Rollout {
  constructor(name) {
    Object.assign(this, { name, found: null, readAt: -Infinity, reading: false });
    this.state = h("span", { class: "badge" });
    this.title = h("h3", {});
    this.actions = h("span", { class: "row" });
    this.facts = h("dl", { class: "facts" });
    this.plots = CURVES.map(([plot]) => new Plot(plot, true));
    this.none = h("div", { class: "panel empty" }, "…");
    this.events = table("Decisions", ["Time", "Decision", "Reason"]);
    this.differences = table("Last differing answers", ["Time", "Request", "Difference", "Old version's answer", "New version's answer"]);
    this.shown = h("div", { class: "rollout", hidden: true },
      h("div", { class: "panel" }, h("div", { class: "row" }, this.title, this.state, h("span", { class: "grow" }), this.actions), this.facts),
      h("div", { class: "plots" }, ...this.plots.map((plot) => plot.figure)),
      this.events.element, this.differences.element);
    this.element = h("div", {}, this.none, this.shown);
    this.renew();
  }

  renew() {
    for (const plot of this.plots) plot.renew();
    if (this.found) this.draw();
  }

  sample() {
    if (this.found) this.draw(); // the page's width may have changed
    if (!this.reading && performance.now() >= this.readAt + READ_MS) this.read();
  }

  async read() {
    this.reading = true;
    try {
      this.found = await ask("GET", rolloutPath(this.name));
    } catch (error) {
      this.found = null;
      say(this.none, error.status === 404 ? `${this.name} has no rollout. torchserve rollout ${this.name} VERSION begins one: the version gets a growing share of the calls that name none.` : error.message);
    } finally {
      this.reading = false;
      this.readAt = performance.now();
    }
    this.shown.hidden = !this.found;
    this.none.hidden = Boolean(this.found);
    if (this.found) this.show(this.found);
  }

  show(found) {
    this.draw();
    say(this.title, `${found.new} in place of ${found.old}`);
    say(this.state, found.state);
    this.state.className = `badge ${TONES[found.state]}`;
    keyed(this.actions, found.actions, (action) => action, (action) =>
      h("button", { type: "button", class: action === "rollback" ? "danger" : null, onclick: () => changeRollout(this.name, this.found, action, () => this.read()) }, ROLLOUT_ACTIONS[action][0]), () => {});
    const steps = [...(found.rule.shadow ? ["copies"] : []), ...found.rule.steps.map(percent)];
    const facts = {
      "Verdict": `${found.verdict.decision}: ${found.verdict.reason}`,
      "Calls": `${percent(100 - found.percent)} to ${found.old}, ${percent(found.percent)} to ${found.new}${found.shadow ? ", which gets copies" : ""}`,
      "Step": `${found.step} of ${steps.length} (${steps.join(", ")}), since ${found.since}`,
      ...Object.fromEntries(Object.entries(found.requests).map(([version, one]) => [`Requests of ${version}`, `${one.answered} answered, ${one.failed} failed`])),
      ...(found.copies && { "Copies": Object.entries(found.copies).map(([result, number]) => `${number} ${result}`).join(", ") || "none yet" }),
    };
    keyed(this.facts, Object.entries(facts).flatMap(([name, value]) => [[`${name}?`, "dt", name], [name, "dd", value]]),
      ([key]) => key, ([, element]) => h(element), (element, [, , text]) => say(element, text));
    this.events.show([...found.events].reverse().map((one) => [one.time, one.event, one.reason]));
    this.differences.show([...(found.differences || [])].reverse().map((one) => [one.time, one.requestId, one.difference, one.old, one.new]));
  }

  draw() {
    const { columns, rows } = this.found.history;
    const points = rows.map((row) => Object.fromEntries(columns.map((column, index) => [column, row[index]])));
    CURVES.forEach(([[, , , lines], value], index) =>
      this.plots[index].show(points.map((point) => point.time), lines.map((line) => points.map((point) => value(point, line)))));
  }
}

/** A table of texts, which come from models and clients, too: they are shown as they are. Hidden without rows. */
function table(title, columns) {
  const body = h("tbody", {});
  const element = h("div", { class: "panel scroll", tabindex: 0, role: "region", "aria-label": title }, h("table", {},
    h("caption", {}, title), h("thead", {}, h("tr", {}, ...columns.map((text) => h("th", { scope: "col" }, text)))), body));
  let told = "";
  return {
    element,
    show(rows) {
      element.hidden = !rows.length;
      if (told === JSON.stringify(rows)) return;
      told = JSON.stringify(rows);
      body.replaceChildren(...rows.map((cells) => h("tr", {}, ...cells.map((text) => h("td", {}, text)))));
    },
  };
}
