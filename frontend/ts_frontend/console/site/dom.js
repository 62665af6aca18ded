// Elements, numbers and times for people. No style attribute is ever written: the page's policy forbids them.

/** An element: `h("a", {href: "#x", class: "y", onclick: f}, "text", child)`; null and false are left out. */
export function h(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key in element && typeof value !== "string") element[key] = value;
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat(3).filter((one) => one !== null && one !== undefined && one !== false));
  return element;
}

export const byId = (id) => document.getElementById(id);

/** Sets a text only when it differs, so that selections and readers aren't disturbed. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Makes the children of `parent` those of `items`, in their order, keeping the element of each key. */
export function keyed(parent, items, keyOf, make, update) {
  const kept = (parent.kept ||= new Map());
  const wanted = new Set();
  let place = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    wanted.add(key);
    let element = kept.get(key);
    if (!element) kept.set(key, (element = make(item)));
    update(element, item);
    if (element === place) place = place.nextElementSibling;
    else parent.insertBefore(element, place);
  }
  for (const [key, element] of kept) {
    if (!wanted.has(key)) {
      element.remove();
      kept.delete(key);
    }
  }
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(name, attributes, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** A small line without axes; `draw(element, values)` shows values. Readers get the number beside it. */
export const spark = () =>
  svg("svg", { class: "spark", viewBox: "0 0 100 24", preserveAspectRatio: "none", "aria-hidden": "true" },
    svg("polygon", {}), svg("polyline", {}));

export function draw(element, values) {
  const top = Math.max(...values.map((value) => value || 0), 1e-9);
  const step = values.length > 1 ? 100 / (values.length - 1) : 100;
  const points = values.map((value, index) => `${(index * step).toFixed(1)},${(23 - 21 * ((value || 0) / top)).toFixed(1)}`);
  const [area, line] = element.children;
  line.setAttribute("points", points.join(" "));
  area.setAttribute("points", points.length ? `0,24 ${points.join(" ")} 100,24` : "");
}

// --- numbers

const NONE = "–";

export function count(value) {
  if (value === null || value === undefined) return NONE;
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(1)}k`;
  if (value >= 100 || Number.isInteger(value)) return String(Math.round(value));
  return value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

export function millis(value) {
  if (value === null || value === undefined) return NONE;
  if (value >= 1000) return `${(value / 1000).toFixed(value >= 10_000 ? 1 : 2)} s`;
  if (value >= 100) return `${Math.round(value)} ms`;
  return value >= 1 ? `${value.toFixed(1)} ms` : `${Math.round(value * 1000)} µs`;
}

export function bytes(value) {
  if (!value) return value === 0 ? "0 B" : NONE;
  for (const [size, unit] of [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (value >= size) return `${(value / size).toFixed(value >= 100 * size ? 0 : 1)} ${unit}`;
  }
  return `${Math.round(value)} B`;
}

export function clock(seconds) {
  return seconds ? new Date(seconds * 1000).toLocaleTimeString() : NONE;
}

export function ago(seconds) {
  const passed = Math.max(0, Date.now() / 1000 - seconds);
  if (passed < 90) return `${Math.round(passed)} s ago`;
  if (passed < 5400) return `${Math.round(passed / 60)} min ago`;
  return passed < 129_600 ? `${Math.round(passed / 3600)} h ago` : `${Math.round(passed / 86_400)} days ago`;
}

let toastTimer = 0;

/** Tells the outcome of an action, to eyes and to screen readers. */
export function toast(text) {
  byId("toast").textContent = text;
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => (byId("toast").textContent = ""), 6000);
}
