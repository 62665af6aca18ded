// The console's start: the connection, the page's address (#/MODEL/VERSION/TAB), and who shows what when.

import { byId, say } from "./dom.js";
import { askKey, registerModel } from "./dialogs.js";
import { Detail, place, welcome } from "./detail.js";
import { makeTotals, placeOf, showModels } from "./models.js";
import { follow } from "./net.js";
import { find, listen, store, take, tell } from "./store.js";

let detail = null;
let empty = null;

// --- the model that is shown

function asked() {
  const [, name, version, tab] = location.hash.split("/").map(decodeURIComponent);
  return { name: name || "", version: version || "", tab: tab || "live" };
}

function showChosen() {
  const { name, version, tab } = asked();
  const model = name ? find(name, version) : null;
  document.body.classList.toggle("open", Boolean(model));
  if (!model) {
    detail = null;
    const kind = `${store.models.length > 0}`;
    if (empty !== kind) place().replaceChildren(welcome());
    empty = kind;
  } else {
    empty = null;
    if (detail?.model.key !== model.key) {
      detail = new Detail(model, tab, (word) => (location.hash = `${placeOf(detail.model)}/${word}`));
      place().replaceChildren(detail.element);
    } else if (detail.tab !== tab) detail.choose(tab);
    detail.update(model);
    detail.sample();
  }
  document.title = model ? `${model.name} ${model.version} · torchrelay` : "torchrelay console";
}

const list = () => showModels(detail?.model.key);

addEventListener("hashchange", () => {
  const before = detail?.model.key;
  showChosen();
  list();
  if (detail && detail.model.key !== before) place().focus({ preventScroll: true });
});

// Its hash would be taken for a model's place.
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  (detail ? place() : byId("filter")).focus();
});

// --- what the server says

let begun = false;

listen("state", () => {
  const server = store.server;
  // The only model is chosen by itself, once: who goes back to the list stays there.
  if (!begun && !asked().name && store.models.length === 1) history.replaceState(null, "", placeOf(store.models[0]));
  begun = true;
  say(byId("version"), server.version || "");
  byId("docs").hidden = !server.docs;
  byId("register").hidden = !server.modelApi;
  byId("notice").hidden = !server.draining;
  say(byId("notice"), server.draining ? "The server is shutting down: what it has accepted is answered." : "");
  showChosen();
  list();
});

const totals = makeTotals(byId("totals"));
listen("sample", () => {
  totals();
  list();
  detail?.sample();
});

const TONES = { live: "good", lost: "bad", key: "warn" };
const WORDS = { live: "live", lost: "no connection", key: "needs a key" };

function connection(word, error) {
  const badge = byId("connection");
  badge.className = `badge ${store.paused && word === "live" ? "warn" : TONES[word]}`;
  say(badge, store.paused && word === "live" ? "paused" : WORDS[word]);
  badge.title = error?.message || "";
  connection.word = word;
  if (word === "key") askKey(again);
}

const again = follow(take, connection);

// --- the bar

byId("register").addEventListener("click", registerModel);
byId("filter").addEventListener("input", list);
byId("order").addEventListener("change", list);
byId("pause").addEventListener("click", () => {
  store.paused = !store.paused;
  byId("pause").setAttribute("aria-pressed", String(store.paused));
  say(byId("pause"), store.paused ? "Resume" : "Pause");
  connection(connection.word || "lost");
  tell("state");
  tell("sample");
});

const THEME = "torchrelay-theme";

function theme(word) {
  if (word === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = word;
  detail?.renew();
}

byId("theme").value = localStorage.getItem(THEME) || "auto";
byId("theme").addEventListener("change", (event) => {
  localStorage.setItem(THEME, event.target.value);
  theme(event.target.value);
});
theme(byId("theme").value);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => detail?.renew());
addEventListener("resize", () => detail?.sample());
