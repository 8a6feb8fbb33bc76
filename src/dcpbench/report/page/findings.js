// Runs that did not end as expected; then, folded, the known failures and skips.

const FINDINGS_SHOWN = 6;
const KNOWN_SHOWN = 12;
const CELLS_SHOWN = 4;

function drawFindings(app, shown) {
  const groups = similar(shown.filter((run) => !run.ok));
  byId("findings").hidden = groups.length === 0;
  fill(byId("findings"), el("h2", { id: "findings-title" }, "Not as expected"), listOf(app, groups, FINDINGS_SHOWN));
}

function drawKnown(app, shown) {
  const groups = similar(shown.filter((run) => run.ok && run.kind.name !== "pass" && run.kind.name !== "seen"));
  byId("known").hidden = groups.length === 0;
  const number = groups.reduce((sum, runs) => sum + runs.length, 0);
  const open = byId("known").querySelector("details")?.open;
  fill(byId("known"), el("details", { open: open && true },
    el("summary", {}, `Known failures and skips: ${counted(number, "run")}`), listOf(app, groups, KNOWN_SHOWN)));
}

// Runs with the same status and reason, except for numbers.
function similar(runs) {
  const groups = [...groupBy(runs, (run) => `${run.kind.name} ${run.reason_group}`).values()];
  return groups.sort((a, b) => a[0].kind.rank - b[0].kind.rank);
}

function listOf(app, groups, most) {
  const lines = firstOf(groups, most, (runs) => finding(app, runs), (rest) => `Show ${rest} more`);
  return el("ul", { class: "findings" }, ...lines.map((line) => (line.matches("li") ? line : el("li", { "data-more": true }, line))));
}

// Runs with the same status and reason are one entry.
function finding(app, runs) {
  const cells = [...groupBy(runs, (run) => run.place).values()];
  const times = (same) => same.length > 1 && el("span", { class: "times-run" }, ` ${TIMES}${same.length}`);
  const link = (same) => el("span", {},
    button([visible(same[0].name), times(same)], () => app.open(same[0]), { class: "link", title: plain(same[0].cell) }));
  return el("li", {},
    el("div", { class: "finding-head" },
      badge(runs[0].kind), el("b", {}, runs[0].kind.label), runs.length > 1 ? counted(runs.length, "run") : null),
    runs[0].short ? el("p", { class: "reason clamped" }, visible(runs[0].short)) : null,
    el("div", { class: "cells" }, ...firstOf(cells, CELLS_SHOWN, link, (rest) => `and ${rest} more`)));
}

function drawFaults(app, shown) {
  const injected = shown.filter((run) => run.fault !== null && run.fault_seen !== null);
  byId("faults").hidden = injected.length === 0;
  const seen = injected.filter((run) => run.fault_seen).length;
  const lines = [...groupBy(injected, (run) => run.fault)].map(([fault, runs]) => el("tr", {},
    el("th", { scope: "row" }, plain(fault)),
    el("td", {}, `${runs.filter((run) => run.fault_seen).length} of ${runs.length}`),
    el("td", {}, [...new Set(runs.flatMap((run) => run.seen_by))].join(", ") || DASH)));
  fill(byId("faults"),
    el("h2", { id: "faults-title" }, "Injected faults"),
    el("p", {}, `${seen} of ${injected.length} were detected as expected.`),
    ...matricesOf(app, true, shown).flat(),
    el("details", {}, el("summary", {}, "Which check detected which fault"), scroller("Which check detected which fault", el("table", { class: "plain" },
      el("thead", {}, el("tr", {}, columnHeads(["fault", "fault_seen", "detected by"]))),
      el("tbody", {}, ...lines)))));
}
