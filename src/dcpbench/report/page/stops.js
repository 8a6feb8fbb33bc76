// The stops of a script, each in full, in place of the matrix.

function areStops(runs) {
  return runs.length > 0 && runs.every((run) => run.cell.startsWith("stop="));
}

function drawStops(app, shown) {
  const all = [byId("skip"), byId("matrix-title"), byId("search")];
  [all[0].textContent, all[1].textContent, all[2].placeholder] = ["Skip to the stops", "Stops", "Search stops and reasons"];
  all[2].setAttribute("aria-label", all[2].placeholder);
  byId("matrix-section").hidden = shown.length === 0;
  byId("matrix-section").classList.add("of-stops");
  for (const id of ["findings", "known", "checks", "faults", "costs"]) byId(id).hidden = true;
  fill(byId("matrix"), ...shown.map((run) => el("article", { class: "stop", "data-key": run.key },
    el("h3", {}, badge(run.kind), ` ${visible(run.cell.slice("stop=".length))} `, el("b", {}, plain(run.verdict))),
    ...stopParts(app, run).filter(Boolean))));
}

function stopParts(app, run) {
  const { issue, differs, marks, after_repair: command } = run.ending;
  return [
    el("p", { class: "reason" }, visible(run.reason.replace(`${run.verdict}: `, ""))),
    part("Likely cause", ...run.causes.map((cause) => el("p", {}, visible(cause)))),
    part("Losses of the first rank", lossChart(run.losses, marks)),
    part("All that differs at the first step", differs?.length > 0 && el("ul", {}, ...differs.map((line) => el("li", {}, visible(line))))),
    command && part("After a repair", commandLine(command)),
    part("Run it again", againLine(run)),
    part("Log", logTail(run.ending.log_tail), logPath(app, run), issue && el("p", {}, "To report it: ", fileLink(app, run, issue))),
  ];
}
