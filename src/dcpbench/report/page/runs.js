// The rows as runs, their statuses and the axes along which they differ.

// The statuses that runs are shown with, the worst first: a square shows the worst of its runs.
const KINDS = new Map();

function readStatuses(statuses) {
  statuses.forEach((kind, rank) => KINDS.set(kind.name, { ...kind, rank }));
}

function kindOf(name, status = name) {
  return name !== "unknown" && KINDS.has(name) ? KINDS.get(name) : { ...KINDS.get("unknown"), label: plain(status) };
}

async function unpack(text) {
  const packed = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

// One object for each row; `kind` is the status it is shown with, `key` names it in an address.
function runsOf(data) {
  const names = Object.keys(data.columns);
  return Array.from({ length: data.rows }, (_, index) => {
    const run = { index };
    for (const name of names) run[name] = data.columns[name][index];
    run.kind = kindOf(run.shown, run.status);
    run.text = [run.cell, run.status, run.kind.label, run.reason, run.overrides].join(" ").toLowerCase();
    return run;
  });
}

function worst(runs) {
  return runs.reduce((a, b) => (b.kind.rank < a.kind.rank ? b : a)).kind;
}

function valueOf(run, axis) {
  return run[axis] === undefined || run[axis] === null ? DASH : String(run[axis]);
}

// Each axis with its values, in the order of the sweep, numbers by size.
function axesOf(names, runs) {
  return new Map(names.map((axis) => {
    const values = [...new Set(runs.map((run) => valueOf(run, axis)))];
    if (values.every((value) => value === DASH || Number.isFinite(Number(value)))) values.sort((a, b) => a - b);
    return [axis, values];
  }));
}

// The name of a column, or of a value of the environment, for a reader.
function labelOf(name) {
  return { target_commit: "target commit", dcpbench_commit: "dcpbench commit" }[name] ?? name;
}

// Runs of one configuration differ only in `repeat`.
function configuration(run, axes) {
  return axes.map((axis) => valueOf(run, axis)).join("\u0000");
}
