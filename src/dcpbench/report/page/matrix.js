// The heat map: one square for each pair of row and column values, coloured by its worst run.

function isInjected(run) {
  return run.fault !== null;
}

function isIn(run, { injected, scenarios }) {
  return (injected === null || injected === isInjected(run)) && (!scenarios || scenarios.includes(valueOf(run, "scenario")));
}

// The matrix that contains a run, and whether its square there has another run too.
function placeOf(app, run) {
  const layout = app.matrices.find((one) => isIn(run, one));
  const along = [...layout.rows, ...layout.columns];
  const square = configuration(run, along);
  const hasToo = (other) => isIn(other, layout) && configuration(other, along) === square;
  return { id: layout.injected ? "faults" : "matrix", hasToo };
}

function drawMatrix(app, shown) {
  const parts = matricesOf(app, false, shown);
  byId("matrix-section").hidden = parts.length === 0;
  fill(byId("matrix"), ...parts.map((part) => el("div", { class: "part" }, ...part)));
  const counts = [...byId("matrix").querySelectorAll(".square small")].map((small) => small.textContent);
  const notes = [
    counts.some((text) => text.startsWith(TIMES)) && `${TIMES}n: n runs, all with this status.`,
    counts.some((text) => text.includes("/")) && "n/m: n of m runs have this status, the worst of them.",
    byId("matrix").querySelector(".gap") && ["An empty square: this sweep has no cell there",
      !app.complete && ", or it did not run yet", shown.length < app.runs.length && ", or the filters hide it", "."].filter(Boolean).join(""),
  ].filter(Boolean);
  if (notes.length) byId("matrix").append(el("p", { class: "note" }, notes.join(" ")));
}

// The matrices of runs with an injected fault, or of the others, as the data lay them out.
function matricesOf(app, injected, shown) {
  const layouts = app.matrices.filter((layout) => Boolean(layout.injected) === injected);
  return layouts.map((layout) => matrixOf(app, layout, shown)).filter((part) => part.length);
}

// The matrix of the runs that belong to it, and its folded axes.
function matrixOf(app, layout, shown) {
  const runs = shown.filter((run) => isIn(run, layout));
  if (!runs.length) return [];
  const rows = combinations(app, runs, layout.rows);
  const columns = combinations(app, runs, layout.columns);
  const placed = [...layout.rows, ...layout.columns];
  const squares = groupBy(runs, (run) => configuration(run, placed));
  const of = (values) => squares.get(values.join("\u0000"));
  const body = rows.map((row, number) => el("tr", {},
    ...rowHeaders(rows, number),
    layout.rows.length === 0 && el("th", { scope: "row" }, "all"),
    ...columns.map((column) => el("td", {}, square(app, of([...row, ...column]), [...row, ...column])))));
  const title = layout.injected ? "Injected faults" : layout.scenarios?.join(", ") ?? "Matrix";
  const table = el("table", {
    class: `matrix ${sizeFor(columns.length)} ${rows.length > 30 ? "dense" : ""}`,
    role: "grid", "aria-label": title, keydown: walk,
  }, el("thead", {}, ...headers(layout, columns)), el("tbody", {}, ...body));
  table.querySelector(".square")?.setAttribute("tabindex", "0");
  return [
    layout.scenarios && el("h3", {}, el("span", {}, "scenario "), visible(title)),
    layout.folded.length > 0 && el("p", { class: "note" }, `Folded: ${layout.folded.join(", ")}. A square shows the worst of its runs.`),
    scroller(null, table),
  ];
}

function sizeFor(columns) {
  return columns <= 8 ? "large" : columns <= 20 ? "medium" : "small";
}

// The combinations of values that exist, in the order of the axes' values.
function combinations(app, runs, along) {
  const seen = new Map(runs.map((run) => [configuration(run, along), along.map((axis) => valueOf(run, axis))]));
  const places = along.map((axis) => new Map(app.axes.get(axis).map((value, place) => [value, place])));
  const compare = (a, b) => {
    const at = places.findIndex((place, i) => a[i] !== b[i]);
    return at < 0 ? 0 : places[at].get(a[at]) - places[at].get(b[at]);
  };
  return [...seen.values()].sort(compare);
}

// How many combinations from this one on have the same values up to this axis; 0 if it is not the first.
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
        title: plain(column[depth]),
      }, el("span", {}, plain(column[depth])));
    })));
  const status = el("th", { scope: "col" }, el("span", { class: "hidden" }, "status"));
  return lines.length ? lines : [el("tr", {}, corners(layout.rows, null), status)];
}

function corners(rows, column) {
  const names = rows.length ? rows : [""];
  const next = (i) => i === names.length - 1 && column && el("span", {}, column);
  const both = (name, i) => el("span", { class: "ends" }, el("span", {}, name), next(i));
  return names.map((name, i) => el("td", { class: "corner" }, both(name, i)));
}

function square(app, runs, values) {
  if (!runs) return el("span", { class: "gap" }, el("span", { class: "hidden" }, "no such cell"));
  const kind = worst(runs);
  const equal = runs.filter((run) => run.kind === kind || run.kind.name === kind.name).length;
  const mixed = equal < runs.length;
  const name = values.length ? `${values.map(plain).join(", ")}: ` : "";
  const count = runs.length > 1 ? `, ${mixed ? `${equal} of ${runs.length}` : runs.length} runs` : "";
  const label = name + kind.label + count;
  const small = runs.length > 1 && el("small", {}, mixed ? `${equal}/${runs.length}` : `${TIMES}${runs.length}`);
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
  const next = (squares, ahead) => {
    const at = squares.indexOf(event.target);
    return ahead ? squares.slice(at + 1).find(Boolean) : squares.slice(0, at).findLast(Boolean);
  };
  const steps = {
    ArrowLeft: () => next(line, false), ArrowRight: () => next(line, true),
    ArrowUp: () => next(column, false), ArrowDown: () => next(column, true),
    Home: () => line.find(Boolean), End: () => line.findLast(Boolean),
  };
  if (!(event.key in steps)) return;
  event.preventDefault();
  focusSquare(steps[event.key]());
}

function focusSquare(target) {
  if (!target) return;
  for (const other of target.closest("table").querySelectorAll(".square[tabindex='0']")) other.setAttribute("tabindex", "-1");
  target.setAttribute("tabindex", "0");
  target.focus();
}
