// The head of the page: a verdict in a sentence, when and where it was measured, and what changed since the sweep before.

const CHANGES_SHOWN = 8;
const NOT_RUN_SHOWN = 20;
const FAILING = ["newly failing", "flaky", "newly skipped", "vanished"];

function describeSweep(app) {
  const { runs } = app;
  const verdict = byId("verdict");
  verdict.classList.toggle("bad", runs.some((run) => !run.ok) || app.notRun.length > 0 || runs.every((run) => run.status === "skip"));
  verdict.textContent = verdictOf(runs);
  if (app.notRun.length) {
    const few = app.notRun.slice(0, NOT_RUN_SHOWN).map(visible).join(", ");
    const rest = app.notRun.length - NOT_RUN_SHOWN;
    verdict.append(el("span", { class: "named", title: rest > 0 ? `${few}, and ${rest} more` : few }, ` ${counted(app.notRun.length, "cell")} more did not run yet.`));
  }
  byId("matrix-section").hidden = runs.length === 0;
  fill(byId("origin"), ...app.origin.map((text) => el("span", {}, visible(text))));
  const same = [...app.axes].filter(([axis, values]) => values.length === 1 && values[0] !== DASH && axis !== "sweep");
  fill(byId("constants"), ...same.map(([axis, [value]]) => el("span", {}, `${axis}=`, el("b", {}, plain(value)))));
  fill(byId("against"), against(app));
  drawChanges(app);
}

function verdictOf(runs) {
  if (!runs.length) return "This sweep has no rows yet.";
  const places = new Set(runs.map((run) => run.place)).size;
  const size = places === runs.length ? counted(places, "cell") : `${counted(runs.length, "run")} of ${counted(places, "cell")}`;
  if (runs.every((run) => run.status === "skip")) return `${size}: all were skipped.`;
  const count = (some) => [...groupBy(some, (run) => run.kind)].sort(([a], [b]) => a.rank - b.rank)
    .map(([kind, { length }]) => `${length} ${kind.label}`).join(", ");
  const bad = runs.filter((run) => !run.ok);
  const known = runs.filter((run) => run.ok && run.kind.name !== "pass");
  const as = bad.length ? `${bad.length} not as ${bad.length === 1 ? "it" : "they"} should be (${count(bad)})` : runs.length === 1 ? "as it should be" : "all as they should be";
  return `${size}: ${as}${known.length ? `${bad.length ? "; among the others" : ", among them"} ${count(known)}` : ""}.`;
}

function against({ before }) {
  if (!before) return "There is no sweep before it with the same cells.";
  const { name, started_at: started, counts, costs, differing, apart } = before;
  const worse = costs.filter((one) => one.worse).length;
  const changes = [...Object.entries(counts).map(([change, count]) => `${count} ${change}`),
    worse && counted(worse, "cost") + " worse", costs.length > worse && counted(costs.length - worse, "cost") + " better"].filter(Boolean);
  const others = differing.filter(({ what }) => what !== "torch" && what !== "git_commit").map(({ what }) => what);
  const torch = differing.filter(({ what }) => what === "torch").map((one) => `; torch ${one.old} ${ARROW} ${one.new}`);
  return ["Against ", el("b", {}, visible(name)), started && ` of ${started.slice(0, 10)}`, ": ",
    visible(apart || changes.join(", ") || "no status changed, and no cost beyond noise"),
    visible(torch.join("")), others.length > 0 && `; other ${others.map(visible).join(", ")}`,
    before.too_few_runs && "; costs of single cells need 3 runs of each to be compared (repeats=5)", "."];
}

function drawChanges(app) {
  const { statuses = [], costs = [] } = app.before ?? {};
  const section = byId("changes");
  section.hidden = statuses.length + costs.length === 0;
  const bad = ({ change }) => FAILING.includes(change);
  const cell = ({ row, cell: text, of }) => (row === null ? breakable(text ?? of)
    : [button(nameOf(app, app.runs[row]), () => app.open(app.runs[row]), { class: "link", title: text ?? of })]);
  const line = (name, worse, one) => el("tr", {},
    el("td", { class: worse && "no" }, name), el("th", { scope: "row" }, ...cell(one)),
    el("td", {}, one.old === one.new ? `${number(one.ratio)}${TIMES}` : `${visible(one.old)} ${ARROW} ${visible(one.new)}`));
  const lines = [
    ...statuses.filter(bad).map((one) => () => line(one.change, true, one)),
    ...costs.map((one) => () => line(`${one.metric} ${one.verdict}`, one.worse, one)),
    ...statuses.filter((one) => !bad(one)).map((one) => () => line(one.change, false, one)),
  ];
  fill(section, el("h2", { id: "changes-title" }, "Changed since the sweep before"),
    scroller("What changed", el("table", { class: "plain" },
      el("thead", {}, el("tr", {}, columnHeads(["what", "cell", `before ${ARROW} now`]))),
      el("tbody", {}, ...firstOf(lines, CHANGES_SHOWN, (draw) => draw(), (rest) => `Show ${rest} more`).map(asRow)))));
}
