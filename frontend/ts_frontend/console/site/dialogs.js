// What changes the server, each in a dialog that says what will happen and shows the server's answer.

import { byId, h, toast } from "./dom.js";
import { Refused, ask, modelPath, rolloutPath, setKey } from "./net.js";
import { store } from "./store.js";

let serial = 0;

/** A field with a label; `name` is the call's parameter. */
export function field(label, name, attributes = {}, hint = "") {
  const id = `field-${(serial += 1)}`;
  return h("div", {},
    h("label", {}, h("span", {}, label), h("input", { id, name, autocomplete: "off", spellcheck: "false", "aria-describedby": hint ? `${id}-hint` : null, ...attributes })),
    hint && h("small", { id: `${id}-hint` }, hint));
}

export const check = (label, name, checked) =>
  h("label", { class: "check" }, h("input", { type: "checkbox", name, checked }), h("span", {}, label));

/**
 * A dialog with a form. `act(values, form)` does it: what it returns is told, what it throws is shown, and the dialog
 * stays open. Focus goes back to where it was.
 */
export function open(title, content, word, act, { danger = false, wide = false } = {}) {
  const id = `dialog-${(serial += 1)}`;
  const said = h("p", { class: "said", role: "alert" });
  const button = word && h("button", { class: danger ? "danger main" : "main", type: "submit" }, word);
  const form = h("form", { method: "dialog" },
    h("h2", { id }, title), ...content, said,
    h("div", { class: "end" }, h("button", { type: "button", onclick: () => dialog.close() }, word ? "Cancel" : "Close"), button));
  const dialog = h("dialog", { "aria-labelledby": id, class: wide ? "wide" : null, onclose: () => dialog.remove() }, form);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (!button) return;
    said.textContent = "";
    button.disabled = true;
    const label = button.textContent;
    button.textContent = "Working …";
    try {
      const told = await act(Object.fromEntries(new FormData(form)), form);
      dialog.close();
      if (told) toast(told);
    } catch (error) {
      said.textContent = error instanceof Refused || error instanceof TypeError ? error.message : String(error);
    } finally {
      button.disabled = false;
      button.textContent = label;
    }
  });
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}

/** The parameters that were given, as a query. */
function query(values, names) {
  const found = new URLSearchParams();
  for (const name of names) if (values[name] !== undefined && values[name] !== "") found.set(name, values[name]);
  return found;
}

export function registerModel() {
  const list = h("datalist", { id: "stored" });
  open("Register a model", [
    field("Archive, folder or URL", "url", { required: true, list: "stored", placeholder: "densenet161.mar" }, "A name in the model store, or an address that allowed_urls admits."),
    list,
    h("div", { class: "pair" },
      field("Name", "model_name", { placeholder: "as the archive says" }),
      field("Workers", "initial_workers", { type: "number", min: 0, max: 1024, value: "1" })),
    h("div", { class: "pair" },
      field("Batch size", "batch_size", { type: "number", min: 1, placeholder: "as configured" }),
      field("Longest wait for a batch (ms)", "max_batch_delay", { type: "number", min: 0, placeholder: "as configured" })),
  ], "Register", async (values) => {
    const asked = query({ ...values, synchronous: "true" }, ["url", "model_name", "initial_workers", "batch_size", "max_batch_delay", "synchronous"]);
    return (await ask("POST", `/models?${asked}`)).status;
  });
  ask("GET", "/console/store").then(
    (found) => list.replaceChildren(...found.models.map((name) => h("option", { value: name }))),
    () => {}, // a hint less; registering says what is wrong
  );
}

export function scale(model) {
  open(`Scale ${model.name} ${model.version}`, [
    h("p", { class: "muted" }, `It has ${model.workers.length} workers. Those beyond the number finish what they run.`),
    h("div", { class: "pair" },
      field("At least", "min_worker", { type: "number", min: 0, max: 1024, required: true, value: String(model.minWorkers) }),
      field("At most", "max_worker", { type: "number", min: 0, max: 1024, placeholder: "the same" })),
  ], "Scale", async (values) => {
    const asked = query({ ...values, synchronous: "true" }, ["min_worker", "max_worker", "synchronous"]);
    return (await ask("PUT", `${modelPath(model)}?${asked}`)).status;
  });
}

export function setDefault(model) {
  open(`Make ${model.version} the default?`, [
    h("p", {}, `Calls of ${model.name} that name no version go to version ${model.version} from then on.`),
  ], "Make default", async () => (await ask("PUT", modelPath(model, "/set-default"))).status);
}

export function unregister(model) {
  open(`Unregister ${model.name} ${model.version}?`, [
    h("p", {}, "What it has accepted is answered first. Its files stay in the model store."),
  ], "Unregister", async () => {
    const told = (await ask("DELETE", modelPath(model))).status;
    location.hash = "";
    return told;
  }, { danger: true });
}

/** What a rollout's actions do: the button, and the dialog's sentence. */
export const ROLLOUT_ACTIONS = {
  promote: ["Promote", (one) => `Version ${one.new} becomes the default at once, and gets all calls that name no version. It can still be rolled back.`],
  rollback: ["Roll back", (one) => `Version ${one.old} gets all calls that name no version, at once. Sequences that have begun at version ${one.new} end there.`],
  pause: ["Pause rollout", (one) => `It stays at ${one.percent} % of the calls until it is resumed. It still goes back if version ${one.new} is worse.`],
  resume: ["Resume rollout", () => "It goes on to the next step when the verdict allows that."],
};

export function changeRollout(name, rollout, action, then) {
  const [label, says] = ROLLOUT_ACTIONS[action];
  open(`${label}: ${name} ${rollout.new}?`, [h("p", {}, says(rollout))], label, async () => {
    const found = await ask("POST", rolloutPath(name, `/${action}`));
    then();
    return `The rollout of ${name} ${found.new} is ${found.state}.`;
  }, { danger: action === "rollback" });
}

const LOG_MS = 1000;

/** The last lines of a worker, read again every second as long as the dialog is open and follows. */
export function workerLog(model, worker) {
  const lines = h("pre", { tabindex: 0, role: "log", "aria-label": "Last lines", "aria-live": "off" }, "…");
  const following = check("Follow", "follow", true);
  const dialog = open(`Log of worker ${worker.id}`, [
    h("p", { class: "muted" }, `${model.name} ${model.version}, process ${worker.pid || "–"}. At most the last hundred lines; the whole log is in the server's log directory.`),
    lines, following,
  ], "", null, { wide: true });
  const path = modelPath(model, `/workers/${encodeURIComponent(worker.id)}/log`);
  async function read() {
    if (!dialog.isConnected) return;
    if (lines.textContent === "…" || following.querySelector("input").checked) {
      try {
        const text = (await ask("GET", path)).lines.join("\n") || "It has printed nothing yet.";
        if (text !== lines.textContent) {
          lines.textContent = text;
          lines.scrollTop = lines.scrollHeight;
        }
      } catch (error) {
        lines.textContent = error.message;
      }
    }
    setTimeout(read, LOG_MS);
  }
  read();
}

/** Asks for the management key; `then` begins anew with it. */
export function askKey(then) {
  if (byId("key-dialog")) return;
  const dialog = open("This server needs a key", [
    h("p", { class: "muted" }, `The management key, which key_file.json of ${store.server.name || "the server"} has. It stays in this tab until the tab is closed.`),
    field("Management key", "key", { type: "password", required: true }),
  ], "Open the console", async (values) => {
    setKey(values.key.trim());
    await ask("GET", "/models?limit=1");
    then();
  });
  dialog.id = "key-dialog";
}
