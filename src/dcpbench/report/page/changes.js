// What changed since the sweep before, as it was computed with the rows.

const CHANGES_SHOWN = 8;

function drawChanges(app) {
  byId("changes").hidden = app.changes.length === 0;
  const cell = ({ row, cell: text }) => (row === null ? breakable(text)
    : [button(visible(app.runs[row].name), () => app.open(app.runs[row]), { class: "link", title: text })]);
  const line = (one) => el("tr", {},
    el("td", { class: one.worse && "no" }, one.what), el("th", { scope: "row" }, ...cell(one)), el("td", {}, visible(one.text)));
  fill(byId("changes"), el("h2", { id: "changes-title" }, "Changed since the sweep before"),
    scroller("What changed", el("table", { class: "plain" },
      el("thead", {}, el("tr", {}, columnHeads(["what", "cell", `before ${ARROW} now`]))),
      el("tbody", {}, ...firstOf(app.changes, CHANGES_SHOWN, line, (rest) => `Show ${rest} more`).map(asRow)))));
}
