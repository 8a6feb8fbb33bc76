// The reader's choices: kept in the address after #, so that a link reproduces them.

const AXIS = "axis.";

function emptyState() {
  return { text: "", statuses: new Set(), values: new Map(), sort: "", log: null, cell: "" };
}

function readState(hash) {
  const state = emptyState();
  for (const [name, value] of new URLSearchParams(hash.replace(/^#/, ""))) {
    if (name === "q") state.text = value;
    else if (name === "status") state.statuses.add(value);
    else if (name === "sort") state.sort = value;
    else if (name === "scale") state.log = value === "log";
    else if (name === "cell") state.cell = value;
    else if (name.startsWith(AXIS)) chosen(state, name.slice(AXIS.length)).add(value);
  }
  return state;
}

function writeState(state) {
  const parts = new URLSearchParams();
  if (state.text) parts.append("q", state.text);
  for (const status of state.statuses) parts.append("status", status);
  for (const [axis, values] of state.values) for (const value of values) parts.append(AXIS + axis, value);
  if (state.sort) parts.append("sort", state.sort);
  if (state.log !== null) parts.append("scale", state.log ? "log" : "linear");
  if (state.cell) parts.append("cell", state.cell);
  return String(parts);
}

function chosen(state, axis) {
  if (!state.values.has(axis)) state.values.set(axis, new Set());
  return state.values.get(axis);
}

function toggle(set, value) {
  if (!set.delete(value)) set.add(value);
}

function isFiltered(state) {
  return Boolean(state.text || state.statuses.size || [...state.values.values()].some((values) => values.size));
}

function fits(run, state) {
  if (state.statuses.size && !state.statuses.has(run.kind.name)) return false;
  for (const [axis, values] of state.values) if (values.size && !values.has(valueOf(run, axis))) return false;
  return state.text.toLowerCase().split(/\s+/).every((word) => run.text.includes(word));
}
