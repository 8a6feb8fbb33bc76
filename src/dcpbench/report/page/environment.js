// The machine and the software that rows were measured on, sweep by sweep, and what changed while one ran.

function drawEnvironment(app) {
  const columns = Object.entries(app.environments).flatMap(([sweep, known]) => environmentColumns(app, sweep, known));
  const names = [...new Set(columns.flatMap((column) => Object.keys(column.known)))];
  const section = byId("environment");
  fill(section, el("h2", { id: "environment-title" }, "Environment"));
  if (!names.length) {
    section.append(el("p", { class: "note" }, "Not recorded: there is no environment.json that can be read."));
  } else {
    section.append(el("div", { class: "scrolls" }, el("table", { class: "plain environment" },
      columns.length > 1 ? el("thead", {}, el("tr", {}, el("td", {}), ...columns.map((column) => el("th", { scope: "col" }, visible(column.title))))) : null,
      el("tbody", {}, ...names.map((name) => environmentLine(name, columns))))));
  }
  if (app.leftOut.length) section.append(el("h3", {}, "Left out"), el("ul", {}, ...app.leftOut.map((sentence) => el("li", {}, visible(sentence)))));
}

// A sweep that was resumed elsewhere has `earlier`: what was different then, and nothing else.
function environmentColumns(app, sweep, known) {
  const { earlier, ...now } = known;
  const before = (Array.isArray(earlier) ? earlier : []).map((other, i) => ({ title: `${sweep}, earlier (${i + 1})`, known: other ?? {}, partial: true }));
  return [{ title: sweep, known: now, partial: false }, ...before];
}

function environmentLine(name, columns) {
  const texts = columns.map((column) => (name in column.known ? environmentText(column.known[name]) : null));
  const differs = new Set(texts.filter((text, i) => text !== null || !columns[i].partial)).size > 1;
  return el("tr", { class: differs && "differs" },
    el("th", { scope: "row" }, visible(name), differs ? el("span", { class: "mark" }, " differs") : null),
    ...texts.map((text, i) => el("td", {}, text ?? (columns[i].partial ? "as now" : DASH))));
}

function environmentText(value) {
  if (Array.isArray(value)) {
    return [...groupBy(value.map(environmentText), (text) => text)].map(([text, same]) => (same.length > 1 ? `${same.length} ${TIMES} ${text}` : text)).join(", ") || "none";
  }
  if (value !== null && typeof value === "object") return visible(JSON.stringify(value));
  return plain(value);
}
