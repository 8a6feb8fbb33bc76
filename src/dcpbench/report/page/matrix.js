// The heat map: one square for each pair of a row's and a column's values, coloured by its worst run.

const ROW_AXES = ["fault", "scenario", "parallel", "model"];
const FOLDED = "folded";

// Few and full rows and columns read best; a column costs more than a row, since pages are taller than wide.
function chooseLayout(runs, axes) {
  const names = varying(axes);
  const first = [...ROW_AXES.filter((axis) => names.includes(axis)), ...names.filter((axis) => !ROW_AXES.includes(axis))];
  const pairs = first.slice(0, 3).flatMap((a, i) => first.slice(i + 1, 3).map((b) => [a, b]));
  const candidates = [...first.map((axis) => [axis]), ...pairs];
  let best = { rows: [], columns: names, cost: Infinity };
  for (const rows of candidates) {
    const columns = names.filter((axis) => !rows.includes(axis));
    const count = (along) => new Set(runs.map((run) => configuration(run, along))).size;
    const cost = count(rows) + 2 * count(columns) + 2 * (rows.length - 1) + first.indexOf(rows[0]) / 10;
    if (cost < best.cost) best = { rows, columns, cost };
  }
  return { rows: best.rows, columns: best.columns };
}

function layoutOf(app) {
  const known = (axes) => axes.filter((axis) => app.varying.includes(axis));
  const { rows, columns } = app.state;
  if (!rows && !columns) return app.layout;
  return { rows: known(rows ?? []), columns: known(columns ?? []).filter((axis) => !rows?.includes(axis)) };
}

function makeArrange(app) {
  if (app.varying.length < 2) return;
  const selects = app.varying.map((axis) => el("label", {}, el("span", {}, axis), el("select", {
    "data-axis": axis, change: (event) => arrange(app, axis, event.target.value),
  }, ...["rows", "columns", FOLDED].map((place) => el("option", { value: place }, place)))));
  fill(byId("arrange"), el("details", { class: "menu right" }, el("summary", {}, "Arrange axes"),
    el("div", { class: "popup arrange" }, ...selects,
      el("p", {}, "A folded axis has no place of its own: a square shows the worst of its runs."),
      button("As chosen for this sweep", () => app.change(forgetLayout), { class: "quiet" }))));
}

function forgetLayout(state) {
  state.rows = null;
  state.columns = null;
}

function arrange(app, axis, place) {
  const now = layoutOf(app);
  app.change((state) => {
    state.rows = now.rows.filter((name) => name !== axis);
    state.columns = now.columns.filter((name) => name !== axis);
    if (place !== FOLDED) state[place].push(axis);
    for (const along of ["rows", "columns"]) state[along].sort((a, b) => app.varying.indexOf(a) - app.varying.indexOf(b));
  });
}

function drawMatrix(app, shown) {
  const layout = layoutOf(app);
  for (const select of byId("arrange").querySelectorAll("select")) {
    select.value = ["rows", "columns"].find((place) => layout[place].includes(select.dataset.axis)) ?? FOLDED;
  }
  byId("matrix-section").hidden = shown.length === 0;
  const rows = combinations(app, shown, layout.rows);
  const columns = combinations(app, shown, layout.columns);
  const squares = groupBy(shown, (run) => `${configuration(run, layout.rows)}\u0001${configuration(run, layout.columns)}`);
  const of = (row, column) => squares.get(`${row.join("\u0000")}\u0001${column.join("\u0000")}`);
  const body = rows.map((row, number) => el("tr", {},
    ...rowHeaders(rows, number),
    layout.rows.length === 0 && el("th", { scope: "row" }, "all"),
    ...columns.map((column) => el("td", {}, square(app, of(row, column), [...row, ...column])))));
  const table = el("table", {
    class: `matrix ${sizeFor(columns.length)} ${rows.length > 30 ? "dense" : ""}`,
    role: "grid", "aria-labelledby": "matrix-title", keydown: walk,
  }, el("thead", {}, ...headers(layout, columns)), el("tbody", {}, ...body));
  fill(byId("matrix"), table);
  table.querySelector(".square")?.setAttribute("tabindex", "0");
}

function sizeFor(columns) {
  return columns <= 8 ? "large" : columns <= 20 ? "medium" : "small";
}

// The combinations of values that are there, in the order of the axes' values.
function combinations(app, runs, along) {
  const seen = new Map(runs.map((run) => [configuration(run, along), along.map((axis) => valueOf(run, axis))]));
  const places = along.map((axis) => new Map(app.axes.get(axis).map((value, place) => [value, place])));
  const compare = (a, b) => {
    const at = places.findIndex((place, i) => a[i] !== b[i]);
    return at < 0 ? 0 : places[at].get(a[at]) - places[at].get(b[at]);
  };
  return [...seen.values()].sort(compare);
}

// How many combinations from this one on have the same values up to this axis; 0 where it is not the first.
function spanAt(all, number, depth) {
  const same = (a, b) => b && a.slice(0, depth + 1).every((value, i) => value === b[i]);
  if (same(all[number], all[number - 1])) return 0;
  let end = number + 1;
  while (end < all.length && same(all[number], all[end])) end += 1;
  return end - number;
}

function rowHeaders(rows, number) {
  return rows[number].map((value, depth) => {
    const span = spanAt(rows, number, depth);
    return span > 0 && el("th", { scope: span > 1 ? "rowgroup" : "row", rowspan: span }, plain(value));
  });
}

function headers(layout, columns) {
  const width = Math.max(1, layout.rows.length);
  const upright = (depth) => columns.length > 8 && columns.some((column) => column[depth].length > 4);
  const lines = layout.columns.map((axis, depth) => el("tr", {},
    depth < layout.columns.length - 1
      ? el("td", { class: "corner", colspan: width }, axis)
      : corners(layout.rows, axis),
    ...columns.map((column, number) => {
      const span = spanAt(columns, number, depth);
      return span > 0 && el("th", {
        scope: span > 1 ? "colgroup" : "col", colspan: span, class: upright(depth) && span === 1 && "upright",
      }, el("span", {}, plain(column[depth])));
    })));
  const status = el("th", { scope: "col" }, el("span", { class: "hidden" }, "status"));
  return lines.length ? lines : [el("tr", {}, corners(layout.rows, null), status)];
}

function corners(rows, column) {
  const names = rows.length ? rows : [""];
  const beside = (i) => i === names.length - 1 && column && el("span", {}, column);
  const both = (name, i) => el("span", { class: "ends" }, el("span", {}, name), beside(i));
  return names.map((name, i) => el("td", { class: "corner" }, both(name, i)));
}

function square(app, runs, values) {
  if (!runs) return el("span", { class: "gap" }, el("span", { class: "hidden" }, "no run"));
  const kind = worst(runs);
  const alike = runs.filter((run) => run.kind === kind || run.kind.name === kind.name).length;
  const mixed = alike < runs.length;
  const name = values.length ? `${values.map(plain).join(", ")}: ` : "";
  const count = runs.length > 1 ? `, ${mixed ? `${alike} of ${runs.length}` : runs.length} runs` : "";
  const label = name + kind.label + count;
  const small = runs.length > 1 && el("small", {}, mixed ? `${alike}/${runs.length}` : `${TIMES}${runs.length}`);
  return button([kind.letter, small], () => app.open(runs.find((run) => run.kind.name === kind.name)), {
    class: `square s-${kind.name}`, "aria-label": label, title: label, tabindex: "-1", "data-key": runs[0].key,
  });
}

// Arrow keys walk from square to square, over gaps; Home and End go to the ends of a row.
function walk(event) {
  if (!event.target.matches(".square")) return;
  const lines = [...event.currentTarget.tBodies[0].rows].map(
    (row) => [...row.querySelectorAll("td")].map((cell) => cell.querySelector(".square")));
  const line = lines.find((squares) => squares.includes(event.target));
  const column = lines.map((squares) => squares[line.indexOf(event.target)]);
  const beside = (squares, ahead) => {
    const at = squares.indexOf(event.target);
    return ahead ? squares.slice(at + 1).find(Boolean) : squares.slice(0, at).findLast(Boolean);
  };
  const steps = {
    ArrowLeft: () => beside(line, false), ArrowRight: () => beside(line, true),
    ArrowUp: () => beside(column, false), ArrowDown: () => beside(column, true),
    Home: () => line.find(Boolean), End: () => line.findLast(Boolean),
  };
  if (!(event.key in steps)) return;
  event.preventDefault();
  focusSquare(steps[event.key]());
}

function focusSquare(target) {
  if (!target) return;
  for (const other of byId("matrix").querySelectorAll(".square[tabindex='0']")) other.setAttribute("tabindex", "-1");
  target.setAttribute("tabindex", "0");
  target.focus();
}
