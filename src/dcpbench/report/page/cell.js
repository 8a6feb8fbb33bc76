// One opened run: its status and reason, costs, configuration, and the command to run it again.

const LOSSES = ["loss_at_save", "loss_continued", "loss_resumed", "loss_twin"];
const BOUNDS = ["gradient_bound", "step_bound"];
const VERDICTS = [
  { name: "resume", title: "Resume", training: false },
  { name: "training", title: "Training, each step compared with an unwrapped twin", training: true },
];
const ENDED_EARLY = ["crash", "timeout", "error"];
const ORIGIN = ["torch_version", "target_commit", "dcpbench_commit", "started_at", "config_digest", "code_digest"];

function makeDialog(app) {
  const dialog = byId("cell");
  dialog.addEventListener("close", () => app.closed());
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
}

// Follow the address: open, change or close the dialog.
function drawCell(app) {
  const dialog = byId("cell");
  const run = app.state.cell ? app.runs.find((one) => one.key === app.state.cell) : null;
  if (!run) {
    if (dialog.open) dialog.close();
    if (app.state.cell) say(`There is no run ${plain(app.state.cell)} in this report.`);
    return;
  }
  fill(dialog, ...cellParts(app, run));
  if (!dialog.open) dialog.showModal();
  dialog.scrollTop = 0;
  for (const log of dialog.querySelectorAll(".log")) log.scrollTop = log.scrollHeight;
  byId("cell-title").focus();
}

function cellParts(app, run) {
  return [
    el("div", { class: `cell-head s-${run.kind.name}` },
      el("p", { class: "came-to" }, badge(run.kind), ` ${run.kind.label} `, el("small", {}, run.kind.means)),
      button("Close", () => byId("cell").close(), { class: "close", "aria-label": "Close", title: "Close (Escape)" })),
    el("h2", { id: "cell-title", tabindex: "-1" }, ...breakable(run.cell)),
    siblings(app, run),
    part("Reason", run.reason && el("p", { class: "reason" }, visible(run.reason))),
    part(run.causes.length > 1 ? "Likely causes" : "Likely cause", ...run.causes.map((cause) => el("p", {}, visible(cause)))),
    part("Position of each rank", places(run)),
    part("Trace and log", logTail(run.ending.log_tail), logPath(app, run)),
    part("Run it again", againLine(run)),
    !areStops([run]) && part("Checks", checkTable(app, run)),
    part("Losses", lossChart(run.losses, run.ending.marks), facts(run, LOSSES, (value) => String(value))),
    el("div", { class: "pair" },
      part("cell_s by phases", phaseTable(run)),
      part("Times, slowest rank", facts(run, metricsIn(app, ["s"]), seconds)),
      part("Sizes", facts(run, metricsIn(app, ["bytes"]), bytes)),
      part("Other metrics", facts(run, metricsIn(app, [""]), number))),
    part("Configuration", configurationOf(app, run)),
    part("Measured with", facts(run, ORIGIN, plain)),
  ].filter(Boolean);
}

// A link that works as long as the page is in the folder of the sweep; pages of several can be anywhere.
function logPath(app, run) {
  if (run.status === "skip") return null;
  return el("p", {}, "Log: ", fileLink(app, run, run.ending.log ?? `${run.key}/rank${run.ending.rank ?? 0}.log`));
}

function fileLink(app, run, path) {
  const href = `./${path.split("/").map(encodeURIComponent).join("/")}`;
  return run.sweep ? el("code", {}, visible(path)) : el("a", { href }, visible(path));
}

function part(title, ...content) {
  const there = content.filter(Boolean);
  return there.length ? el("section", {}, el("h3", {}, title), ...there) : null;
}

function facts(run, names, text) {
  const known = names.filter((name) => isMeasured(run[name]));
  return known.length ? factList(known.map((name) => [labelOf(name), text(run[name])])) : null;
}

// The other runs of its square.
function siblings(app, run) {
  const same = app.runs.filter(placeOf(app, run).hasToo);
  if (same.length < 2) return null;
  const several = new Set(same.map((one) => one.name)).size > 1;
  const label = (one) => visible([several && one.name, one.number].filter(Boolean).join(" \u00b7 "));
  const pick = (one) => {
    app.replace(one);
    byId("cell").querySelector("[aria-current]")?.focus();
  };
  const chip = (one) => button([badge(one.kind), ` ${label(one)}`], () => pick(one), {
    class: "chip", "aria-current": one === run && "true", "aria-label": `${label(one)}: ${one.kind.label}`,
  });
  return el("nav", { class: "siblings", "aria-label": "Runs of this square" }, ...same.map(chip));
}

function againLine(run) {
  return commandLine(run.again);
}

function commandLine(command) {
  const code = el("code", {}, visible(command));
  const copied = button("Copy", async () => {
    copied.textContent = (await copy(command, code)) ? "Copied" : "Select it and copy";
    say(copied.textContent);
  }, { class: "copy" });
  return el("div", { class: "again" }, code, copied);
}

async function copy(text, code) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    getSelection().selectAllChildren(code);
    return document.execCommand("copy");
  }
}

function checkTable(app, run) {
  const names = app.checks.map(({ name }) => name);
  const applied = names.filter((check) => run[check] !== null);
  const rest = [...groupBy([...whyNull(run)], ([, why]) => why)].map(([why, of]) => [visible(of.map(([name]) => name).join(", ")), visible(why)]);
  const note = rest.length ? el("div", { class: "nulls" }, el("h3", {}, ENDED_EARLY.includes(run.status) ? "Checks that did not run or do not apply" : "Checks that do not apply"), factList(rest)) : null;
  if (!applied.length && ENDED_EARLY.includes(run.status)) return el("p", { class: "note" }, "No check ran before the cell ended.");
  if (!applied.length && rest.length === 1) return el("p", { class: "note" }, `No check ran: ${rest[0][1]}.`);
  return el("div", {},
    scroller("Checks", el("table", { class: "plain checks" },
      el("thead", {}, el("tr", {}, columnHeads(["check", "passed", "control caught"]))),
      el("tbody", {}, ...VERDICTS.flatMap((verdict) => verdictLines(app, run, verdict, applied))))),
    facts(run, BOUNDS, plain), note);
}

// Resuming and training have separate verdicts.
function verdictLines(app, run, { name, title, training }, applied) {
  const checks = app.checks.filter((check) => check.training === training && applied.includes(check.name));
  if (!checks.length) return [];
  const came = run[name] === null ? "" : run[name] ? ": passed" : ": failed";
  return [el("tr", { class: "of-verdict" }, el("th", { scope: "rowgroup", colspan: "3" }, `${title}${came}`)),
    ...checks.flatMap((check) => checkLines(app, run, check.name))];
}

function checkLines(app, run, check) {
  const seen = run.check_details[check] ?? { names: null, missed_count: 0, missed: "", mismatches: null, worst: [] };
  const passed = run[check];
  return [
    el("tr", {}, el("th", { scope: "row" }, ...checkName(app.checks.find(({ name }) => name === check), "cell")),
      el("td", {}, passed ? "yes" : el("strong", { class: run.status === "xfail" ? null : "no" }, "NO"),
        seen.mismatches ? `, ${counted(seen.mismatches, "mismatch", "es")}` : ""),
      el("td", {}, power(seen))),
    seen.missed ? under(`Not caught by the control: ${visible(seen.missed)}`) : null,
    ...seen.worst.map((one) => under(visible(one))),
  ];
}

function power(seen) {
  if (seen.names === 0) return "none ran";
  return seen.names ? `${seen.names - seen.missed_count} of ${seen.names}` : DASH;
}

function under(text) {
  return el("tr", { class: "under" }, el("td", { colspan: "3" }, text));
}

function metricsIn(app, units) {
  return app.metrics.filter(({ unit }) => units.includes(unit)).map(({ name }) => name);
}

// The phases of the slowest rank; the rest of an attempt is starting ranks and ending stages.
function phaseTable(run) {
  const phases = Object.entries(run.ending.phases ?? {}).filter(([, value]) => Number.isFinite(value));
  const total = run.cell_s ?? run.shared_cell_s;
  if (!phases.length || !isMeasured(total)) return null;
  const rest = total - phases.reduce((sum, [, value]) => sum + value, 0);
  const line = ([name, value], foot) => el("tr", {}, el("th", { scope: "row" }, visible(name)), el("td", { class: "n" }, `${value.toFixed(3)} s`),
    el("td", { class: "bar" }, foot ? null : svg("svg", { class: "strip", "aria-hidden": "true" },
      svg("rect", { x: 0, y: 4, height: 8, width: `${Math.max(0, (100 * value) / total).toFixed(1)}%` }))));
  return el("table", { class: "plain times" },
    el("tbody", {}, ...[...phases, ["other", rest]].map((one) => line(one))),
    el("tfoot", {}, line(["cell_s", total], true)));
}

// The last line of each rank when a time limit was reached.
function places(run) {
  const ranks = Object.entries(run.ending.doing ?? {});
  return ranks.length ? factList(ranks.map(([name, frame]) => [`rank ${plain(name)}`, plain(frame)])) : null;
}

function logTail(lines) {
  const text = lines?.map(visible).join("\n").trimEnd();
  return text ? el("pre", { class: "log", tabindex: "0", "aria-label": "End of the log" }, text) : null;
}

function configurationOf(app, run) {
  return el("div", {},
    facts(run, [...app.names, "repeat", "retry_of"], plain),
    el("p", {}, "Overrides: ", el("code", {}, plain(run.overrides))));
}
