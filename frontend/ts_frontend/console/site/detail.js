// One model version: its last death, plots, workers, playground and settings.

import { chatOf } from "./chat.js";
import { ago, byId, bytes, clock, h, keyed, say } from "./dom.js";
import { registerModel, scale, setDefault, unregister, workerLog } from "./dialogs.js";
import { Playground } from "./play.js";
import { Plots } from "./plots.js";
import { Rollout } from "./rollout.js";
import { store } from "./store.js";

const TABS = [["live", "Live"], ["workers", "Workers"], ["rollout", "Rollout"], ["play", "Playground"], ["settings", "Settings"]];

/** The page of a model; `update(model)` shows its state, `sample()` its numbers. */
export class Detail {
  constructor(model, tab, go) {
    this.model = model;
    this.tab = tab;
    this.plots = new Plots();
    this.rollout = new Rollout(model.name);
    this.play = new Playground(model);
    this.badges = h("span", { class: "row" });
    this.death = h("div", {});
    this.actions = h("span", { class: "row" });
    this.workers = h("tbody", {});
    this.settings = h("dl", { class: "facts" });
    this.buttons = TABS.map(([word, label]) =>
      h("button", { type: "button", role: "tab", id: `tab-${word}`, "aria-controls": `panel-${word}`, onclick: () => go(word), onkeydown: (event) => this.arrow(event, go) }, label));
    this.panels = {
      live: this.plots.element,
      workers: h("div", { class: "panel scroll", tabindex: 0, role: "region", "aria-label": "Workers" }, h("table", { class: "workers" },
        h("caption", { class: "unseen" }, "Workers of this version"),
        h("thead", {}, h("tr", {}, ...["Worker", "State", "Device", "Memory"].map((text) => h("th", { scope: "col" }, text)),
          ...["Process", "Started", "Failures in a row"].map((text) => h("th", { scope: "col", class: "wide" }, text)),
          h("th", { scope: "col" }, h("span", { class: "unseen" }, "Log")))), this.workers)),
      rollout: this.rollout.element,
      play: h("div", {}, this.play.element),
      settings: h("div", { class: "panel" }, this.settings),
    };
    this.element = h("div", { class: "detail" },
      h("div", { class: "head" }, h("a", { class: "button back", href: "#" }, "← Models"), h("h2", {}, model.name), this.badges, h("span", { class: "grow" }), this.actions),
      this.death,
      h("div", { class: "tabs", role: "tablist", "aria-label": "About this model" }, ...this.buttons),
      ...TABS.map(([word]) => h("div", { role: "tabpanel", id: `panel-${word}`, "aria-labelledby": `tab-${word}`, hidden: word !== tab }, this.panels[word])));
    this.choose(tab);
  }

  choose(tab) {
    this.tab = tab;
    TABS.forEach(([word], index) => {
      const chosen = word === tab;
      this.buttons[index].setAttribute("aria-selected", String(chosen));
      this.buttons[index].tabIndex = chosen ? 0 : -1;
      this.panels[word].parentElement.hidden = !chosen;
    });
    this.sample();
  }

  arrow(event, go) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const index = (TABS.findIndex(([word]) => word === this.tab) + step + TABS.length) % TABS.length;
    go(TABS[index][0]);
    this.buttons[index].focus();
  }

  sample() {
    if (!this.element.isConnected) return;
    if (this.tab === "live") this.plots.show(this.model.key);
    if (this.tab === "rollout") this.rollout.sample();
  }

  renew() {
    this.plots.renew();
    this.rollout.renew();
    this.sample();
  }

  update(model) {
    this.model = model;
    this.play.update(model);
    this.showChat(model);
    const tones = { ready: "good", loading: "warn", failing: "bad", stopped: "" };
    const badges = [[`version ${model.version}`, ""], [model.status === "stopped" ? "without workers" : model.status, tones[model.status]]];
    if (model.default) badges.push(["default", "accent"]);
    if (model.workflow) badges.push([`in workflow ${model.workflow}`, ""]);
    keyed(this.badges, badges, ([text]) => text, () => h("span"), (element, [text, tone]) => {
      element.className = `badge ${tone}`;
      say(element, text);
    });
    this.showActions(model);
    this.showDeath(model);
    this.showWorkers(model);
    this.showSettings(model);
  }

  /** A model is known to chat once its handler is loaded. */
  showChat(model) {
    if (this.chat) return this.chat.update(model);
    if (!model.chats) return undefined;
    this.chat = chatOf(model);
    return this.panels.play.replaceChildren(this.chat.element, h("details", { class: "other" }, h("summary", {}, "Other requests"), this.play.element));
  }

  showActions(model) {
    const several = store.models.filter((one) => one.name === model.name).length > 1;
    const found = [["Scale", "", () => scale(this.model)]];
    if (several && !model.default) found.push(["Make default", "", () => setDefault(this.model)]);
    if (store.server.modelApi) found.push(["Unregister", "danger", () => unregister(this.model)]);
    keyed(this.actions, found, ([label]) => label, ([label, tone, act]) => h("button", { type: "button", class: tone || null, onclick: act }, label), () => {});
  }

  showDeath(model) {
    const failure = model.lastFailure;
    const told = JSON.stringify([failure, model.loadFailure, model.lastReplacement, model.status]);
    if (this.told === told) return;
    this.told = told;
    const found = [];
    if (failure) {
      const old = model.status === "ready" && !model.workers.some((worker) => worker.failuresInARow);
      const repeated = failure.failuresInARow > 1 ? `, ${failure.failuresInARow} times in a row` : "";
      found.push(h("section", { class: `death${old ? " old" : ""}`, "aria-label": "Last death of a worker" },
        h("p", {}, h("strong", {}, `Worker ${failure.workerId} ended: `), failure.reason, h("span", { class: "muted" }, ` (${clock(failure.at)}${repeated})`)),
        failure.lastLines.length ? h("details", { open: !old }, h("summary", {}, `Its last ${failure.lastLines.length} lines`), h("pre", { tabindex: 0 }, failure.lastLines.join("\n"))) : h("p", { class: "muted" }, "It had printed nothing.")));
    }
    if (model.lastReplacement) {
      const one = model.lastReplacement;
      found.push(h("p", { class: "muted" }, `Worker ${one.workerId} was replaced at ${clock(one.at)}: ${one.reason}`));
    }
    this.death.replaceChildren(...found);
    this.death.hidden = !found.length;
  }

  showWorkers(model) {
    const tones = { ready: "good", "given up": "bad", failed: "bad" };
    keyed(this.workers, model.workers, (one) => one.id, (one) => {
      const cells = ["id", "state", "device", "memory", "pid", "started", "failures"].map((name, index) => h(index ? "td" : "th", { class: index > 3 ? "wide" : null, scope: index ? null : "row" }));
      const log = h("button", { type: "button", class: "small", "aria-label": `Log of worker ${one.id}`, onclick: () => workerLog(this.model, log.worker) }, "Log");
      const row = h("tr", {}, ...cells, h("td", { class: "number" }, log));
      Object.assign(row, { cells_: cells, log });
      return row;
    }, (row, one) => {
      row.log.worker = one;
      const [id, state, device, memory, pid, started, failures] = row.cells_;
      say(id, one.id);
      if (state.textContent !== one.state) state.replaceChildren(h("span", { class: `badge ${tones[one.state] ?? "warn"}` }, one.state));
      state.title = one.waitsFor || "";
      say(device, one.node ? `${one.device} on ${one.node}` : one.device);
      say(memory, one.memoryBytes ? bytes(one.memoryBytes) : "–");
      say(pid, one.pid ? String(one.pid) : "–");
      say(started, clock(one.startedAt));
      say(failures, String(one.failuresInARow));
    });
  }

  showSettings(model) {
    const tensor = (one) => `${one.name} ${one.datatype} [${one.shape.join(", ")}]${one.optional ? ", optional" : ""}`;
    const facts = {
      "Archive": model.url,
      "Handler": { torchserve: "TorchServe's interface" }[model.runs] || `by the adapter ${model.runs}`,
      "Registered": `${new Date(model.registeredAt * 1000).toLocaleString()} (${ago(model.registeredAt)})`,
      "Workers": `${model.minWorkers} to ${model.maxWorkers}`,
      "Batch": model.continuousBatching ? `continuous, up to ${model.batchSize} requests` : `up to ${model.batchSize}${model.batchSize > 1 ? `, waits at most ${model.maxBatchDelayMs} ms` : ""}`,
      "Queue": `up to ${model.queueSize} requests`,
      "Answer within": `${model.responseTimeoutS} s`,
      "Sequences": model.stateful ? "yes" : "no",
      "Inputs": model.inputs.map(tensor).join("; ") || "whatever its handler takes",
      "Outputs": model.outputs.map(tensor).join("; ") || "whatever its handler gives",
    };
    keyed(this.settings, Object.entries(facts).flatMap(([name, value]) => [[`${name}?`, "dt", name], [name, "dd", value]]),
      ([key]) => key, ([, element]) => h(element), (element, [, , text]) => say(element, text));
  }
}

/** What stands there as long as no model is chosen. */
export function welcome() {
  const empty = !store.models.length;
  return h("section", { class: "panel welcome" },
    h("h2", {}, empty ? "No model is served yet" : "Choose a model"),
    h("p", {}, empty ? "Register one from the model store: its workers, numbers and a playground appear here." : "Its plots, workers, playground and settings appear here."),
    empty && store.server.modelApi && h("button", { type: "button", class: "main", onclick: registerModel }, "Register a model"));
}

export const place = () => byId("detail");
