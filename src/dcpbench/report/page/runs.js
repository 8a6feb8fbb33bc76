// The rows as runs, their statuses and the axes along which they differ.

// Worst first: a square with several runs shows the first of these that is the status of one of them.
const STATUSES = [
  { name: "missed", letter: "M", label: "fault missed", means: "a planted fault that no check saw" },
  { name: "crash", letter: "C", label: "crash", means: "a rank died" },
  { name: "timeout", letter: "T", label: "timeout", means: "a phase took longer than it may" },
  { name: "error", letter: "E", label: "error", means: "a rank raised" },
  { name: "fail", letter: "F", label: "fail", means: "a check did not hold" },
  { name: "vacuous", letter: "V", label: "vacuous", means: "a check could not have failed" },
  { name: "flaky", letter: "~", label: "flaky", means: "two tries came to different statuses" },
  { name: "xpass", letter: "X", label: "xpass", means: "a known failure did not happen" },
  { name: "xfail", letter: "x", label: "xfail", means: "a known failure happened" },
  { name: "skip", letter: "S", label: "skip", means: "cannot run here, or makes no sense" },
  { name: "seen", letter: "D", label: "fault detected", means: "a planted fault was seen for what it is" },
  { name: "pass", letter: "P", label: "pass", means: "every check held, and each could have failed" },
];
const UNKNOWN = { letter: "?", means: "a status that this page does not know" };
const KINDS = new Map(STATUSES.map((kind, rank) => [kind.name, { ...kind, rank }]));

function kindOf(status) {
  return KINDS.get(status) ?? { ...UNKNOWN, name: "unknown", label: plain(status), rank: -1 };
}

async function unpack(text) {
  const packed = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

// One object for each row; `kind` is its status as it is shown, `key` names it in an address.
function runsOf(data) {
  const names = Object.keys(data.columns);
  const several = new Set(data.columns.sweep).size > 1;
  return Array.from({ length: data.rows }, (_, index) => {
    const run = { index };
    for (const name of names) run[name] = data.columns[name][index];
    run.kind = kindOf(shownStatus(run));
    run.key = several ? `${run.sweep}/${run.cell}` : String(run.cell);
    run.text = [run.cell, run.status, run.kind.label, run.reason, run.overrides].join(" ").toLowerCase();
    return run;
  });
}

function shownStatus(run) {
  if (run.flaky === true) return "flaky";
  if (run.fault_seen === null) return run.status;
  return run.fault_seen ? "seen" : "missed";
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

function varying(axes) {
  return [...axes.keys()].filter((axis) => axes.get(axis).length > 1);
}

// A configuration by the axes along which the sweep differs and that say something of it; a value that does not speak
// for itself comes with the name of its axis.
function nameOf(app, run, axes = app.telling) {
  const known = axes.filter((axis) => valueOf(run, axis) !== DASH);
  const text = (axis, value) => (/^(true|false|[\d.]*)$/i.test(value) ? `${axis}=${value}` : visible(value));
  return known.map((axis) => text(axis, valueOf(run, axis))).join(" \u00b7 ") || plain(run.cell);
}

function describe(run, axes) {
  return axes.map((axis) => `${axis} ${plain(valueOf(run, axis))}`).join(", ");
}

// Runs of one configuration differ in nothing but `repeat`.
function configuration(run, axes) {
  return axes.map((axis) => valueOf(run, axis)).join("\u0000");
}
