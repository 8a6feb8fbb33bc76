// The page: unpack the rows, read the state from the address, draw both.

start().catch((error) => {
  byId("trouble").hidden = false;
  byId("trouble").textContent = `The rows cannot be shown: ${error.message}. They are in results.csv as well.`;
});

async function start() {
  makeTheme();
  if (typeof DecompressionStream === "undefined") throw new Error("it needs a browser of 2023 or later");
  const app = makeApp(await unpack(byId("rows").textContent.trim()));
  byId("app").hidden = false;
  drawChanges(app);
  makeFilters(app);
  makeDialog(app);
  drawEnvironment(app);
  byId("skip").addEventListener("click", (event) => { event.preventDefault(); byId("matrix-title").focus(); });
  addEventListener("popstate", () => followAddress(app));
  draw(app);
  drawCell(app);
  document.documentElement.dataset.ready = "true";
  performance.mark("drawn");
}

function makeApp(data) {
  readStatuses(data.statuses);
  const runs = runsOf(data);
  const axes = axesOf(data.axes, runs);
  for (const run of runs) run.place = configuration(run, data.axes);
  const app = {
    runs, axes, names: data.axes, varying: data.varying, matrices: data.matrices, checks: data.checks, metrics: data.metrics,
    environments: data.environments, leftOut: data.left_out, changes: data.changes, complete: data.complete,
    state: readState(location.hash), opener: null,
  };
  // Filters replace the address; an opened cell can be closed with Back.
  app.change = (how) => { how(app.state); remember(app, "replaceState"); draw(app); };
  app.open = (run) => {
    app.opener = document.activeElement;
    app.state.cell = run.key;
    remember(app, "pushState");
    drawCell(app);
  };
  app.replace = (run) => { app.state.cell = run.key; remember(app, "replaceState"); drawCell(app); };
  app.closed = () => closed(app);
  return app;
}

function remember(app, how) {
  history[how](null, "", `#${writeState(app.state)}`);
}

// The page is drawn again only if the filters changed, which keeps the focus.
function followAddress(app) {
  const view = (state) => writeState({ ...state, cell: "" });
  const before = view(app.state);
  app.state = readState(location.hash);
  if (view(app.state) !== before) draw(app);
  drawCell(app);
}

function closed(app) {
  const { cell } = app.state;
  if (cell) {
    app.state.cell = "";
    remember(app, "replaceState");
  }
  // The browser restores the focus, except to a square when an address opened the cell.
  const back = app.opener?.isConnected ? app.opener : squareOf(app, cell);
  app.opener = null;
  if (back?.matches(".square")) focusSquare(back);
}

function squareOf(app, cell) {
  const run = app.runs.find((one) => one.key === cell);
  if (!run) return undefined;
  const { id, hasToo } = placeOf(app, run);
  return [...byId(id).querySelectorAll(".square")].find(
    (square) => app.runs.some((one) => one.key === square.dataset.key && hasToo(one)));
}

function draw(app) {
  const shown = app.runs.filter((run) => fits(run, app.state));
  updateFilters(app, shown);
  if (areStops(app.runs)) {
    drawStops(app, shown);
    return;
  }
  drawMatrix(app, shown);
  drawFindings(app, shown);
  drawChecks(app, shown);
  drawKnown(app, shown);
  drawFaults(app, shown);
  drawCosts(app, shown);
}

function say(text) {
  byId("announcement").textContent = text;
}

function makeTheme() {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
  const name = () => { byId("theme").textContent = isDark() ? "Light" : "Dark"; };
  const stored = attempt(() => localStorage.getItem("dcpbench-theme"));
  if (stored === "dark" || stored === "light") root.dataset.theme = stored;
  byId("theme").addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    attempt(() => localStorage.setItem("dcpbench-theme", root.dataset.theme));
    name();
  });
  dark.addEventListener("change", name);
  name();
}

// A browser can deny storage to a file.
function attempt(action) {
  try {
    return action();
  } catch {
    return null;
  }
}
