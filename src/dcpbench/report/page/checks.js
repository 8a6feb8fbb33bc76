// Check by cell: which check failed, or could not have failed, where; without opening a cell.

const CELLS_WITH_CHECKS = 25;
const KNOWN_CELLS_WITH_CHECKS = 5;
const MARKS = {
  fail: { letter: "F", means: "failed" },
  xfail: { letter: "x", means: "failed, a known failure" },
  vacuous: { letter: "V", means: "passed, but could not have failed" },
  pass: { letter: "P", means: "passed" },
};

function drawChecks(app, shown) {
  const runs = shown.filter((run) => run.fault === null || !run.ok);
  const cells = [...groupBy(runs, (run) => run.place).values()].filter((of) => of.some((run) => app.checks.some((check) => isBad(run, check))))
    .sort((a, b) => worst(a).rank - worst(b).rank);
  const few = Math.min(CELLS_WITH_CHECKS, Math.max(KNOWN_CELLS_WITH_CHECKS, cells.filter((of) => of.some((run) => !run.ok)).length));
  const made = app.checks.filter(({ name }) => runs.some((run) => run[name] !== null)).sort((a, b) => a.training - b.training);
  const bad = made.filter((check) => runs.some((run) => isBad(run, check)));
  byId("checks").hidden = made.length === 0;
  const passed = made.filter((check) => !bad.includes(check)).map((check) => checkName(check, "all"));
  const line = (of) => el("tr", {},
    el("th", { scope: "row" }, visible(of[0].name)), ...bad.map((check) => el("td", {}, checkSquare(app, of, check))));
  fill(byId("checks"), el("h2", { id: "checks-title" }, `Check ${TIMES} cell`),
    passed.length > 0 && el("p", { class: "note" }, bad.length ? "Passed in every cell: " : `All ${passed.length} checks passed in every cell: `,
      ...passed.flatMap((name, i) => (i ? [", ", ...name] : name)), "."),
    bad.length > 0 && scroller(null, el("table", { class: "matrix small checked", role: "grid", "aria-labelledby": "checks-title", keydown: walk },
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "cell"), ...bad.map((check) => checkHead(runs, check)))),
      el("tbody", {}, ...firstOf(cells, few, line, (rest) => `Show ${rest} more cells`).map(asRow)))));
  byId("checks").querySelector(".square")?.setAttribute("tabindex", "0");
}

// A check that passed in a vacuous cell may be the one that could not have failed: its control says so.
function isBad(run, { name }) {
  return run[name] === false || (run[name] === true && run.status === "vacuous" && run.check_details[name]?.missed_count > 0);
}

// The name of a check, which shows on click what it proves and what its control was.
function checkName(check, where) {
  const id = `${where}-${check.name}`;
  return [button(check.name.split(/(?<=_)/).flatMap((part) => [el("wbr"), part]), null, { class: "link", popovertarget: id }),
    el("div", { id, popover: true, class: "explained" }, el("h3", {}, check.name), ...check.explained.map((text) => el("p", {}, text)))];
}

// Why a run does not have a check, by the names of checks.
function whyNull(run) {
  return new Map(run.nulls);
}

function checkHead(runs, check) {
  const made = runs.filter((run) => run[check.name] !== null);
  const bad = made.filter((run) => isBad(run, check)).length;
  return el("th", { scope: "col" }, check.training && el("small", {}, "training: "), ...checkName(check, "head"),
    el("small", {}, ` ${bad} of ${made.length}`));
}

function checkSquare(app, runs, check) {
  const made = runs.filter((run) => run[check.name] !== null);
  if (!made.length) return el("span", { class: "gap", title: `${check.name}: ${whyNull(runs[0]).get(check.name)}` }, el("span", { class: "hidden" }, "does not apply"));
  const bad = made.filter((run) => isBad(run, check));
  const kind = !bad.length ? "pass" : bad.every((run) => run.status === "xfail") ? "xfail" : bad.some((run) => run[check.name] === false) ? "fail" : "vacuous";
  const label = `${visible(runs[0].name)}: ${check.name} ${MARKS[kind].means}${bad.length && made.length > 1 ? ` in ${bad.length} of ${made.length} runs` : ""}`;
  const open = bad[0] ?? made[0];
  return button([MARKS[kind].letter], () => app.open(open), { class: `square s-${kind}`, "aria-label": label, title: label, tabindex: "-1", "data-key": open.key });
}
