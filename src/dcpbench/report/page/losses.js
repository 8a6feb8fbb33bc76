// The losses of one run as curves: uninterrupted, its unwrapped twin, and each resumed run.

const WIDTH = 640;
const HEIGHT = 220;
const LEFT = 64;
const BOTTOM = 26;
const EDGE = 10;
// The widest curve is drawn first, so that equal curves are all visible.
const CURVES = { twin: "unwrapped twin", continued: "uninterrupted, with its saves", resumed: "resumed from a checkpoint" };
const MARKED = { saved: "saved after step", stopped: "stopped before step", loaded: "loaded the state after step" };

function lossChart(curves, marks = {}) {
  const all = curves.flatMap(points);
  if (all.length === 0) return null;
  const scale = lossScale(all);
  const drawn = Object.keys(CURVES).flatMap((name) => curves.filter((curve) => curve.name === name));
  const others = curves.filter((curve) => !(curve.name in CURVES));
  const label = `Losses of steps ${scale.first} to ${scale.last}, from ${number(scale.low)} to ${number(scale.high)}`;
  return el("figure", { class: "losses" },
    svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label },
      ...lossAxes(scale), ...lossMarks(marks, scale), ...[...others, ...drawn].map((curve) => lossCurve(curve, scale))),
    el("figcaption", {}, ...[...new Set(curves.map((curve) => curve.name))].map(lossKey), ...Object.keys(MARKED).map((name) => markKey(name, marks))));
}

// A checkpoint of step 8 is saved, and loaded, after step 8; a run is stopped before its step.
function lossMarks(marks, scale) {
  return Object.keys(MARKED).flatMap((name) => (marks[name] ?? []).map((step) => {
    const at = scale.x(step + (name === "stopped" ? -0.5 : 0.5));
    return at >= LEFT && at <= WIDTH && svg("line", { class: `mark m-${name}`, x1: at, x2: at, y1: name === "saved" ? HEIGHT - BOTTOM - 12 : EDGE, y2: HEIGHT - BOTTOM });
  }));
}

function markKey(name, marks) {
  return marks[name]?.length > 0 && el("span", { class: "key" },
    svg("svg", { width: 12, height: 12, "aria-hidden": "true" }, svg("line", { class: `mark m-${name}`, x1: 6, x2: 6, y1: 0, y2: 12 })),
    ` ${MARKED[name]} ${marks[name].length > 6 ? counted(marks[name].length, "time") : marks[name].join(", ")}`);
}

function points(curve) {
  const all = curve.losses.map((loss, i) => ({ step: curve.first + i * curve.every, loss }));
  return all.filter((point) => isMeasured(point.loss));
}

function lossScale(all) {
  const extent = (values) => [values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))];
  const [first, last] = extent(all.map((point) => point.step));
  const [low, high] = extent(all.map((point) => point.loss));
  const x = (step) => LEFT + EDGE + ((WIDTH - LEFT - 2 * EDGE) * (step - first)) / Math.max(1, last - first);
  const y = (loss) => HEIGHT - BOTTOM - EDGE - ((HEIGHT - BOTTOM - 2 * EDGE) * (loss - low)) / (high - low || 1);
  return { first, last, low, high, x, y };
}

function lossAxes(scale) {
  const losses = [...new Set([0, 0.5, 1].map((part) => scale.low + part * (scale.high - scale.low)))];
  const every = Math.max(1, Math.ceil((scale.last - scale.first) / 10));
  const steps = [];
  for (let step = scale.first; step <= scale.last; step += every) steps.push(step);
  return [
    ...losses.flatMap((loss) => [
      svg("line", { class: "ground", x1: LEFT, x2: WIDTH, y1: scale.y(loss), y2: scale.y(loss) }),
      svg("text", { x: LEFT - 6, y: scale.y(loss) + 4, "text-anchor": "end" }, number(loss, 4))]),
    ...steps.map((step) => svg("text", { x: scale.x(step), y: HEIGHT - 8, "text-anchor": "middle" }, String(step))),
    svg("text", { x: 0, y: HEIGHT - 8 }, "step"),
  ];
}

function lossCurve(curve, scale) {
  const all = points(curve);
  const line = all.map((point) => `${scale.x(point.step).toFixed(1)},${scale.y(point.loss).toFixed(1)}`).join(" ");
  const marks = curve.name === "resumed" && all.length <= 50
    ? all.map((point) => svg("circle", { cx: scale.x(point.step), cy: scale.y(point.loss), r: 4 })) : [];
  return svg("g", { class: `curve c-${curveClass(curve.name)}` }, svg("polyline", { points: line }), ...marks);
}

function lossKey(name) {
  return el("span", { class: "key" },
    svg("svg", { width: 28, height: 12, "aria-hidden": "true" }, svg("g", { class: `curve c-${curveClass(name)}` },
      svg("polyline", { points: "1,6 27,6" }), name === "resumed" ? svg("circle", { cx: 14, cy: 6, r: 4 }) : null)),
    ` ${CURVES[name] ?? plain(name)}`);
}

function curveClass(name) {
  return name in CURVES ? name : "other";
}
