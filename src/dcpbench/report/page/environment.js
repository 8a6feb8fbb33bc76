// The machine and the software of each sweep, and what changed while it ran.

function drawEnvironment(app) {
  const columns = app.environments;
  const names = [...new Set(columns.flatMap((column) => Object.keys(column.known)))];
  const section = byId("environment");
  fill(section, el("h2", { id: "environment-title" }, "Environment"));
  if (!names.length) {
    section.append(el("p", { class: "note" }, "Not recorded: no environment.json that can be read."));
  } else {
    section.append(scroller("Environment", el("table", { class: "plain environment" },
      columns.length > 1 && el("thead", {}, el("tr", {}, el("td"), columnHeads(columns.map(({ title }) => visible(title))))),
      el("tbody", {}, ...names.map((name) => environmentLine(name, columns))))));
  }
  if (!app.leftOut.length) return;
  section.append(el("h3", {}, "Left out"), el("ul", {}, ...app.leftOut.map((sentence) => el("li", {}, visible(sentence)))));
}

function environmentLine(name, columns) {
  const texts = columns.map((column) => (name in column.known ? environmentText(column.known[name], name.endsWith("_bytes")) : null));
  const differs = new Set(texts.filter((text, i) => text !== null || !columns[i].partial)).size > 1;
  return el("tr", { class: differs && "differs" },
    el("th", { scope: "row" }, visible(labelOf(name)), differs ? el("span", { class: "mark" }, " differs") : null),
    ...texts.map((text, i) => el("td", {}, text ?? (columns[i].partial ? "as now" : DASH))));
}

function environmentText(value, isSize) {
  if (Array.isArray(value)) {
    const same = [...groupBy(value.map((one) => environmentText(one, isSize)), (text) => text)];
    return same.map(([text, { length }]) => (length > 1 ? `${length} ${TIMES} ${text}` : text)).join(", ") || "none";
  }
  if (value !== null && typeof value === "object") return visible(JSON.stringify(value));
  return isSize && Number.isFinite(value) ? bytes(value) : plain(value);
}
