// One run, opened: its status and why, its costs, its configuration, and how to run it again.

const LOSSES = ["loss_at_save", "loss_continued", "loss_resumed", "loss_twin"];
const ORIGIN = ["torch_version", "git_commit", "started_at", "config_digest", "code_digest"];

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
    el("header", { class: `cell-head s-${run.kind.name}` },
      el("p", { class: "came-to" }, badge(run.kind), ` ${run.kind.label} `, el("small", {}, run.kind.means)),
      button("Close", () => byId("cell").close(), { class: "close", "aria-label": "Close", title: "Close (Escape)" })),
    el("h2", { id: "cell-title", tabindex: "-1" }, ...breakable(run.cell)),
    siblings(app, run),
    part("Reason", run.reason && el("p", { class: "reason" }, visible(run.reason))),
    part("First mismatch", firstMismatch(run)),
    part("Run it again", againLine(run)),
    part("Where its ranks were", places(run)),
    part("End of the log", logTail(run.ending.log_tail)),
    part("First try", firstTry(run)),
    part("Checks", checkTable(app, run)),
    part("Losses", lossChart(run.losses), facts(run, LOSSES, (value) => String(value))),
    el("div", { class: "pair" },
      part("Times, slowest rank", timeTable(run, metricsIn(app, ["s"]))),
      part("Sizes", facts(run, metricsIn(app, ["bytes"]), bytes)),
      part("Other metrics", facts(run, metricsIn(app, [""]), number))),
    part("Configuration", configurationOf(app, run)),
    part("Measured with", facts(run, ORIGIN, plain)),
  ].filter(Boolean);
}

// Where the reason does not tell it already.
function firstMismatch(run) {
  const first = run.first_mismatch;
  return first && !String(run.reason).includes(first) ? el("p", { class: "reason" }, visible(first)) : null;
}

function part(title, ...content) {
  const there = content.filter(Boolean);
  return there.length ? el("section", {}, el("h3", {}, title), ...there) : null;
}

function facts(run, names, text) {
  const known = names.filter((name) => isMeasured(run[name]));
  return known.length ? factList(known.map((name) => [name, text(run[name])])) : null;
}

// The other runs of its square.
function siblings(app, run) {
  const same = app.runs.filter(placeOf(app, run).hasToo);
  if (same.length < 2) return null;
  const differ = [...app.names, "repeat"].filter((axis) => new Set(same.map((one) => valueOf(one, axis))).size > 1);
  const label = (one) => (differ.length ? describe(one, differ) : `run ${same.indexOf(one) + 1}`);
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
  const copied = button("Copy", async () => {
    copied.textContent = (await copy(run.again)) ? "Copied" : "Select it and copy";
    say(copied.textContent);
  }, { class: "copy" });
  return el("div", { class: "again" }, el("code", {}, visible(run.again)), copied);
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const code = byId("cell").querySelector(".again code");
    getSelection().selectAllChildren(code);
    return document.execCommand("copy");
  }
}

function checkTable(app, run) {
  const names = app.checks.map(({ name }) => name);
  const applied = names.filter((check) => run[check] !== null);
  const rest = names.filter((check) => run[check] === null);
  const note = rest.length ? el("p", { class: "note" }, `Did not apply: ${rest.join(", ")}.`) : null;
  if (!applied.length) return note && el("p", { class: "note" }, "No check was made.");
  return el("div", {},
    el("div", { class: "scrolls" }, el("table", { class: "plain checks" },
      el("thead", {}, el("tr", {}, columnHeads(["check", "held", "could be seen to differ", "mismatches"]))),
      el("tbody", {}, ...applied.flatMap((check) => checkLines(app, run, check))))),
    note);
}

function checkLines(app, run, check) {
  const seen = run.check_details[check] ?? { names: null, missed_count: 0, missed: [], mismatches: null, worst: [] };
  const held = run[check];
  return [
    el("tr", {}, el("th", { scope: "row", title: app.checks.find(({ name }) => name === check).help }, check),
      el("td", {}, held ? "yes" : el("strong", { class: "no" }, "NO")),
      el("td", {}, power(seen)),
      el("td", {}, isMeasured(seen.mismatches) ? String(seen.mismatches) : DASH)),
    seen.missed.length ? under(`Not seen by its control: ${missedNames(seen)}`) : null,
    ...seen.worst.map((one) => under(mismatch(one))),
  ];
}

function power(seen) {
  if (seen.names === 0) return "no control ran";
  return seen.names ? `${seen.names - seen.missed_count} of ${seen.names} names` : DASH;
}

function missedNames(seen) {
  const more = seen.missed_count - seen.missed.length;
  return seen.missed.map(visible).join(", ") + (more > 0 ? ` and ${more} more` : "");
}

function under(text) {
  return el("tr", { class: "under" }, el("td", { colspan: "4" }, text));
}

function mismatch(one) {
  const ranks = Array.isArray(one.ranks) ? one.ranks : isMeasured(one.rank) ? [one.rank] : [];
  const isTold = !isMeasured(one.max_abs_diff) || String(one.what).includes("at most");
  const parts = [
    [one.name, one.where].filter(Boolean).join(" "),
    one.what,
    ranks.length ? `rank ${ranks.join(", ")}` : null,
    isTold ? null : `at most ${number(one.max_abs_diff)} apart`,
  ];
  return visible(parts.filter(Boolean).join("; "));
}

function metricsIn(app, units) {
  return app.metrics.filter(({ unit }) => units.includes(unit)).map(({ name }) => name);
}

function timeTable(run, names) {
  const known = names.filter((name) => isMeasured(run[name]));
  const high = known.reduce((most, name) => Math.max(most, run[name]), 0) || 1;
  return known.length ? el("table", { class: "plain times" }, el("tbody", {}, ...known.map((name) => el("tr", {},
    el("th", { scope: "row" }, name), el("td", { class: "n" }, seconds(run[name])),
    el("td", { class: "bar" }, svg("svg", { class: "strip", "aria-hidden": "true" },
      svg("rect", { x: 0, y: 4, height: 8, width: `${((100 * run[name]) / high).toFixed(1)}%` }))))))) : null;
}

function firstTry(run) {
  const first = run.ending.first_try;
  if (!first) return null;
  const checks = first.failed_checks ?? [];
  return el("div", {},
    el("p", {}, badge(kindOf(first.status)), ` ${plain(first.status)}`,
      isMeasured(first.cell_s) ? ` after ${seconds(first.cell_s)}` : "",
      checks.length ? `; did not hold: ${checks.join(", ")}` : ""),
    first.reason ? el("p", { class: "reason" }, visible(first.reason)) : null,
    logTail(first.log_tail));
}

function places(run) {
  const { doing, rank, phase, limit, upload_under_way: upload } = run.ending;
  const saving = upload ? ", while a save was still being written" : "";
  const first = isMeasured(phase) ? el("p", {}, `First: rank ${plain(rank)} in ${plain(phase)}${saving}.`) : null;
  const ran = isMeasured(limit) ? el("p", {}, `Limit: ${plain(limit)}.`) : null;
  const ranks = Object.entries(doing ?? {});
  const list = ranks.length ? factList(ranks.map(([name, frame]) => [`rank ${plain(name)}`, plain(frame)])) : null;
  return first || ran || list ? el("div", {}, first, ran, list) : null;
}

function logTail(lines) {
  const text = lines?.map(visible).join("\n").trimEnd();
  return text ? el("pre", { class: "log", tabindex: "0", "aria-label": "End of the log" }, text) : null;
}

function configurationOf(app, run) {
  return el("div", {},
    facts(run, [...app.names, "repeat"], plain),
    el("p", {}, "Overrides: ", el("code", {}, plain(run.overrides))));
}
