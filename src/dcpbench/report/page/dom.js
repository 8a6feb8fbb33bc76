// Building blocks. Texts of rows become text nodes, never markup: nothing in these scripts parses HTML.

const byId = (id) => document.getElementById(id);
const DASH = "\u2013";
const TIMES = "\u00d7";
const ARROW = "\u2192";

function el(name, attributes, ...children) {
  return build(document.createElement(name), attributes, children);
}

function svg(name, attributes, ...children) {
  return build(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

// The children of an element, in place of those it had; null and false are skipped.
function fill(element, ...children) {
  element.replaceChildren();
  return build(element, {}, children);
}

// Attributes that are functions listen for the event of that name; null and false leave one out.
function build(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (isThere(value)) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter(isThere));
  return element;
}

function isThere(child) {
  return child !== null && child !== undefined && child !== false;
}

function columnHeads(names) {
  return names.map((name) => el("th", { scope: "col" }, name));
}

// A wide table scrolls separately, also by keyboard; its edge fades where columns are hidden.
function scroller(label, table) {
  const named = label && { tabindex: "0", role: "region", "aria-label": `${label}: table` };
  const fade = () => box.classList.toggle("more", box.scrollLeft + box.clientWidth < box.scrollWidth - 1);
  const box = el("div", { class: "scrolls", scroll: fade, ...named }, table);
  const sizes = new ResizeObserver(fade);
  for (const element of [box, table]) sizes.observe(element);
  return box;
}

// Pairs of a name and its value.
function factList(pairs) {
  return el("dl", { class: "facts" }, ...pairs.flatMap(([name, text]) => [el("dt", {}, name), el("dd", {}, text)]));
}

function button(text, onClick, attributes) {
  return el("button", { type: "button", click: onClick, ...attributes }, text);
}

// Control characters and those that turn the direction of text are shown, not obeyed; half a surrogate pair is not text.
function visible(text) {
  const picture = (char) => String.fromCharCode(0x2400 + (char === "\x7f" ? 0x21 : char.charCodeAt(0)));
  const escaped = (char) => `\\u${char.charCodeAt(0).toString(16).padStart(4, "0")}`;
  return String(text)
    .replace(/\p{Surrogate}/gu, "\ufffd")
    .replace(/[\x00-\x08\x0b-\x1f\x7f]/g, picture)
    .replace(/[\x80-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]/g, escaped);
}

function plain(value) {
  return value === null || value === undefined ? DASH : visible(value);
}

// A name that can be broken into lines after its commas.
function breakable(name) {
  return plain(name).split(/(?<=,)/).flatMap((part, i) => (i ? [el("wbr"), part] : [part]));
}

function number(value, digits = 3) {
  if (value === null || value === undefined) return DASH;
  if (value !== 0 && (Math.abs(value) < 1e-4 || Math.abs(value) >= 1e6)) return value.toExponential(digits - 1);
  return String(Number(value.toPrecision(digits)));
}

function seconds(value) {
  if (value === null || value === undefined) return DASH;
  return value < 1 ? `${fixed(value * 1000)} ms` : `${fixed(value)} s`;
}

function fixed(value) {
  return value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

// As size_text() of config/text.py does.
function bytes(value) {
  if (value === null || value === undefined) return DASH;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = units.findLastIndex((_, i) => i === 0 || value >= 1024 ** i);
  return `${(value / 1024 ** power).toFixed(power ? 1 : 0)} ${units[power]}`;
}

function bytesPerSecond(value) {
  return `${bytes(value)}/s`;
}

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

function groupBy(items, key) {
  const groups = new Map();
  for (const item of items) {
    const name = key(item);
    if (groups.has(name)) groups.get(name).push(item);
    else groups.set(name, [item]);
  }
  return groups;
}

function counted(count, noun, plural = "s") {
  return `${count} ${noun}${count === 1 ? "" : plural}`;
}

// The first few of many, and a button that shows the rest in their place.
function firstOf(items, few, draw, more) {
  const rest = items.slice(few);
  if (rest.length < 2) return items.map((item) => draw(item));
  const show = button(more(rest.length), () => {
    const drawn = rest.map((item) => draw(item));
    const holder = show.closest("[data-more]") ?? show;
    holder.replaceWith(...drawn);
    drawn[0].querySelector("button, summary")?.focus();
  }, { class: "quiet more" });
  return [...items.slice(0, few).map((item) => draw(item)), show];
}
